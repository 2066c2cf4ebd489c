"""The manifest: what one run is, written once by its launcher as `manifest.json`."""

import os
import platform
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil

from flowledger.ledger.rows import SCHEMA_VERSION
from flowledger.ledger.secrets import masked

_TICK_S = 0.005  # half of what the kernel counts starts in
STATES = ("open", "closed", "crashed", "interrupted")


def now() -> str:
    """The wall clock in UTC, as ISO text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """CPU model, cores, memory in bytes, host and system. Accelerators are added by whoever sees them."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "threads": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "host": socket.gethostname(),
        "system": platform.platform(),
    }


class Process(msgspec.Struct, kw_only=True, frozen=True):
    """A process as others know it: enough to tell later whether it still lives."""

    host: str
    pid: int
    started: float  # seconds after the boot of the machine; a reused pid has another start

    @classmethod
    def this(cls) -> "Process":
        return cls.here(os.getpid())

    @classmethod
    def here(cls, pid: int) -> "Process":
        """One of this machine. Raises psutil.NoSuchProcess where none has this pid."""
        return cls(host=socket.gethostname(), pid=pid, started=_started(psutil.Process(pid)))

    def is_gone(self) -> bool:
        """Whether it has certainly ended; a process on another host is given the benefit of the doubt."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return bool(process.status() == psutil.STATUS_ZOMBIE or abs(_started(process) - self.started) > _TICK_S)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """What one run is. `config` is resolved, and its secrets are masked on the way to the disk."""

    run: str
    schema: int = SCHEMA_VERSION
    created: str = msgspec.field(default_factory=now)
    state: str = "open"
    level: str = "tensors"
    config: dict[str, Any] = {}
    sources: dict[str, str] = {}  # key -> where its value came from
    framework: str = "flowledger"
    framework_version: str | None = None
    versions: dict[str, str] = {}  # package -> version
    hardware: dict[str, Any] = msgspec.field(default_factory=hardware)
    mesh: dict[str, int] = {}  # axis -> degree
    ranks: int = 0  # how many there were, where the mesh does not say: of an import; 0 is not known, and `sources` says where it is but the least
    rank_classes: dict[str, list[int]] = {}  # class of ranks with equal shares -> its ranks
    bindings: dict[str, int] = {}  # symbol of a dimension -> its value
    recorder: dict[str, int] = {}  # the recorder's own figures at the end: rows, bytes, dropped
    components: dict[str, Any] = {}  # reward components, model, tokenizer: what the run was put together from
    job: str = ""  # the name that all processes of the job know it by, where several make the run together
    launcher: Process = msgspec.field(default_factory=Process.this)  # which opened the run

    def encode(self) -> bytes:
        """JSON with its secrets masked."""
        safe = msgspec.structs.replace(self, config=masked(self.config), components=masked(self.components))
        return msgspec.json.format(msgspec.json.encode(safe, enc_hook=str), indent=2)

    @property
    def observed_state(self) -> str:
        """The state as it is now: an open run whose launcher has died has crashed."""
        return "crashed" if self.state == "open" and self.launcher.is_gone() else self.state


def _started(process: psutil.Process) -> float:
    """When the kernel says it began. Seconds since 1970, which psutil makes of it, move whenever the clock is set."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # another system than Linux, or none of its files
        return float(process.create_time())


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """What a configuration has under a dotted key; None where it has nothing there."""
    found: Any = config
    for word in key.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
