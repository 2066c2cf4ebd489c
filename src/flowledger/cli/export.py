"""The verb `export`: a run in the forms that other tools read."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from flowledger.cli.options import RunArgument
from flowledger.cli.watch import alarms
from flowledger.flow.errors import BadInput, folded, nearest
from flowledger.ledger.directory import spared
from flowledger.show.words import harmless

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger
    from flowledger.show.export_rows import Numbers

ENDPOINT = "http://localhost:4318"  # where a collector listens for OTLP over HTTP
HOWEVER = "OTLP is sent, not written: leave -o out, and name a collector with --endpoint URL"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options say."""

    out: Path | None
    rules: Path | None
    step: str | None
    sample: str | None
    endpoint: str | None


@dataclass(frozen=True, slots=True)
class Form:
    """One form. `takes`: the options that mean something to it; `write` does it and says what is left out, a line each."""

    what: str
    takes: tuple[str, ...]
    write: Callable[["Ledger", Asked], Iterable[str]]
    copies: bool = False  # DuckDB writes the files itself


def export(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FORM", help="perfetto, parquet, csv, prometheus, prometheus-rules, tensorboard, otlp"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", metavar="PLACE", help="FILE (.json or .json.gz of perfetto), or DIR of parquet, csv and tensorboard"
        ),
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="A..B", help="these steps alone: 7, 3..9, 3.. or ..9")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="ID", help="perfetto, otlp: whose way is drawn; else the most telling one"),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help=f"otlp: the collector ({ENDPOINT})")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="prometheus: alarms of your own besides, in YAML")
    ] = None,
) -> None:
    """Write a run, or its alarms, in a form that another tool reads."""
    from flowledger.ledger.reader import Ledger

    if to not in FORMS:
        listed = "; ".join(f"{form} ({one.what})" for form, one in FORMS.items())
        raise BadInput(f"--to {to!r}: there is {listed}{_near(to)}")
    form = FORMS[to]
    given = {"-o": out, "--step": step, "--sample": sample, "--endpoint": endpoint, "--rules": rules}
    if unused := [option for option, value in given.items() if value is not None and option not in form.takes]:
        raise BadInput(HOWEVER if unused[0] == "-o" else f"{unused[0]} means nothing to --to {to}: leave it out")
    if run.is_file():
        raise BadInput(
            f"{run} is a file and no run: make one of it with flowledger import {run} -o RUN, then export RUN"
        )
    if out is not None:
        spared(run, out)
    with Ledger(run, external_access=form.copies) as ledger:
        if ledger.torn:
            _say(f"{ledger.torn} torn lines of {run} are left out")
        try:
            for line in form.write(ledger, Asked(out, rules, step, sample, endpoint)):
                _say(line)
            sys.stdout.flush()
        except BadInput as error:
            raise BadInput(_refusal(ledger, to, error)) from None
        except BrokenPipeError:  # `flowledger export … | head`: whoever reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _near(to: str) -> str:
    """The form that is meant: by a part of its name (`rules`), else by a word of what it is (`alarms`), else by its letters."""
    asked = folded(to).replace("_", "-")
    parts = [form for form in FORMS if any(asked and part.startswith(asked) for part in form.split("-"))]
    said = [form for form, one in FORMS.items() if asked in re.findall(r"\w{4,}", one.what.casefold())]
    found = parts[-1:] or said[:1]
    return f"; did you mean {found[0]}?" if found else nearest(to, FORMS)


def _refusal(ledger: "Ledger", to: str, error: BadInput) -> str:
    """Why there is no such export, in one line."""
    from flowledger.show.export_rows import reason

    why = reason(error)
    if why != str(error):
        why = f"{ledger.run} cannot be written as {to}: {why}; --to parquet and csv write all else"
    return one_line(why)


def _say(line: str) -> None:
    print(f"flowledger: {one_line(line)}", file=sys.stderr)


def _told(line: str) -> None:
    print(one_line(line))


def one_line(text: str) -> str:
    """A line in which nothing that came from a run reaches the terminal as a command, or begins another line."""
    return harmless(text.replace("\n", "⏎"))


def _more(ledger: "Ledger") -> "Numbers":
    """The metrics that are no rows, where they can be made."""
    from flowledger.show.export_rows import reason

    try:
        return recomputed(ledger)
    except BadInput as error:
        _say(f"recomputed metrics of {ledger.run} cannot be made, {reason(error)}: left out")
        return {}


def recomputed(ledger: "Ledger") -> "Numbers":
    """Metrics that are no rows of the ledger: made of its other rows."""
    from flowledger.diagnose.measures import series_of

    series = series_of(ledger)
    return {name: series.by_step(name) for name in series.recomputed if name not in series.told}


def _perfetto(ledger: "Ledger", asked: Asked) -> Iterable[str]:
    from flowledger.show import export_perfetto
    from flowledger.show.export_files import written
    from flowledger.show.export_rows import steps_of

    steps = steps_of(asked.step)
    with written(asked.out) as file:
        left_out = export_perfetto.write(ledger, file, steps, asked.sample, _more(ledger))
    if asked.out is not None:
        _told(f"{asked.out}: open it at https://ui.perfetto.dev or in chrome://tracing; it stays on this machine")
    return left_out


def _tables(form: str) -> "Callable[[Ledger, Asked], Iterable[str]]":
    def write(ledger: "Ledger", asked: Asked) -> Iterable[str]:
        from flowledger.show import export_tables

        left_out = export_tables.write(ledger, form, asked.out)
        _told(f"{asked.out}: tables/*.{form} are the ledger's rows, views/*.{form} what show reads")
        return left_out

    return write


def _tensorboard(ledger: "Ledger", asked: Asked) -> Iterable[str]:
    from flowledger.show import export_tensorboard
    from flowledger.show.export_rows import steps_of

    left_out = export_tensorboard.write(ledger, asked.out, steps_of(asked.step), _more(ledger))
    _told(f"{asked.out}: look at it with tensorboard --logdir {asked.out}")
    return left_out


def _prometheus(ledger: "Ledger", asked: Asked) -> Iterable[str]:
    from flowledger.diagnose.alarms import prometheus
    from flowledger.show.export_rows import steps_of

    steps = steps_of(asked.step)
    if asked.step is not None and (steps.first is None or steps.first != steps.last):
        raise BadInput(f"--step {asked.step}: Prometheus takes the numbers of one moment; name one step")
    made = prometheus.exposition(ledger, alarms(asked.rules), steps.first)
    _text(asked.out, made.text)
    return made.left_out


def _prometheus_rules(ledger: "Ledger", asked: Asked) -> Iterable[str]:
    from flowledger.diagnose.alarms import prometheus

    _text(asked.out, prometheus.rules_file(ledger, alarms(asked.rules)))
    return ()


def _text(out: Path | None, text: str) -> None:
    from flowledger.show.export_files import written

    if out is None:
        print(text, end="")
        return
    with written(out) as file:
        file.write(text.encode())


def _otlp(ledger: "Ledger", asked: Asked) -> Iterable[str]:
    from flowledger.show import export_otlp
    from flowledger.show.export_path import path_of
    from flowledger.show.export_rows import check_steps, steps_of

    endpoint = collector(asked.endpoint or ENDPOINT)
    try:
        from flowledger.show.export_otlp_post import post
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--to otlp needs OpenTelemetry's exporter ({error.name} is not installed): pip install 'flowledger[otlp]'"
        ) from None
    steps = steps_of(asked.step)
    check_steps(ledger, steps)
    path = path_of(ledger, asked.sample, steps)
    traces, gauges = export_otlp.traces(ledger, steps, path), export_otlp.gauges(ledger, steps, _more(ledger))
    spans, numbers = post(endpoint, export_otlp.resource(ledger), traces, gauges)
    _told(f"{endpoint}: {spans:,} spans and {numbers:,} numbers of {ledger.run}")
    return export_otlp.left_out(ledger, steps, path, spans, numbers)


def collector(endpoint: str) -> str:
    """A collector's address without a slash at its end. Raises BadInput for what is none."""
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        whole = False
    if not whole:
        raise BadInput(f"--endpoint {endpoint!r} is no address of a collector: give http://HOST:4318 or https://HOST")
    return endpoint.rstrip("/").removesuffix("/v1/traces").removesuffix("/v1/metrics")


FORMS = {
    "perfetto": Form("a Chrome trace: stages, phases, communication, memory, the way of a sample", ("-o", "--step", "--sample"), _perfetto),
    "parquet": Form("the tables and views, a file each", ("-o",), _tables("parquet"), copies=True),
    "csv": Form("the tables and views, a file each", ("-o",), _tables("csv"), copies=True),
    "prometheus": Form("the numbers of the last whole step as text", ("-o", "--step", "--rules"), _prometheus),
    "prometheus-rules": Form("the alarms as a file of rules (YAML)", ("-o", "--rules"), _prometheus_rules),
    "tensorboard": Form("every number and how samples spread, as an event file", ("-o", "--step"), _tensorboard),
    "otlp": Form("traces and metrics, sent to a collector of OpenTelemetry", ("--step", "--sample", "--endpoint"), _otlp),
}  # fmt: skip
