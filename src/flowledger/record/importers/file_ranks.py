"""The rank and the step that a file's path names, for formats that say neither inside."""

import re
from pathlib import Path

from flowledger.record.importers.speakers import MOST_RANKS

# `job-worker-1_4711.1758…` is host and process as torch names a trace: a pod of Kubernetes, on which several ranks run.
_RANK = re.compile(
    r"(?<![a-z])(?:global_?)?(?:rank[-_.=]?(\d{1,6})(?!\d)|worker[-_.=]?(\d{1,6})(?!\d)(?!_\d+\.\d{6}))", re.IGNORECASE
)
_TP = re.compile(r"(?<![A-Za-z])TP[-_]?(\d{1,6})(?!\d)")  # SGLang's, where no other axis is named
_AXES = re.compile(r"(?<![A-Za-z])(?:PP|DP|EP|CP)[-_]?\d")
_STEP = re.compile(r"(?<![a-z])(?:global_?)?step[-_.=]?(\d{1,12})(?!\d)", re.IGNORECASE)


def rank_in(path: Path) -> int | None:
    """`torch_memory_rank3_pid17.pickle`, `rank-3.trace.json`, `rank_3/…`, `…-TP-3.trace.json`: 3. The last part that names one counts."""
    found = _last(_RANK, path)
    found = found if found is not None or _AXES.search(path.name) else _last(_TP, Path(path.name))
    return found if found is not None and found < MOST_RANKS else None


def step_in(path: Path) -> int | None:
    """`…/step12/…`: 12."""
    return _last(_STEP, path)


def _last(pattern: re.Pattern[str], path: Path) -> int | None:
    found = [*pattern.finditer("/".join(path.parts[-4:]))]
    return int(found[-1][found[-1].lastindex or 0]) if found else None
