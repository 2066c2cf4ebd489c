"""Everything that can be found out about a run from its ledger: one table of detectors, asked one after the other.

A detector that raises is a finding of its own, `detector_failed`: it hides none of what the others say.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules

from flowledger.diagnose import alarms, checks
from flowledger.diagnose.alarms.rules import Rule
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

Detector = Callable[[Ledger], list[FindingRow]]

# Modules of this room with a function `check(ledger)`, in the order in which they are asked; then those of `checks/`, and at
# last the alarms, for which metrics are recomputed.
FIRST = ("laws", "shapes", "balance", "waiting", "agreement")
LAST = ("alarms",)


@cache
def detectors() -> dict[str, Detector]:
    """Name -> detector. Loaded when they are asked for first: a verb that asks none does not wait for them."""
    own = (f"checks.{module.name}" for module in iter_modules(checks.__path__))
    modules = {name: import_module(f"flowledger.diagnose.{name}") for name in (*FIRST, *sorted(own), *LAST)}
    return {name: module.check for name, module in modules.items() if hasattr(module, "check")}


def findings(ledger: Ledger, *, rules: Sequence[Rule] | None = None, lang: str = "en") -> list[FindingRow]:
    """What every detector has to say, in the order of the table. `rules`: alarms in place of ours; `lang`: of their words."""
    ledger.settle("walked", "cut_steps")  # which steps are whole is asked with nearly every question
    asked = dict(detectors())
    if "alarms" in asked and (rules is not None or lang != "en"):
        asked["alarms"] = partial(alarms.check, rules=rules, lang=lang)
    return [finding for name, detector in asked.items() for finding in _asked(name, detector, ledger)]


def _asked(name: str, detector: Detector, ledger: Ledger) -> list[FindingRow]:
    try:
        return detector(ledger)
    except Exception as error:  # noqa: BLE001  whatever a ledger holds, the other detectors are asked
        return [
            FindingRow(
                id="detector_failed", verdict="skipped", severity="warning",
                message=f"the detector {name} raised {type(error).__name__}: {str(error)[:200]}",
                needs=[f"a detector {name} that takes this ledger: please report it"],
            )
        ]  # fmt: skip
