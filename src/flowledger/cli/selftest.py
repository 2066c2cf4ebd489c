"""The verb `selftest`: faults put into the reference loop one at a time, and who notices them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowledger.cli.options import Json
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowledger.diagnose.faults import Fault

QUICK_CLEAN, ALL_CLEAN = 3, 20
ENOUGH = 0.95  # of the faults must be caught


def selftest(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]…", help="only these faults")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a dozen faults and three clean runs, in half a minute")
    ] = False,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="ID", help="the same as ID")] = None,
    faults: Annotated[
        Path | None, typer.Option("--faults", metavar="FILE.py", help="your own: a module with FAULTS = [Fault(…)]")
    ] = None,
    clean: Annotated[
        int | None, typer.Option("--clean", min=0, max=1000, metavar="N", help="clean runs: 20, or 3 with --quick")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=100, metavar="N", help="seeds for each fault")] = 1,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, max=64, metavar="N", help="runs at a time: as many as cores, at most 4"),
    ] = None,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="keep the ledger of every run")] = None,
    list_: Annotated[bool, typer.Option("--list", help="show the faults and run none")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="what else fired, too")] = False,
    zh: Annotated[bool, typer.Option("--zh", help="faults in Chinese")] = False,
    json: Json = False,
) -> None:
    """Put faults into the reference loop one at a time, and print which check or alarm fires at which step.

    Exit codes: 0 at least 95 % of the faults were caught within two steps and no clean run had anything said of it,
    1 otherwise, 2 bad input.
    """
    from flowledger.cli import injection_checks, injections
    from flowledger.diagnose.faults import chosen, summary, table
    from flowledger.show import plain, terminal
    from flowledger.show import selftest as matrix

    listed, cleans = table()
    own = injections.faults_of(faults) if faults else []
    if twice := {one.id for one in own} & {one.id for one in listed}:
        raise BadInput(f"{faults}: fault {min(twice)!r} has the id of one of ours; choose another")
    if own:
        injection_checks.check(own, faults or Path())
    names = [name for text in [*(only or ()), *(ids or ())] for name in text.replace(",", " ").split()]
    wanted = own if own and not names and not quick else chosen([*listed, *own], names, quick=quick)
    if list_:
        _list(wanted, json=json, zh=zh)
        return
    number = clean if clean is not None else 0 if (names or own) else QUICK_CLEAN if quick else ALL_CLEAN
    asked = [
        *(
            injections.Asked(fault=one.id, file=faults if one in own else None, seeds=seeds, keep=keep)
            for one in wanted
        ),
        *injections.clean_runs(cleans, number, keep, quick=quick),
    ]
    made = injections.outcomes(asked, jobs, quiet=json or not sys.stderr.isatty())
    rows, silent = made[: len(wanted)], made[len(wanted) :]
    sums = summary(rows, silent)
    if json:
        others = [one.row() for one in silent]
        print(plain.as_json("selftest", "selftest", [one.row() for one in rows], clean=others, summary=sums))
    else:
        drawn, others = [one.row() for one in rows], [one.row() for one in silent]
        matrix.draw(drawn, others, sums, terminal.console(), wide=wide, zh=zh)
    if sums["caught"] < ENOUGH * sums["faults"] or sums["false_alarms"]:
        raise typer.Exit(1)


def _list(wanted: "Sequence[Fault]", *, json: bool, zh: bool) -> None:
    from flowledger.show import plain

    if json:
        names = ("id", "goal", "what", "zh", "expects", "needs", "quick")
        print(plain.as_json("selftest", "selftest", [{name: getattr(one, name) for name in names} for one in wanted]))
        return
    for one in wanted:
        waits = f" (waits for {', '.join(one.needs)})" if one.needs else ""
        print(f"{one.goal:12} {one.id:32} {one.zh or one.what if zh else one.what}{waits}")
