"""The launcher of a run asked to end, politely: one signal to the process that the manifest names, if that is still the one."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from flowledger.ledger.manifest import Process


def stop(process: Process) -> str:
    """Send SIGINT (SIGTERM where it is deaf to that) and say what was done, or why nothing was."""
    who = f"pid {process.pid} on {process.host}"
    if process.host != socket.gethostname():
        return f"not stopped: {who} is on another host than this ({socket.gethostname()})"
    if process.pid in (0, 1, os.getpid()) or process.pid < 0:
        return f"not stopped: {who} is not a process to end"
    if process.is_gone():
        return f"not stopped: {who} has ended already"
    number = signal.SIGTERM if _ignores(process.pid, signal.SIGINT) else signal.SIGINT
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return f"not stopped: {who} has ended already"
    except PermissionError:
        return f"not stopped: {who} belongs to another user"
    return f"stopped: sent {signal.Signals(number).name} to {who}, which launched the run"


def _ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal, as what a shell starts in the background does with SIGINT. Linux says."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False
