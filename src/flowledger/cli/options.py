"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run")]
Json = Annotated[bool, typer.Option("--json", help='{"schema": 1, "verb": …, "run": …, "rows": […]}')]
