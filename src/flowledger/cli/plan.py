"""The verbs `plan` and `check`: what a configuration comes to before a GPU is used."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.cli.options import Json
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.foreign import Reading
    from flowledger.plan.lengths import Lengths
    from flowledger.plan.plan import Plan

Source = Annotated[
    str, typer.Argument(metavar="CONFIG", help="a launch script, a YAML or JSON file, or a framework's name")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]…", help="settings that override the file's, in the framework's own keys"),
]
Gpu = Annotated[str | None, typer.Option("--gpu", help="the device, such as h100-80g")]
ModelOption = Annotated[str | None, typer.Option("--model", help="a name of the catalogue, or a config.json")]
Assume = Annotated[list[str] | None, typer.Option("--assume", metavar="KEY=VALUE", help="what the input leaves open")]
Framework = Annotated[str | None, typer.Option("--framework", help="where it is not recognised")]
Verl = Annotated[str | None, typer.Option("--verl", metavar="0.9.1|head", help="default: the installed one, else head")]
Launch = Annotated[int | None, typer.Option("--launch", help="which training of a script; default: the last")]
ScriptArgument = Annotated[list[str] | None, typer.Option("--arg", help='what "$@" of a script holds; repeat')]
LengthsOption = Annotated[
    str | None, typer.Option("--lengths", metavar="RUN|FILE|p50=…,p99=…,max=…", help="real response lengths")
]


def plan(
    source: Source,
    overrides: Overrides = None,
    gpu: Gpu = None,
    model: ModelOption = None,
    lengths: LengthsOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a second plan beside it; repeat for several changes"),
    ] = None,
    advise: Annotated[bool, typer.Option("--advise", help="single changes by what they save")] = False,
    largest: Annotated[bool, typer.Option("--max-tokens", help="the largest budget and response that fit")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="run the model's code under FakeTensor too (extra `run`)")
    ] = False,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="chain, checks, memory, shapes, lifetimes, all")
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="every rank class, the first step, packed forms")] = False,
    out: Annotated[Path | None, typer.Option("-o", metavar="RUN", help="the plan as a ledger directory")] = None,
    assume: Assume = None,
    framework: Framework = None,
    verl: Verl = None,
    launch: Launch = None,
    arg: ScriptArgument = None,
    json: Json = False,
) -> None:
    """What a configuration comes to before a GPU is used: batch chain, checks, memory, shapes, lifetimes.

    Exit codes: 0 a plan was made, whether or not it fits; 2 bad input.
    """
    from flowledger.plan.ask import Question, answer, make
    from flowledger.show import plain, planned, terminal

    tables = planned.chosen(table or [])
    question = Question(
        gpu=gpu, model=model, lengths=lengths_of(lengths), sets=sets or [], advise=advise, largest=largest,
        tables=json or bool({"shapes", "lifetimes"} & set(tables)),
    )  # fmt: skip

    def reread(more: Sequence[str]) -> "Reading":
        return read_source(source, [*(overrides or []), *more], framework, verl, assume, arg, launch)

    made = make(reread([]), question)
    document = answer(made, question, reread)
    if trace:
        document["trace"] = _traced(made, model)
    if out is not None:
        _write_plan(made, out)
    if json:
        print(plain.as_json("plan", document["run"], document["rows"], **_beside(document)))
    else:
        planned.draw(document, terminal.console(), tables, wide=wide)


def check(
    source: Source,
    overrides: Overrides = None,
    gpu: Gpu = None,
    model: ModelOption = None,
    lengths: LengthsOption = None,
    fail_on: Annotated[str, typer.Option("--fail-on", help="fail, or warn")] = "fail",
    wide: Annotated[bool, typer.Option("--wide", help="those that hold, too")] = False,
    assume: Assume = None,
    framework: Framework = None,
    verl: Verl = None,
    launch: Launch = None,
    arg: ScriptArgument = None,
    json: Json = False,
) -> None:
    """The checks alone, for CI and launch scripts; name the --gpu so that memory is checked too.

    Exit codes: 0 none fails, 1 one does (or warns, with --fail-on warn), 2 bad input.
    """
    from flowledger.plan.ask import Question, checks, make
    from flowledger.plan.document import reading as reading_of
    from flowledger.show import plain, planned, terminal

    if fail_on not in ("fail", "warn"):
        raise BadInput(f"--fail-on {fail_on!r} is neither fail nor warn")
    reading = read_source(source, overrides or [], framework, verl, assume, arg, launch)
    made = make(reading, Question(gpu=gpu, model=model, lengths=lengths_of(lengths)))
    rows = checks(made)
    if json:
        print(plain.as_json("check", made.config.name, rows, reading=reading_of(made)))
    else:
        planned.draw_checks(rows, made.config.name, reading_of(made), terminal.console(), wide=wide)
    found = {row["verdict"] for row in rows}
    if "fail" in found or (fail_on == "warn" and "warn" in found):
        raise typer.Exit(1)


def read_source(
    source: str, overrides: Sequence[str], framework: str | None, version: str | None, assume: Sequence[str] | None,
    arguments: Sequence[str] | None, launch: int | None,
) -> "Reading":  # fmt: skip
    from flowledger.config.detect import Asked, read

    given = dict(_pair("--assume", text) for text in assume or [])
    reading = read(
        source,
        Asked(
            overrides=overrides, framework=framework, version=version, assume=given,
            script_arguments=arguments or [], launch=launch,
        ),
    )  # fmt: skip
    return _named(reading, source)


def _named(reading: "Reading", source: str) -> "Reading":
    """A job that nobody gave a name has that of its file, or of the framework whose settings were given alone."""
    from flowledger.config.bounds import LONGEST_NAME

    config = reading.config
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem)[:LONGEST_NAME].strip("._-")
    if "default@" not in config.source_of("name") or not stem:  # `gsm8k` is verl's own example
        return reading
    return replace(reading, config=config.model_copy(update={"name": stem}))


def _traced(made: "Plan", model: str | None) -> list[dict[str, Any]]:
    """The second depth, which needs torch and transformers; a model by path is traced from its own config.json."""
    try:
        from flowledger.plan.trace.compare import compare_with
    except ImportError as error:
        raise BadInput(
            f'--trace needs torch and transformers ({error.name} is missing); pip install "flowledger[run]"'
        ) from None
    return compare_with(made, model if model and Path(model).expanduser().exists() else None)


def lengths_of(text: str | None) -> "Lengths | None":
    """Statistics of real samples; only then is a ledger's reader needed."""
    if text is None:
        return None
    from flowledger.plan.length_files import read_lengths

    return read_lengths(text)


def _pair(option: str, text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise BadInput(f"{option} {text!r}: give KEY=VALUE")
    return key, value


def _beside(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("schema", "verb", "run", "rows")}


def _write_plan(made: "Plan", out: Path) -> None:
    """The plan as a ledger directory: a manifest and the expected rows."""
    from flowledger.ledger import directory, planned

    out = out.resolve()
    book = directory.create(out, _plan_manifest(made, out.name))
    planned.write(book.path, book.manifest.run, made.rows())
    book.close("closed")


def _plan_manifest(made: "Plan", name: str) -> Any:
    from flowledger.ledger.manifest import Manifest

    config = made.config
    return Manifest(
        run=name, level="plan", config=config.model_dump(mode="json", by_alias=True), sources=dict(config._sources),
        framework=config.framework, framework_version=config.framework_version, mesh=dict(made.setting.mesh.degrees),
        rank_classes=made.rank_classes,
        bindings=dict(made.setting.bindings),
    )  # fmt: skip
