"""The front door: one function a verb, in a file a room. The only place that knows every room; each is imported when its verb
is called."""

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from flowledger.cli import diagnose, diff, export, imports, look, plan, record, run, selftest, watch
from flowledger.cli.serve import WithAddress
from flowledger.flow.errors import BadInput

VERBS = (
    run.run, record.record, imports.import_, plan.plan, plan.check, diff.diff, diagnose.diagnose, selftest.selftest, watch.watch, export.export, look.show, look.sample, look.sql, look.explain, look.version,
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Follow one RL sample through every stage, and keep one ledger of every tensor.",
)
# What is launched has options of its own: from its name on all words are its.
CONTEXT: dict[Callable[..., None], dict[str, Any]] = {record.record: {"allow_interspersed_args": False}}
CLASSES: dict[Callable[..., None], type[TyperCommand]] = {watch.watch: WithAddress}
for verb in VERBS:
    app.command(verb.__name__.strip("_"), cls=CLASSES.get(verb), context_settings=CONTEXT.get(verb))(verb)


def main() -> None:
    """Run a verb. Exit codes: 0 fine, 1 a check or a comparison fails, 2 bad input (one clear line each), 130 Ctrl-C."""
    try:
        code = app(standalone_mode=False)  # typer gives back the code of an Exit, and 130 for Ctrl-C
    except BadInput as error:
        _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except RuntimeError as error:
        if str(error) != "Query interrupted":  # DuckDB has heard Ctrl-C before Python did
            raise
        code = 130
    except BrokenPipeError:  # `flowledger show … | head`
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a click error: unknown option, missing argument
            raise
        _complain(error.format_message())
    if code == 130:
        print("flowledger: interrupted", file=sys.stderr)
    if isinstance(code, int) and code:
        sys.exit(code)


def _complain(text: str) -> None:
    from flowledger.show.words import harmless

    for line in text.splitlines():
        print(harmless(f"flowledger: {line}"), file=sys.stderr)  # names of runs and files may hold anything
    sys.exit(2)
