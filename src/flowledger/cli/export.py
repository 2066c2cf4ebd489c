"""The verb `export`: a run in the forms that other tools read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowledger.cli.options import RunArgument
from flowledger.cli.watch import alarms
from flowledger.flow.errors import BadInput, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowledger.diagnose.alarms.rules import Rule
    from flowledger.ledger.reader import Ledger

FORMS = {
    "prometheus-rules": "the alarms as a file of rules (YAML)",
    "prometheus": "the numbers of the latest step as text",
}  # fmt: skip


def export(
    run: RunArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="FORM", help="; ".join(f"{form}: {what}" for form, what in FORMS.items()))
    ],
    out: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="instead of standard output")] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="alarms of your own besides, in YAML")
    ] = None,
) -> None:
    """Write a run, or its alarms, in a form that another tool reads."""
    from flowledger.ledger.reader import Ledger

    if to not in FORMS:
        listed = "; ".join(f"{form} ({what})" for form, what in FORMS.items())
        raise BadInput(f"--to {to!r}: there is {listed}{nearest(to, FORMS)}")
    chosen = alarms(rules)
    with Ledger(run) as ledger:
        text = _writer(to)(ledger, chosen)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror}") from None


def _writer(to: str) -> "Callable[[Ledger, Sequence[Rule]], str]":
    from flowledger.diagnose.alarms import prometheus

    return prometheus.rules_file if to == "prometheus-rules" else prometheus.exposition
