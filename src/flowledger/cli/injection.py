"""One run of the loop with a fault in it (or none), recorded as any run is, and what is found in its ledger.

A fault that shows has its first sick step looked at, then a second: so the step in which it is found is known also where
a finding names none.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowledger.diagnose.faults import WITHIN, Clean, Fault, Outcome, changes_of, judged, silent, waiting
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import MANIFEST

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig
    from flowledger.ledger.rows import FindingRow

CLEAN_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was found in one recorded run, and how it ended where it did not end well."""

    found: "Sequence[FindingRow]"
    ended: str = ""


def run_fault(fault: Fault, *, seed: int = 0, keep: Path | None = None) -> Outcome:
    """Put one fault into a run and see who notices within two steps of its effect. `keep`: where its ledger stays."""
    if fault.needs:
        return waiting(fault)
    began, outcome = time.perf_counter(), None
    for extra in range(1, WITHIN + 1):
        steps = fault.effect + extra
        ran = recorded(fault, seed=seed, steps=steps, keep=keep)
        outcome = judged(fault, ran.found, steps=steps, ended=ran.ended)
        if outcome.status == "caught":
            break
    assert outcome is not None
    return replace(outcome, seconds=round(time.perf_counter() - began, 3))


def run_clean(clean: Clean, *, seed: int = 0, keep: Path | None = None) -> Outcome:
    """A run without a fault, and whatever is found in it."""
    began = time.perf_counter()
    ran = recorded(Fault(id=clean.name, what="", config=clean.config), seed=seed, steps=CLEAN_STEPS, keep=keep)
    outcome = silent(clean.name, ran.found, ended=ran.ended)
    return replace(outcome, seconds=round(time.perf_counter() - began, 3))


def recorded(fault: Fault, *, seed: int, steps: int, keep: Path | None = None) -> Ran:
    """Record a run of so many steps with this fault in it, and find what users would find.

    Raises BadInput where the fault's settings or targets are none.
    """
    from flowledger.diagnose.findings import findings
    from flowledger.diagnose.orders.kept import kept
    from flowledger.ledger.reader import Ledger
    from flowledger.run.faults import small

    with tempfile.TemporaryDirectory(prefix="flowledger-selftest-") as folder:
        try:
            made = small.settings(Path(folder), steps, seed, fault.config)
        except BadInput as error:
            raise BadInput(f"fault {fault.id!r}: config: {error}") from None
        path = Path(folder) / "run"
        ended = _trained(fault, made, path)
        with Ledger(path) as ledger:
            fresh = findings(ledger)
            found = [*fresh, *kept(ledger, fresh)]
        if keep is not None:
            keep_only(path, keep)
    return Ran(found=found, ended=ended)


def keep_only(run: Path, place: Path) -> None:
    """Copy a ledger to where it stays, in place of the one of a shorter run: rows of both together would say everything twice."""
    if (place / MANIFEST).exists():
        shutil.rmtree(place)
    shutil.copytree(run, place, dirs_exist_ok=True)


def _trained(fault: Fault, made: "RunConfig", path: Path) -> str:
    """Run the loop, on as many processes as its mesh has; returns how it ended where it did not end well."""
    many = made.mesh.dp * made.mesh.model
    if many > 1:
        from flowledger.cli import faulty_ranks

        return faulty_ranks.train(fault, made, path, many)
    return train_here(fault, made, path)


def train_here(fault: Fault, made: "RunConfig", path: Path) -> str:
    """The run in this process. What a fault makes it end with is no trouble of ours, and is returned in words."""
    from flowledger.cli.recorded import Recorded, train
    from flowledger.flow.seams import replaced

    book, state, ended = Recorded(), "crashed", ""
    try:
        with replaced(changes(fault)) as missed:
            refuse(fault, missed)
            train(made, path, book, quiet=True)
        state = "closed"
    except BadInput as error:
        if book.book is None:
            named = f"fault {fault.id!r}: "
            raise BadInput(named + str(error).removeprefix(named)) from None
        ended = str(error)
    except (Exception, SystemExit) as error:  # a sick loop may raise anything
        if book.book is None:
            raise
        ended = f"{type(error).__name__}: {error}"
    finally:
        book.close(state, book.wrote())
    return ended


def changes(fault: Fault) -> list[tuple[str, Any]]:
    """What the fault replaces, in the form of `flow.seams.replaced`, with rewards scored in the process itself."""
    from flowledger.run.faults.changes import from_step, named
    from flowledger.run.faults.small import HERE

    patch = fault.patch
    made = {} if patch is None else named(patch) if isinstance(patch, str) else changes_of(fault)
    return [*HERE, *from_step(made, fault.starts)]


def refuse(fault: Fault, missed: Sequence[str]) -> None:
    """Raise BadInput where a fault changes a function that is not there: it would be put in and change nothing."""
    if missed:
        raise BadInput(f"fault {fault.id!r}: there is no function {', '.join(missed)} to be replaced")
