"""The directory of one run: how it is made, opened, given parts, and closed."""

import errno
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flowledger.flow.errors import BadInput, nearest
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.manifest import Process as Launcher
from flowledger.ledger.rows import ROWS, SCHEMA_VERSION

MANIFEST = "manifest.json"
FOLDERS = ("parts", "plan", "compacted")  # of a run, beside its manifest and its tables

_WHY = {
    errno.EACCES: "permission denied; choose a place that you may write to with -o",
    errno.EPERM: "not permitted; choose a place that you may write to with -o",
    errno.EROFS: "the file system is read-only; choose another place with -o",
    errno.ENOSPC: "no space left on the device; free some or choose another place with -o",
    errno.EDQUOT: "disk quota exceeded; free some space or choose another place with -o",
    errno.EFBIG: "the file size limit is reached; raise `ulimit -f` or choose another place with -o",
    errno.ENOTDIR: "a part of that path is a file, not a directory; choose another place with -o",
    errno.EEXIST: "a file is in the way; remove it or choose another place with -o",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one with -o",
}


class Process(msgspec.Struct, kw_only=True, frozen=True):
    """`process.json`: who wrote a part, where it ran, and how its clock relates to the wall's."""

    role: str
    rank: int | None  # None: it is none of the ranks that train
    host: str
    pid: int
    source: str = "record"  # record, import
    coordinates: dict[str, int] = {}  # mesh axis -> coordinate
    device: str = "cpu"
    monotonic_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    wall_ns: int = msgspec.field(default_factory=time.time_ns)
    versions: dict[str, str] = {}
    started: float = msgspec.field(default_factory=lambda: Launcher.this().started)  # as the manifest knows launchers
    ended: str | None = None  # how, once it has: closed, crashed, interrupted
    recorder: dict[str, int] = {}  # the recorder's own figures at its end


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run on disk, with the manifest as it was when it was opened."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> str:
        """open, closed, interrupted, or crashed (also where its launcher died without a word)."""
        return self.manifest.observed_state

    def part(
        self,
        role: str,
        rank: int | None,
        *,
        source: str = "record",
        coordinates: Mapping[str, int] | None = None,
        device: str = "cpu",
        versions: Mapping[str, str] | None = None,
    ) -> Path:
        """A new, empty directory for what this process sees. Raises BadInput where it cannot be made."""
        if compacted := [row.table for row in ROWS if (self.path / f"{row.table}.parquet").exists()]:
            raise BadInput(
                f"{self.path} is compacted ({compacted[0]}.parquet exists) and takes no more rows; start a new run"
            )
        now = time.time_ns()
        process = Process(
            role=role, rank=rank, host=socket.gethostname(), pid=os.getpid(), source=source,
            coordinates=dict(coordinates or {}), device=device, versions=dict(versions or {}),
            wall_ns=now, monotonic_ns=now if source == "import" else time.monotonic_ns(),  # imported times are the wall's
        )  # fmt: skip
        who = role if rank is None else f"{role}-r{rank}"
        name = f"{who}-{re.sub(r'[^A-Za-z0-9.]+', '_', process.host)}-{process.pid}"
        try:
            part = _fresh(self.path / "parts", name)
            write_aside(part / "process.json", msgspec.json.format(msgspec.json.encode(process), indent=2))
        except OSError as error:
            raise BadInput(f"cannot write to run {self.path}: {_why(error)}") from None
        return part

    def close(self, state: str = "closed", recorder: Mapping[str, int] | None = None) -> bool:
        """Write how the run ended, and what recording it came to, into its manifest.

        False where that is impossible (a full disk): the run then reads as crashed.
        """
        ended = msgspec.structs.replace(self.manifest, state=state, recorder=dict(recorder or {}))
        try:
            write_aside(self.path / MANIFEST, ended.encode())
        except OSError:
            return False
        return True


def create(path: Path | str, manifest: Manifest) -> RunDirectory:
    """A new run at `path`. Raises BadInput where something is there already, or nothing can be written."""
    path = Path(path)
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "parts").mkdir()
        write_aside(path / MANIFEST, manifest.encode())
    except OSError as error:
        raise BadInput(f"cannot make run {path}: {_why(error)}") from None
    return RunDirectory(path, manifest)


def check_free(path: Path) -> None:
    """Refuse a path where something stands already; nothing is ever overwritten. Raises BadInput with a free one."""
    try:
        if path.is_dir() and any(path.iterdir()):
            what = "a run" if (path / MANIFEST).exists() else "not empty"
            raise BadInput(
                f"{path} is {what} already and is never overwritten; "
                f"choose another place with -o, such as -o {_free(path)}, or remove it"
            )
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} is a file, and a run needs a directory; choose another place with -o")
    except OSError as error:
        raise BadInput(f"cannot make run {path}: {_why(error)}") from None


def open_run(path: Path | str) -> RunDirectory:
    """The run at `path`, in whatever state. Raises BadInput where there is none, or a newer flowledger wrote it."""
    path = Path(path)
    try:
        raw = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(_no_run(path)) from None
    except OSError as error:
        raise BadInput(f"cannot read {path / MANIFEST}: {error.strerror}") from None
    try:
        schema = msgspec.json.decode(raw, type=dict[str, Any]).get("schema")
        if isinstance(schema, int) and schema > SCHEMA_VERSION:
            raise BadInput(
                f"{path} has ledger schema {schema}, and this flowledger reads up to {SCHEMA_VERSION}; "
                "read it with the flowledger that wrote it, or a newer one"
            )
        return RunDirectory(path, msgspec.json.decode(raw, type=Manifest))
    except msgspec.MsgspecError as error:
        raise BadInput(f"{path / MANIFEST} is not a manifest: {error}") from None


def spared(run: Path, out: Path) -> None:
    """Refuse a target that is a file of the run itself, or lies among them. Raises BadInput; any other name in its directory is free."""
    place = Path(os.path.realpath(run))
    folders = [Path(os.path.realpath(place / name)) for name in FOLDERS]
    tables = {Path(os.path.realpath(file)) for file in (place / MANIFEST, *place.glob("*.parquet"))}
    # where a link leads to, and where the link itself stands
    for target in (Path(os.path.realpath(out)), Path(os.path.realpath(out.parent)) / out.name):
        beside = target.parent == place and (target.name == MANIFEST or target.suffix == ".parquet")
        if beside or target in tables or any(target.is_relative_to(folder) for folder in folders):
            raise BadInput(f"{out} is a file of the run; choose another place")


def write_aside(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: beside its place first, then renamed. Raises OSError and leaves no remains."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _fresh(parent: Path, name: str) -> Path:
    """A directory that nobody else has: pids repeat across containers, and one process may attach twice."""
    parent.mkdir(exist_ok=True)
    for number in range(1, 10_000):
        part = parent / (name if number == 1 else f"{name}-{number}")
        try:
            part.mkdir()
        except FileExistsError:
            continue
        return part
    raise FileExistsError(errno.EEXIST, "too many parts", str(parent / name))


def _free(path: Path) -> Path:
    return next(free for n in range(2, 10_000) if not (free := path.with_name(f"{path.name}-{n}")).exists())


def _why(error: OSError) -> str:
    return _WHY.get(error.errno or 0, error.strerror or str(error))


def _no_run(path: Path) -> str:
    if not path.exists():
        beside = [str(found.parent) for found in path.parent.glob(f"*/{MANIFEST}")]
        return f"no run at {path}: there is no such directory{nearest(str(path), beside)}"
    inside = sorted(found.parent for found in path.glob(f"*/{MANIFEST}")) if path.is_dir() else []
    hint = f"; did you mean {inside[-1]}?" if inside else ""
    return f"{path} is not a run: it has no {MANIFEST}{hint}"
