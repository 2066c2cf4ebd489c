"""What metrics are called in Prometheus: letters, digits and underscores, the unit at the end, no two alike."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

from flowledger.diagnose.alarms.numbers import numbers
from flowledger.tables.metrics import find

STAGE = "/<stage>"  # at the end of a metric's pattern
PREFIX = "flowledger_"
STEP = f"{PREFIX}step"  # the number of the step, which is exported beside the metrics


def metric_name(name: str) -> str:
    """`step_time_s` -> `flowledger_step_time_seconds`, `reward/mean` -> `flowledger_reward_mean`."""
    bare, row = name.rpartition("/")[0] if labels(name) else name, find(name)
    spelt = re.sub(r"[^a-zA-Z0-9_]", "_", bare)
    if not re.search(r"[a-zA-Z0-9]", spelt):
        return _escaped(name)
    unit = numbers()[name].unit if name in numbers() else row.unit if row else ""
    if unit == "s" and "seconds" not in spelt:
        spelt = f"{spelt.removesuffix('_s')}_seconds"
    elif unit == "bytes" and "bytes" not in spelt:
        spelt = f"{spelt}_bytes"
    return PREFIX + spelt


def metric_names(names: Collection[str]) -> Mapping[str, str]:
    """The name of each metric. Where two would be called alike, those that flowledger does not know itself are escaped whole.

    The form is that of Prometheus' own escaping: `U__`, `_` twice, any other sign by its number between two `_`.
    """
    found = {name: metric_name(name) for name in names}
    while True:
        used = Counter((spelt, labels(name).get("stage")) for name, spelt in found.items())
        alike = [
            name
            for name, spelt in found.items()
            if (used[spelt, labels(name).get("stage")] > 1 or spelt == STEP)
            and not _is_known(name)
            and spelt != _escaped(name)
        ]
        if not alike:
            return found
        found |= {name: _escaped(name) for name in alike}


def labels(name: str) -> dict[str, str]:
    """The labels that a name carries: of `stage_time_s/rollout` its stage."""
    row = find(name)
    return {"stage": name.rpartition("/")[2]} if row is not None and row.name.endswith(STAGE) else {}


def _is_known(name: str) -> bool:
    return name in numbers() or find(name) is not None


def _escaped(name: str) -> str:
    return f"{PREFIX}U__" + "".join(
        "__" if sign == "_" else sign if re.fullmatch(r"[a-zA-Z0-9]", sign) else f"_{ord(sign):X}_" for sign in name
    )
