"""The verbs that look at a ledger or explain a word: show, sample, sql, explain, version."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.cli.options import Json, RunArgument
from flowledger.cli.plan import Assume, Framework, Gpu, ModelOption, Overrides, read_source
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger
    from flowledger.show.columns import Table
    from flowledger.show.explain import Glossary


class Language(StrEnum):
    """Languages of explanations."""

    en = "en"
    zh = "zh"


def show(
    run: RunArgument,
    table: Annotated[
        str | None,
        typer.Argument(help="shapes, memory, lifetimes, stages, balance, metrics, samples, log, findings, mesh"),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="all of it as one page")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="DIR", help="the page's charts as pictures")] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="with --html, --png: a plan (plan -o PLAN) beside the run"),
    ] = None,
    lang: Annotated[
        Language, typer.Option("--lang", help="with --html, --png: language that the page opens in")
    ] = Language.en,
    step: Annotated[int | None, typer.Option(help="one step")] = None,
    stage: Annotated[str | None, typer.Option(help="one stage, or stage/phase")] = None,
    sample: Annotated[int | None, typer.Option(help="mesh: who trains on this sample")] = None,
    token: Annotated[int | None, typer.Option(help="mesh: who has this token of the sample")] = None,
    head: Annotated[int | None, typer.Option(help="mesh: who has this query head")] = None,
    layer: Annotated[int | None, typer.Option(help="mesh: who has this layer")] = None,
    expert: Annotated[int | None, typer.Option(help="mesh: who has this expert")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="more columns: mask shape, padding, kind, dtype, bytes")] = False,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv")] = False,
) -> None:
    """Print one table of a run, or draw all of it as a page that needs no network."""
    of_tables = {
        "--step": step, "--stage": stage, "--sample": sample, "--token": token, "--head": head, "--layer": layer, "--expert": expert,
        "--wide": wide or None, "--json": json or None, "--csv": csv or None,
    }  # fmt: skip
    if html is not None or png is not None:
        _check_page(html, png, [option for option, value in of_tables.items() if value is not None])
        if html is not None:
            _page(run, table, html, plan, lang)
        if png is not None:
            _pictures(run, table, png, plan, lang)
        return
    if plan is not None:
        raise BadInput(
            "--plan stands beside a run on its page: give --html FILE or --png DIR too (flowledger diff PLAN RUN is a table)"
        )
    if table is None:
        raise BadInput(
            f"name a table (flowledger show {run} shapes), --html FILE for the page, or --png DIR for its charts"
        )
    from flowledger.ledger.reader import Ledger
    from flowledger.show import mesh, plain, tables, terminal

    question = mesh.Question(sample=sample, token=token, head=head, layer=layer, expert=expert)
    with Ledger(run) as ledger:
        if table == "mesh":
            made = mesh.mesh_table(ledger, step=step, stage=stage, question=question)
        else:
            made = tables.table(ledger, table, step=step, stage=stage)
        if table == "metrics":
            made = _beside(made, ledger, step)
        _warn_torn(ledger)
    if question.named and table != "mesh":
        raise BadInput(f"--{next(iter(question.named))} asks who holds it: flowledger show {run} mesh")
    _one_form(json, csv)
    if json:
        print(plain.table_json(made))
    elif csv:
        print(plain.table_csv(made), end="")
    else:
        terminal.draw(made, terminal.console(), wide=wide)


def _check_page(html: Path | None, png: Path | None, of_tables: list[str]) -> None:
    """Raises BadInput for what a page or its pictures have no use for."""
    page = "--html" if html is not None else "--png"
    if of_tables:
        raise BadInput(f"{of_tables[0]} belongs to a table, and {page} has all of them: leave one of the two out")
    for option, where, example in (("--html", html, "report.html"), ("--png", png, "charts")):
        if where == Path("-"):
            raise BadInput(f"{option} -: nothing is written to standard output; name one, such as {option} {example}")


def _page(run: Path, table: str | None, html: Path, plan: Path | None, lang: Language) -> None:
    from flowledger.cli.page import write_html
    from flowledger.show.words import human_bytes

    if table is not None:
        raise BadInput(f"--html is the page with everything: leave {table} out, or --html")
    size = write_html(run, html, plan=plan, lang=lang.value)
    print(f"{html}: {human_bytes(size)}B, one file, needs no network")


def _pictures(run: Path, table: str | None, folder: Path, plan: Path | None, lang: Language) -> None:
    from flowledger.cli.page import write_png
    from flowledger.show.page.png import NOT_DRAWN

    if table is not None:
        raise BadInput(f"--png is the charts of the page: leave {table} out, or --png")
    for file in write_png(run, folder, plan=plan, lang=lang.value):
        print(file)
    print(f"not drawn without a browser: {', '.join(NOT_DRAWN)}; they are in the page (--html FILE)")


def _beside(made: "Table", ledger: "Ledger", step: int | None) -> "Table":
    """The table of metrics with the recomputed ones."""
    from flowledger.diagnose import agreement
    from flowledger.diagnose.measures import series_of
    from flowledger.show import tables

    series = series_of(ledger)
    numbers = {name: series.made.by_step(name) for name in series.recomputed}
    asked = {name: {at: x for at, x in steps.items() if step in (None, at)} for name, steps in numbers.items()}
    return tables.beside(made, asked, agreement.differing(ledger))


def sample(
    run: RunArgument,
    sample_id: Annotated[str, typer.Argument(metavar="ID")],
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="the token strip")] = False,
) -> None:
    """The passport of one sample: every stage it went through, and its tokens."""
    from flowledger.ledger.reader import Ledger
    from flowledger.show import passport, plain, terminal

    with Ledger(run) as ledger:
        made = passport.passport(ledger, sample_id)
        name = ledger.run
    if json:
        print(passport.passport_json(made, name))
    elif csv:
        print(plain.as_csv(list(made.tokens[0]) if made.tokens else [], made.tokens), end="")
    else:
        passport.draw(made, terminal.console())


def sql(
    run: RunArgument,
    statement: Annotated[str, typer.Argument(metavar="SELECT")],
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv")] = False,
) -> None:
    """Ask the ledger of a run in SQL (DuckDB)."""
    from flowledger.ledger.reader import Ledger
    from flowledger.show import plain, terminal

    with Ledger(run) as ledger:
        names, values = ledger.query(statement)
        rows = [dict(zip(names, row, strict=True)) for row in values]
        _warn_torn(ledger)
    if json:
        print(plain.as_json("sql", ledger.run, rows))
    elif csv:
        print(plain.as_csv(names, rows), end="")
    else:
        terminal.draw_result(names, values, terminal.console())


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="a tensor, stage, symbol, axis, memory kind, metric, heading, id of a finding, algorithm, mesh, sp-vs-cp …"
        ),
    ],
    overrides: Overrides = None,
    plan: Annotated[str | None, typer.Option("--plan", metavar="CONFIG", help="sp-vs-cp with its numbers")] = None,
    gpu: Gpu = None,
    model: ModelOption = None,
    assume: Assume = None,
    framework: Framework = None,
    lang: Annotated[Language, typer.Option(help="language")] = Language.en,
    json: Json = False,
) -> None:
    """What a word of the flow means: shapes, mask, lifetime, placement, and the bug that goes with it."""
    from flowledger.show import explain as explanation
    from flowledger.show import plain

    asked = {"key=value": overrides, "--gpu": gpu, "--model": model, "--assume": assume, "--framework": framework}
    if plan is not None:
        _compare(name, plan, asked, lang, json)
        return
    if unused := [option for option, value in asked.items() if value]:
        raise BadInput(f"explain {name}: {', '.join(unused)} belongs to a configuration; name it with --plan CONFIG")
    if json:
        print(plain.as_json("explain", "", explanation.meanings(name, lang.value, _ids)))
    else:
        print(explanation.explain(name, lang.value, _ids))


def _ids() -> "Glossary":
    """What ids of findings mean, which `diagnose` knows."""
    from flowledger.diagnose import ids

    return ids


def _compare(name: str, source: str, asked: Mapping[str, Any], lang: Language, json: bool) -> None:
    """`sp-vs-cp` for one configuration, under the name of any scheme that it compares."""
    from flowledger.flow.errors import folded
    from flowledger.plan import ask, sp_vs_cp
    from flowledger.show import explain_cuts, explain_sequence, plain, terminal

    if folded(name) != folded(explain_sequence.NAME) and not explain_cuts.schemes_of(name):
        raise BadInput(f"explain {name} --plan: only {explain_sequence.NAME} is explained with a configuration")
    overrides, framework = asked["key=value"] or [], asked["--framework"]
    reading = read_source(source, overrides, framework, None, asked["--assume"], None, None)
    made = ask.make(reading, ask.Question(gpu=asked["--gpu"], model=asked["--model"]))
    document = sp_vs_cp.compare(made)
    if json:
        beside = {key: value for key, value in document.items() if key not in ("run", "rows")}
        print(plain.as_json("explain", document["run"], document["rows"], **beside))
    else:
        explain_sequence.draw(document, terminal.console(), lang.value)


def version() -> None:
    """Print the version."""
    from flowledger import __version__

    print(__version__)


def _one_form(json: bool, csv: bool) -> None:
    if json and csv:
        raise BadInput("--json and --csv: give one of them")


def _warn_torn(ledger: Any) -> None:
    if ledger.torn:
        print(f"flowledger: {ledger.torn} torn lines left out (a process was killed while writing)", file=sys.stderr)
