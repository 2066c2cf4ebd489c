"""The verb `run`: the reference loop on a configuration, recorded, checked and shown; on one process or on many."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]…")] = None,
    out: Annotated[Path | None, typer.Option("-o", metavar="RUN", help="where the run goes; must not exist")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="parent of runs without -o")] = Path("runs"),
    name: Annotated[str | None, typer.Option("--name", help="instead of the config's name")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, max=1024, help="processes on this machine, as many as mesh asks for")
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="end with the ledgers and one sample's passport")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="no progress bar")] = False,
) -> None:
    """Train: the reference loop on this configuration, recorded. Ends with its findings and a report.

    Under torchrun each process is a rank: torchrun … -m flowledger run CONFIG.yaml -o RUN
    """
    from flowledger.cli import launch, ranks
    from flowledger.config import shards
    from flowledger.config.read import read

    started = int(os.environ.get("WORLD_SIZE", "1"))  # by torchrun
    if nproc is not None and started > 1:
        raise BadInput(f"--nproc {nproc} inside of torchrun, which has started {started} processes; leave it out")

    def asked() -> tuple["RunConfig", Path | None]:
        settings = read(config, overrides or [])
        shards.check(settings, nproc or started)
        return settings, _path(settings, out, directory, name)

    if started > 1:
        ranks.join(asked, tables=tables, quiet=quiet)
    elif nproc is not None and nproc > 1:
        launch.launch(config, overrides or [], nproc, asked()[1], tables=tables, quiet=quiet)
    else:
        _alone(asked, tables=tables, quiet=quiet)


def _alone(asked: Callable[[], tuple["RunConfig", Path | None]], *, tables: bool, quiet: bool) -> None:
    """The run in this process."""
    import signal

    from flowledger.cli.finish import finished
    from flowledger.cli.recorded import Recorded, train

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is asked to end does so as on Ctrl-C
    settings, path = asked()
    recorded, state = Recorded(), "crashed"
    with finished(recorded, tables=tables):
        try:
            train(settings, path, recorded, quiet=quiet)
            state = "closed"
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            recorded.close(state, recorded.wrote())


def _path(settings: "RunConfig", out: Path | None, directory: Path, name: str | None) -> Path | None:
    """Where the run goes; None where nothing is recorded. Says early, before models are loaded, that it is taken."""
    from flowledger.ledger.directory import check_free

    if settings.record.level == "off":
        return None
    path = Path(out or _free_path(directory, _checked_name(name or settings.name))).resolve()
    check_free(path)
    return _shown(path)


def _free_path(directory: Path, name: str) -> Path:
    """The first of name, name-2, name-3 … that is not there."""
    path, number = directory / name, 1
    while path.exists():
        number += 1
        path = directory / f"{name}-{number}"
    return path


def _checked_name(name: str) -> str:
    """A run's name, which is a file name of its own. Raises BadInput for one that would lead elsewhere."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BadInput(
            f"--name {name!r} must begin with a letter or digit and hold only letters, digits, '.', '_' and '-'"
        )
    return name


def _shown(path: Path) -> Path:
    """A path as people write it: relative where it lies beneath the current directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) and path != here else path
