"""The verb `diagnose`: whatever there is of a run, walked through the debug orders."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.cli.look import Language
from flowledger.cli.options import Json
from flowledger.cli.plan import Assume, Framework, Gpu, ModelOption
from flowledger.flow.errors import BadInput, nearest

if TYPE_CHECKING:
    from flowledger.cli.gathered import Gathered
    from flowledger.diagnose.orders.walk import Diagnosis

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|LOG|CONFIG|TRACEBACK|REPORT…",
        help="whatever there is, in any mixture; `-` reads stdin; key=value changes a setting of the CONFIG",
    ),
]


def diagnose(
    sources: SourcesArgument,
    order: Annotated[
        str | None,
        typer.Option("--order", help="one alone: shape_mismatch, oom, imbalance, instability, data_quality, hang"),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="every step, those that pass too")] = False,
    fail_on: Annotated[str | None, typer.Option("--fail-on", help="exit with 1 at: fail, or warn")] = None,
    lang: Annotated[Language, typer.Option(help="language of orders and headings")] = Language.en,
    gpu: Gpu = None,
    model: ModelOption = None,
    framework: Framework = None,
    assume: Assume = None,
    rules: Annotated[Path | None, typer.Option("--rules", metavar="FILE", help="alarms of your own, in YAML")] = None,
    json: Json = False,
) -> None:
    """The first step that fails, what shows it, the likeliest cause, and what to change; advice only where nothing is wrong.

    Exit codes: 0 looked at (with --fail-on: nothing is at or above it), 1 something is, 2 nothing could be read.
    """
    from flowledger.cli.gathered import Asked, gathered
    from flowledger.diagnose.alarms import rules as alarms
    from flowledger.diagnose.orders.walk import diagnose as walk
    from flowledger.show import diagnosis as drawing
    from flowledger.show import plain, terminal

    _check(order, fail_on)
    asked = Asked(
        gpu=gpu, model=model, framework=framework, assume=assume or [], rules=alarms.read(rules) if rules else (), lang=lang.value
    )  # fmt: skip
    with gathered(sources, asked) as found:
        met = walk(found.evidence, reported=found.reported, order=order)
        document = _document(met, found, lang.value)
    if json:
        name = ", ".join(source for source, _ in found.read)
        print(plain.as_json("diagnose", name, document.pop("rows"), **document))
    else:
        drawing.draw(document, terminal.console(), lang.value, every=all_)
    if fail_on is not None and document["summary"]["verdict"] in (("fail",) if fail_on == "fail" else ("fail", "warn")):
        raise typer.Exit(1)


def _check(order: str | None, fail_on: str | None) -> None:
    from flowledger.diagnose.orders.table import orders

    if order is not None and order not in orders():
        raise BadInput(f"--order {order!r} is none of {', '.join(orders())}{nearest(order, orders())}")
    if fail_on not in (None, "fail", "warn"):
        raise BadInput(f"--fail-on {fail_on!r} is neither fail nor warn")


def _document(met: "Diagnosis", found: "Gathered", language: str) -> dict[str, Any]:
    """What `--json` prints beside `rows`, which are the findings in order."""
    from flowledger.diagnose.orders import walk
    from flowledger.diagnose.orders.chinese import spoken
    from flowledger.plan.document import plain

    parts = walk.parts(met, language)
    told = {
        "rows": [plain(row) for part in parts.values() for row in part],
        "parts": {name: len(part) for name, part in parts.items()},
        "summary": walk.summary(met, found.evidence, language),
        "orders": walk.titles(met, language),
        "sources": _sources(found.read, "what"),
        "unread": _sources(found.unread, "why"),
    }
    return dict(spoken(told, found.words)) if language == "zh" else told


def _sources(pairs: Sequence[tuple[str, str]], word: str) -> list[dict[str, str]]:
    return [{"source": source, word: text} for source, text in pairs]
