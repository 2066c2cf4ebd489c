"""Many runs with faults in them, several at a time: workers are forked from a server that has imported the loop once."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowledger.diagnose.faults import Clean, Fault, Outcome, checked, table
from flowledger.flow.errors import BadInput

MOST = 4  # workers, where nobody has said how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One fault, or one clean run, as a worker is asked for it: by name, for functions from a file cannot be sent."""

    fault: str = ""
    file: Path | None = None  # that the fault stands in
    clean: Clean | None = None
    seeds: int = 1  # of a fault; of a clean run the seed
    keep: Path | None = None

    @property
    def name(self) -> str:
        return self.clean.name if self.clean else self.fault

    @property
    def many(self) -> bool:
        """Whether it has ranks of its own, which only the first process can start."""
        config = self.clean.config if self.clean else _found(self).config
        return any(key.startswith("mesh") for key in config)


def clean_runs(rows: Sequence[Clean], number: int, keep: Path | None, *, quick: bool) -> Iterator[Asked]:
    """So many runs, each with a seed of its own; the rows of the table again where there are fewer."""
    rows = [one for one in rows if one.quick] if quick else list(rows)
    for seed in range(number):
        one = rows[seed % len(rows)]
        named = one if seed < len(rows) else replace(one, name=f"{one.name}, seed {seed}")
        yield Asked(clean=named, seeds=seed, keep=None if keep is None else keep / f"clean-{seed}")


def outcomes(asked: Sequence[Asked], jobs: int | None, *, quiet: bool) -> list[Outcome]:
    """What became of each, in their order. Raises BadInput where a fault cannot be put in."""
    from flowledger.cli import faulty_ranks

    at_a_time = min(len(asked), jobs or min(MOST, os.cpu_count() or 1))
    if at_a_time < 2 and not any(one.file for one in asked):  # what is another's may end the process
        return [_told(number, asked, run(one), quiet=quiet) for number, one in enumerate(asked, 1)]
    made: dict[int, Outcome] = {}
    for number, one in enumerate(asked):
        if one.many:  # before the others: ranks that must share their cores look as if one of them were slow
            made[number] = _told(len(made) + 1, asked, run(one), quiet=quiet)
    with ProcessPoolExecutor(at_a_time, mp_context=faulty_ranks.server()) as pool:
        sent: dict[Future[Outcome], int] = {
            pool.submit(run, one): number for number, one in enumerate(asked) if not one.many
        }
        try:
            for done in as_completed(sent):
                made[sent[done]] = _told(len(made) + 1, asked, done.result(), quiet=quiet)
        except BrokenProcessPool:
            left = [one.name for number, one in enumerate(asked) if number not in made]
            raise BadInput(
                f"a process ended while a fault was in it, without an exception (os._exit, a signal): one of {', '.join(left[:5])}"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [made[number] for number in range(len(asked))]


def run(one: Asked) -> Outcome:
    """One of them, in this process. Of several seeds the worst, so that `caught` means with every one."""
    from flowledger.cli.injection import run_clean, run_fault

    if one.clean is not None:
        return run_clean(one.clean, seed=one.seeds, keep=one.keep)
    fault, worst = _found(one), None
    for seed in range(one.seeds):
        place = None if one.keep is None else one.keep / (fault.id if one.seeds == 1 else f"{fault.id}-{seed}")
        made = run_fault(fault, seed=seed, keep=place)
        if worst is None or made.status != "caught" or (made.after or 0) > (worst.after or 0):
            worst = made
        if made.status != "caught":
            break
    assert worst is not None
    return worst


def _found(one: Asked) -> Fault:
    faults = table()[0] if one.file is None else faults_of(one.file)
    return next(fault for fault in faults if fault.id == one.fault)


def faults_of(file: Path) -> list[Fault]:
    """The faults of a module. Raises BadInput where it cannot be run, has none, or one of them is not a fault."""
    if not file.is_file():
        raise BadInput(f"--faults {file}: there is no such file; give a Python module with FAULTS = [Fault(…)]")
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        module: dict[str, Any] = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        raise BadInput(f"--faults {file}: it raised {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    found = module.get("FAULTS")
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise BadInput(
            f"--faults {file}: it needs FAULTS = [Fault(id=…, what=…, patch={{…}}, expects=[…]), …], found {found!r:.60}"
        )
    made = [replace(checked(one, str(file)), file=str(file.resolve())) for one in found]
    ids = [one.id for one in made]
    if twice := [name for name in ids if ids.count(name) > 1]:
        raise BadInput(f"--faults {file}: two faults have the id {twice[0]!r}")
    return made


def _told(number: int, asked: Sequence[Asked], outcome: Outcome, *, quiet: bool) -> Outcome:
    if not quiet:
        print(f"\r\x1b[2K{number}/{len(asked)} {outcome.id} {outcome.status}", end="", file=sys.stderr, flush=True)
        if number == len(asked):
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    return outcome
