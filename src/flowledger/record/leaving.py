"""How the processes of a job leave its run: the last to go closes it, whoever has made it.

Each says in its part how it ended, and then looks who is still there. Who finds nobody closes the run, as the worst that
any of them has said. Who finds others while the manifest names one that is gone hands the run over to one of them, for an
open run whose launcher is gone reads as crashed. After it has written it looks again: of two that leave at once each may
have missed the other, but not both of them twice. A process that was killed has said nothing, and is not waited for.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from flowledger.ledger import manifest
from flowledger.ledger.directory import MANIFEST, Process, RunDirectory, open_run, write_aside

_WORST_FIRST = ("crashed", "interrupted", "closed")


def leave(path: Path, part: Path, state: str, figures: Mapping[str, int], *, patience_s: float = 0.0) -> None:
    """Say that the process of this part has ended, and what recording it came to; close the run at `path` as the last.

    patience_s: of who has launched all the others: it waits so long for them to go, and closes the run whoever stays.
    """
    with suppress(OSError):  # a full disk: it will be found gone
        _say(part, state, figures)
    closed = False
    if patience_s:
        until = time.monotonic() + patience_s
        while _staying(_processes(path)) and time.monotonic() < until:
            time.sleep(0.05)
    while True:
        book, processes = open_run(path), _processes(path)
        staying = [] if patience_s else _staying(processes)
        if book.manifest.state != "open" and not closed:
            return  # concluded by whoever launched the job
        if not staying:
            if closed:
                return
            closed = book.close(_worst(processes), _total(processes))
            if not closed:
                return
        elif not closed and any(_known(one) == book.manifest.launcher for one in staying):
            return
        else:
            closed = False
            if not _write(book, state="open", launcher=_known(staying[0])):
                return


def _staying(processes: Sequence[Process]) -> list[Process]:
    return [one for one in processes if one.ended is None and not _known(one).is_gone()]


def stay(path: Path) -> None:
    """Keep a run open that this process joins: who closed it meanwhile did not see it come, or who made it was killed."""
    book = open_run(path)
    if book.manifest.state == "closed" or book.state == "crashed":
        _write(book, state="open", launcher=manifest.Process.this())


def bind(path: Path, bindings: Mapping[str, int]) -> None:
    """Keep what the symbols of dimensions stand for, which the job has only now said."""
    _write(open_run(path), bindings=dict(bindings))


def _write(book: RunDirectory, **changed: object) -> bool:
    try:
        write_aside(book.path / MANIFEST, msgspec.structs.replace(book.manifest, **changed).encode())
    except OSError:
        return False
    return True


def _say(part: Path, state: str, figures: Mapping[str, int]) -> None:
    file = part / "process.json"
    known = msgspec.json.decode(file.read_bytes(), type=Process)
    ended = msgspec.structs.replace(known, ended=state, recorder=dict(figures))
    write_aside(file, msgspec.json.format(msgspec.json.encode(ended), indent=2))


def _processes(path: Path) -> list[Process]:
    found = []
    for file in path.glob("parts/*/process.json"):
        with suppress(OSError, msgspec.MsgspecError):  # one that cannot be read is not waited for
            found.append(msgspec.json.decode(file.read_bytes(), type=Process))
    return found


def _known(process: Process) -> manifest.Process:
    return manifest.Process(host=process.host, pid=process.pid, started=process.started)


def _worst(processes: Sequence[Process]) -> str:
    said = {one.ended for one in processes}
    return next(state for state in _WORST_FIRST if state in said or state == _WORST_FIRST[-1])


def _total(processes: Sequence[Process]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for one in processes:
        total.update(one.recorder)
    return total
