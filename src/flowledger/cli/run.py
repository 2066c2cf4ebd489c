"""The verb `run`: the reference loop on a configuration, recorded, checked and shown; on one process or on many."""

import re
import tempfile
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
    from flowledger.run.parallel import environment

    if nproc is not None and environment.is_rank():
        started = environment.started()
        raise BadInput(
            f"--nproc {nproc} inside of torchrun, which has started {started} processes (WORLD_SIZE = {started}); "
            "leave it out, or unset WORLD_SIZE"
        )
    many = nproc is not None and nproc > 1  # torchrun's agent sets the environment of its own ranks
    started = 1 if many else environment.started()

    def asked() -> tuple["RunConfig", Path | None]:
        settings = read(config, overrides or [])
        shards.check(settings, nproc or started)
        return settings, _path(settings, out, directory, name)

    if started > 1:
        ranks.join(asked, tables=tables, quiet=quiet)
    elif nproc is not None and many:
        launch.launch(config, overrides or [], nproc, asked()[1], tables=tables, quiet=quiet)
    else:
        _alone(asked, tables=tables, quiet=quiet)


def _alone(asked: Callable[[], tuple["RunConfig", Path | None]], *, tables: bool, quiet: bool) -> None:
    """The run in this process."""
    from flowledger.cli import interrupted
    from flowledger.cli.finish import finished
    from flowledger.cli.recorded import Recorded, train

    interrupted.listen()
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
    _check_makable(path)
    return _shown(path)


def _check_makable(path: Path) -> None:
    """Raise BadInput where no directory can be made at `path`: tried beside what is there of it, and taken away again."""
    there = next(parent for parent in path.parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".flowledger-", dir=there):
            pass
    except OSError as error:
        why = "that is a file" if there.is_file() else (error.strerror or str(error)).lower()
        raise BadInput(
            f"cannot make run {_shown(path)} in {_shown(there)}: {why}; choose another place with -o"
        ) from None


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
