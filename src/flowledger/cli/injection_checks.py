"""Faults of a user's own, looked at before any run begins: their settings, their targets, and who they expect to notice."""

import importlib
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flowledger.diagnose.faults import Fault, changes_of, table
from flowledger.flow.errors import BadInput, nearest

FIXED = {
    "steps": "a run is as long as starts and takes_effect ask for; leave it out",
    "data.path": "the prompts of the small run are its own; leave it out",
}  # fmt: skip


def check(faults: Sequence[Fault], file: Path) -> None:
    """Raise BadInput with a line for each fault that could not be put in, or that nobody could be said to have noticed."""
    wrong = []
    for fault in faults:
        try:
            _check_config(fault)
            _check_targets(fault)
            _check_expects(fault)
        except BadInput as error:
            wrong.append(f"--faults {file}: {error}")
    if wrong:
        raise BadInput("\n".join(wrong))


def _check_config(fault: Fault) -> None:
    from flowledger.run.faults import small

    told = small.merged({}, fault.config)
    for key, why in FIXED.items():
        section, _, name = key.rpartition(".")
        if name in (told.get(section, {}) if section else told):
            raise BadInput(f"fault {fault.id!r}: config: {key}: {why}")
    with tempfile.TemporaryDirectory(prefix="flowledger-selftest-") as folder:
        try:
            small.settings(Path(folder), fault.effect + 1, 0, fault.config)
        except BadInput as error:
            raise BadInput(f"fault {fault.id!r}: config: {str(error).splitlines()[0]}") from None


def _check_targets(fault: Fault) -> None:
    from flowledger.flow.seams import Missed, locate

    if fault.patch is None or isinstance(fault.patch, str):
        return
    for target in changes_of(fault):
        try:
            locate(target)
        except Missed:
            close = _near(target)
            raise BadInput(f"fault {fault.id!r}: there is no function {target} to be replaced{close}") from None


def _near(target: str) -> str:
    """The nearest function of the module, or the nearest module of the loop."""
    module, _, name = target.partition(":")
    try:
        return nearest(name, [one for one, found in vars(importlib.import_module(module)).items() if callable(found)])
    except ImportError:
        from pkgutil import iter_modules

        from flowledger import run

        return nearest(module, [f"{run.__name__}.{one.name}" for one in iter_modules(run.__path__)])


def _check_expects(fault: Fault) -> None:
    for name in fault.expects:
        if name not in findings_known():
            raise BadInput(
                f"fault {fault.id!r}: expects: no finding has the id {name!r}{nearest(name, sorted(findings_known()))}"
            )


@cache
def findings_known() -> frozenset[str]:
    """The ids that findings can have: asked of a run in which there is nothing, where each check says what it lacks."""
    from flowledger.diagnose import alarms
    from flowledger.diagnose.findings import findings
    from flowledger.diagnose.orders.evidence import ABOUT_RECORDING, ENDS
    from flowledger.diagnose.orders.table import orders
    from flowledger.ledger.directory import create
    from flowledger.ledger.manifest import Manifest
    from flowledger.ledger.reader import Ledger

    with tempfile.TemporaryDirectory(prefix="flowledger-selftest-") as folder:
        create(Path(folder) / "run", Manifest(run="nothing", framework="flowledger")).close()
        with Ledger(Path(folder) / "run") as ledger:
            asked = {one.id for one in (*findings(ledger), *alarms.check_all(ledger))}
    of_orders = {
        name for order in orders().values() for step in order.steps for name in step.findings if "*" not in name
    }
    expected = {name for fault in table()[0] for name in fault.expects}
    return frozenset(asked | of_orders | expected | {*ENDS, *ABOUT_RECORDING})
