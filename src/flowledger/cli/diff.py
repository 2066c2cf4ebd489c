"""The verb `diff`: a plan beside the run that was planned."""

from collections.abc import Mapping
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from flowledger.cli.options import Json
from flowledger.cli.plan import (
    Assume,
    Framework,
    Gpu,
    Launch,
    LengthsOption,
    ModelOption,
    Overrides,
    ScriptArgument,
    Verl,
    lengths_of,
    read_source,
)
from flowledger.flow.errors import BadInput

PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="what `plan` takes, or the JSON that `plan --json` has printed")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run of the same launch")]


def diff(
    plan: PlanArgument,
    run: RunArgument,
    overrides: Overrides = None,
    gpu: Gpu = None,
    model: ModelOption = None,
    lengths: LengthsOption = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="equal shapes too, and what only one of them has, form by form")
    ] = False,
    assume: Assume = None,
    framework: Framework = None,
    verl: Verl = None,
    launch: Launch = None,
    arg: ScriptArgument = None,
    json: Json = False,
) -> None:
    """Planned beside recorded: shapes equal or explained, memory by kind and stage, checks that came true.

    Exit codes: 0 what both have is equal or explained, 1 something is not, 2 bad input.
    """
    from flowledger.diagnose import diff as comparison
    from flowledger.diagnose import logged
    from flowledger.diagnose import planned as plans
    from flowledger.ledger.reader import Ledger
    from flowledger.show import diff as drawing
    from flowledger.show import plain, terminal

    asked = {
        "key=value": overrides, "--gpu": gpu, "--model": model, "--lengths": lengths, "--assume": assume,
        "--framework": framework, "--verl": verl, "--launch": launch, "--arg": arg,
    }  # fmt: skip
    told = plans.read(_document(plan, asked), plan)
    with Ledger(run) as ledger:
        if logged.is_log(ledger):
            _beside_log(logged.document(told, ledger), ledger.run, json=json)
            return
        found, name = comparison.diff(told, ledger), ledger.run
    document = comparison.document(found)
    if json:
        print(plain.as_json("diff", name, document.pop("rows"), **document))
    else:
        drawing.draw(document, name, terminal.console(), wide=wide)
    if not found.agrees:
        raise typer.Exit(1)


def _beside_log(document: dict[str, Any], run: str, *, json: bool) -> None:
    """A plan beside a run that was imported from a log."""
    from flowledger.show import diff as drawing
    from flowledger.show import plain, terminal

    agrees = document["agrees"]
    if json:
        print(plain.as_json("diff", run, document.pop("rows"), **document))
    else:
        drawing.draw_log(document, run, terminal.console())
    if not agrees:
        raise typer.Exit(1)


def _document(plan: str, asked: Mapping[str, Any]) -> Any:
    """The plan as a document: as it was printed, or made now with what was asked for."""
    document = printed(Path(plan))
    if document is None:
        from flowledger.plan import document as planning
        from flowledger.plan.ask import Question, make

        reading = read_source(
            plan, asked["key=value"] or [], asked["--framework"], asked["--verl"], asked["--assume"], asked["--arg"],
            asked["--launch"],
        )  # fmt: skip
        question = Question(gpu=asked["--gpu"], model=asked["--model"], lengths=lengths_of(asked["--lengths"]))
        return planning.document(make(reading, question))
    if unused := [option for option, value in asked.items() if value]:
        raise BadInput(
            f"{plan} is a plan already: {', '.join(unused)} belongs to the configuration that it was made from"
        )
    return document


def printed(path: Path) -> Any | None:
    """The document of a file that holds a plan as JSON; None for anything that `plan` reads itself.

    Raises BadInput for a .json file that is no JSON.
    """
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) and {"schema", "verb"} <= found.keys() else None
