"""One process of a run at its work: the loop, with a recorder attached that writes into this process's part of the book."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowledger.flow.axes import AXES
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig
    from flowledger.ledger.directory import RunDirectory
    from flowledger.ledger.manifest import Process
    from flowledger.ledger.writer import Writer
    from flowledger.run.loop import StepReport
    from flowledger.run.parallel.ranks import Ranks
    from flowledger.run.world import World


@dataclass(slots=True)
class Recorded:
    """What this process has opened of a run, from the moment that it is there."""

    book: "RunDirectory | None" = None
    ink: "Writer | None" = None
    end_all: Callable[[str], bool] | None = None  # ends all ranks that hang; False where another has said why already

    def stop(self) -> None:
        """Write what is queued. Nothing is taken after that."""
        if self.ink is not None:
            self.ink.close()

    def close(self, state: str, wrote: Mapping[str, int]) -> None:
        """Write into the book how the run ended, and what recording came to."""
        if self.book is not None:
            self.book.close(state, wrote)

    def wrote(self) -> dict[str, int]:
        """What recording came to in this process."""
        return self.ink.stats().figures if self.ink is not None else {}


def on_disk(path: Path) -> dict[str, int]:
    """What all ranks of a run have written, where not each could say it: rows and bytes of their parts.

    What they have dropped, none knows.
    """
    files = list(path.glob("parts/*/*-*.jsonl"))
    return {
        "rows": sum(file.read_bytes().count(b"\n") for file in files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def train(settings: "RunConfig", path: Path | None, recorded: Recorded, *, quiet: bool) -> None:
    """Train, recorded into a new run at `path`; without one nothing is recorded. Rank 0 alone makes the run and speaks."""
    from flowledger.run import loop

    if not quiet and path is not None:
        gguf = settings.model.path.endswith(".gguf") or settings.model.path == "smollm2-135m"
        first = " (dequantised the first time: half a minute)" if gguf else ""
        print(f"loading {settings.model.path}{first}", file=sys.stderr)
    with loop.prepared(settings) as world:
        if path is None:
            _steps(settings, loop.train(world), lambda _: None, quiet=quiet)
            return
        try:
            recorded.book = _book(settings, path, world)
            _attached(settings, world, recorded, quiet=quiet)
        finally:
            recorded.stop()


def _attached(settings: "RunConfig", world: "World", recorded: Recorded, *, quiet: bool) -> None:
    from flowledger.cli import hang
    from flowledger.ledger.assemble import meshes_of
    from flowledger.ledger.writer import Writer
    from flowledger.record.adapters import collectives
    from flowledger.record.adapters.loop import PROBES
    from flowledger.record.attach import attach
    from flowledger.record.place import Place
    from flowledger.record.recorder import Recorder
    from flowledger.run import loop
    from flowledger.run.device import called

    book, ranks = recorded.book, world.ranks
    assert book is not None
    part = book.part("actor", ranks.rank, coordinates=_coordinates(ranks), device=called(ranks.device))
    recorded.ink = ink = Writer(part, capacity=settings.record.queue_rows)
    recorder = Recorder(
        ink, level=settings.record.level, rank=ranks.rank, rank_count=ranks.size, bindings=world.bindings,
        ops_every=settings.record.ops_every, groups=settings.record.groups, limit=settings.memory.limit_bytes,
        axes=_axes(ranks), place=Place(rank=ranks.rank, meshes=meshes_of(settings.mesh.degrees)),
        alarm=hang.alarm(recorded, after_s=settings.record.hang_after_s, rank=ranks.rank),
        memory_history=settings.record.memory_history,
    )  # fmt: skip
    with attach((*PROBES, *(collectives.PROBES if ranks.size > 1 else ())), recorder):
        _steps(settings, loop.train(world), lambda _: _check_ink(ink, book.path, ranks), quiet=quiet)


def _book(settings: "RunConfig", path: Path, world: "World") -> "RunDirectory":
    """The run at `path`, made by rank 0 and opened by the others once it is there."""
    from flowledger.ledger import directory
    from flowledger.run.parallel import processes

    book, ranks = None, world.ranks
    if ranks.rank == 0:
        book = directory.create(path, _manifest(settings, path.name, world))
    processes.agreed("the run is there")
    try:
        return book or directory.open_run(path)
    except BadInput as error:
        raise BadInput(
            f"rank {ranks.rank}: {error} (all ranks write to one file system: choose a shared one with -o)"
        ) from None


def _axes(ranks: "Ranks") -> dict[tuple[int, ...], str]:
    """Ranks that talk to each other -> what they are called: the first name of the table, where several are the same."""
    return {group.ranks: group.name for group in reversed(list(ranks.groups.values())) if not group.alone}


def _coordinates(ranks: "Ranks") -> dict[str, int]:
    return {axis: ranks.at(axis) for axis in AXES}


def _steps(
    settings: "RunConfig", reports: Iterator["StepReport"], after: Callable[["StepReport"], None], *, quiet: bool
) -> None:
    from flowledger.cli import interrupted
    from flowledger.show.progress import progress

    with progress(settings.name, settings.steps, quiet=quiet) as advance:
        for report in reports:
            advance(report.step, report.metrics)
            after(report)
            interrupted.check()


def _check_ink(ink: "Writer", path: Path, ranks: "Ranks") -> None:
    who = "" if ranks.size == 1 else f"rank {ranks.rank} ({socket.gethostname()}, pid {os.getpid()}): "
    if not (path / "parts").is_dir():
        raise BadInput(f"run {path} was removed while it ran; what it recorded is lost")
    if ink.failure:
        raise BadInput(
            f"{who}cannot write to run {path}: {ink.failure.strerror or ink.failure}; what was written stays readable"
        )


def _manifest(settings: "RunConfig", name: str, world: "World") -> Any:
    from importlib.metadata import PackageNotFoundError, version

    from flowledger.ledger.layout import rank_classes
    from flowledger.ledger.manifest import Manifest

    versions, config = {}, settings.model_dump(mode="json", by_alias=True)
    for package in ("flowledger", "torch", "transformers", "peft", "reasoning-gym"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Manifest(
        run=name,
        level=settings.record.level,
        config=config,
        sources=dict(settings._sources),
        framework=settings.framework,
        framework_version=versions.get("flowledger"),
        versions=versions,
        mesh=settings.mesh.degrees,
        rank_classes=rank_classes(settings.framework, config, settings.mesh.degrees, world.bindings),
        bindings=world.bindings,
        launcher=_launcher(),
    )


def _launcher() -> "Process":
    """The process that ends the run: that of `--nproc` where it has started this one, else this one."""
    import psutil

    from flowledger.cli.ranks import LAUNCHER
    from flowledger.ledger.manifest import Process

    with suppress(KeyError, ValueError, psutil.Error):
        return Process.here(int(os.environ[LAUNCHER]))
    return Process.this()
