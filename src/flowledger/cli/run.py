"""The verb `run`: the reference loop on a configuration, recorded, checked and shown."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig
    from flowledger.ledger.directory import RunDirectory
    from flowledger.ledger.writer import Writer
    from flowledger.run.loop import StepReport


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]…")] = None,
    out: Annotated[Path | None, typer.Option("-o", metavar="RUN", help="where the run goes; must not exist")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="parent of runs without -o")] = Path("runs"),
    name: Annotated[str | None, typer.Option("--name", help="instead of the config's name")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="end with the ledgers and one sample's passport")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="no progress bar")] = False,
) -> None:
    """Train: the reference loop on this configuration, recorded. Ends with its findings and a report."""
    import signal

    from flowledger.config.read import read

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is asked to end does so as on Ctrl-C
    settings = read(config, overrides or [])
    if settings.record.level == "off":
        _train(settings, quiet=quiet)
        return
    path = Path(out or _free_path(directory, _checked_name(name or settings.name))).resolve()
    _refuse_existing(path)
    with _finished(tables=tables) as opened:
        _recorded_run(settings, _shown(path), quiet, opened)


@contextmanager
def _finished(*, tables: bool) -> Iterator[list["RunDirectory"]]:
    """Check, compact and show the run that was opened inside, however it ended; yields where to note that run."""
    opened: list[RunDirectory] = []
    try:
        yield opened
    except BaseException:
        with _deaf(), suppress(BadInput):  # what ended the run is what must be heard
            for book in opened:
                _finish(book.path, tables=False)
        raise
    with _deaf():
        for book in opened:
            _finish(book.path, tables=tables)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C is not heard inside: closing a book takes a second or two, and half closed it would be worth less."""
    import signal

    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _recorded_run(settings: "RunConfig", path: Path, quiet: bool, opened: list["RunDirectory"]) -> None:
    """Build the world, open the book, attach, train; the book is closed in whatever state the run ends."""
    from flowledger.record.adapters.loop import PROBES
    from flowledger.record.attach import attach
    from flowledger.record.recorder import Recorder
    from flowledger.run import loop

    if not quiet:
        gguf = settings.model.path.endswith(".gguf") or settings.model.path == "smollm2-135m"
        first = " (dequantised the first time: half a minute)" if gguf else ""
        print(f"loading {settings.model.path}{first}", file=sys.stderr)
    with loop.prepared(settings) as world:
        manifest = _manifest(settings, path.name, world.bindings)
        with _book(path, manifest, settings.record.queue_rows, opened) as ink:
            recorder = Recorder(
                ink, level=settings.record.level, bindings=world.bindings, ops_every=settings.record.ops_every,
                groups=settings.record.groups, limit=settings.memory.limit_bytes,
            )  # fmt: skip
            with attach(PROBES, recorder):
                _steps(settings, loop.train(world), lambda _: _check_ink(ink, path), quiet=quiet)


@contextmanager
def _book(path: Path, manifest: Any, capacity: int, opened: list["RunDirectory"]) -> Iterator["Writer"]:
    """A new run and its writer; closed with the state that the run ended in, and with what recording came to."""
    from flowledger.ledger import directory, writer

    book = directory.create(path, manifest)
    opened.append(book)
    state, wrote = "crashed", None
    try:
        ink = writer.Writer(book.part("actor", 0), capacity=capacity)
        try:
            yield ink
            state = "closed"
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            ink.close()
            stats = ink.stats()
            wrote = {"rows": stats.rows, "bytes": stats.bytes, "dropped": stats.dropped}
    finally:
        book.close(state, wrote)


def _train(settings: "RunConfig", *, quiet: bool) -> None:
    """The loop alone, nothing recorded."""
    from flowledger.run import loop

    with loop.prepared(settings) as world:
        _steps(settings, loop.train(world), lambda _: None, quiet=quiet)


def _steps(
    settings: "RunConfig", reports: Iterator["StepReport"], after: Callable[["StepReport"], None], *, quiet: bool
) -> None:
    from flowledger.show.progress import progress

    with progress(settings.name, settings.steps, quiet=quiet) as advance:
        for report in reports:
            advance(report.step, report.metrics)
            after(report)


def _check_ink(ink: "Writer", path: Path) -> None:
    if not (path / "parts").is_dir():
        raise BadInput(f"run {path} was removed while it ran; what it recorded is lost")
    if ink.failure:
        raise BadInput(
            f"cannot write to run {path}: {ink.failure.strerror or ink.failure}; what was written stays readable"
        )


def _manifest(settings: "RunConfig", name: str, bindings: dict[str, int]) -> Any:
    from importlib.metadata import PackageNotFoundError, version

    from flowledger.ledger.manifest import Manifest

    versions = {}
    for package in ("flowledger", "torch", "transformers", "peft", "reasoning-gym"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Manifest(
        run=name,
        level=settings.record.level,
        config=settings.model_dump(mode="json", by_alias=True),
        sources=dict(settings._sources),
        framework=settings.framework,
        framework_version=versions.get("flowledger"),
        versions=versions,
        mesh=settings.mesh.degrees,
        rank_classes={"all": [0]},
        bindings=bindings,
    )


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


def _refuse_existing(path: Path) -> None:
    """Say early, before models are loaded, what creating the run would say."""
    from flowledger.ledger import directory

    directory.check_free(path)


def _close_book(path: Path) -> None:
    """Read the whole ledger once: write the laws' findings, compact, and keep a link to the latest run."""
    from flowledger.diagnose import laws, shapes
    from flowledger.ledger import compact, directory, reader, writer

    with reader.Ledger(path) as ledger:
        findings = [*laws.check(ledger), *shapes.check(ledger)]
    ink = writer.Writer(directory.open_run(path).part("actor", 0))
    for finding in findings:
        ink.put(finding)
    ink.close()
    if ink.failure is None:
        compact.compact(path)


def _finish(path: Path, *, tables: bool) -> None:
    """Check, compact and show what was recorded."""
    _close_book(path)
    _conclude(path, tables=tables)


def _conclude(path: Path, *, tables: bool) -> None:
    """What a run ends with: its tables where asked for, its report, its findings and its own cost."""
    from flowledger.ledger.reader import Ledger
    from flowledger.show import report, terminal

    screen = terminal.console()
    with Ledger(path) as ledger:
        if tables:
            report.draw(ledger, screen)
        try:
            report.write_html(ledger, path / "report.html")
        except OSError as error:
            screen.print(f"no report: {error.strerror}")
        report.conclude(ledger, screen)
