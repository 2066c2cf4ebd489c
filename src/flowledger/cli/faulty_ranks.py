"""A run with a fault in it on several processes: ranks forked from a server that has imported the loop once.

Each goes the way of a rank that torchrun has started, so what watches over ranks watches over these too.
"""

import multiprocessing
import os
import socket
import time
from dataclasses import replace
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

from flowledger.diagnose.faults import Fault

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

LIMIT_S = 90.0  # for all ranks of one run
PRELOADED = [
    "flowledger.cli.injections", "flowledger.cli.injection", "flowledger.cli.faulty_ranks", "flowledger.cli.recorded",
    "flowledger.run.loop", "flowledger.run.faults.small", "flowledger.record.recorder", "flowledger.record.adapters.loop",
    "flowledger.diagnose.findings", "flowledger.ledger.reader",
]  # fmt: skip


def train(fault: Fault, made: "RunConfig", path: Path, many: int) -> str:
    """Train as `many` ranks; returns how the run ended where it did not end well. Ranks that hang are ended."""
    from flowledger.cli.recorded import on_disk
    from flowledger.flow.errors import BadInput
    from flowledger.ledger.directory import open_run

    plain = fault if isinstance(fault.patch, str | None) else replace(fault, patch=None)  # functions cannot be sent
    if plain is not fault and not fault.file:
        raise BadInput(
            f"fault {fault.id!r}: functions of this process run on one rank; put it into a file, or leave mesh"
        )
    port = _free_port()
    ranks = [
        server().Process(target=rank_main, args=(plain, made, path, rank, many, port, os.getpid()), daemon=True)
        for rank in range(many)
    ]
    for process in ranks:
        process.start()
    codes, until = [], time.monotonic() + LIMIT_S
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        codes.append(process.exitcode)
    if not any(codes):
        return ""
    said = "; ".join(f"rank {rank} ended with exit code {code}" for rank, code in enumerate(codes) if code)
    if not path.exists():
        raise BadInput(f"fault {fault.id!r}: {said}, before anything was recorded")
    open_run(path).close("crashed", on_disk(path))
    return said


@cache
def server() -> ForkServerContext:
    """Where ranks are forked from: it imports the loop when the first is asked for, once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def rank_main(fault: Fault, made: "RunConfig", path: Path, rank: int, many: int, port: int, launcher: int) -> None:
    """One rank. Leaves with the exit code of `cli.ranks`."""
    from flowledger.cli import injections, ranks
    from flowledger.cli.injection import changes, refuse
    from flowledger.flow.seams import replaced
    from flowledger.run.parallel.environment import ADDRESS, LOCAL_RANK, LOCAL_WORLD, PORT, RANK, WORLD

    os.environ |= {
        RANK: str(rank), WORLD: str(many), ADDRESS: "127.0.0.1", PORT: str(port), LOCAL_RANK: str(rank),
        LOCAL_WORLD: str(many), ranks.LAUNCHER: str(launcher), "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what sick ranks say is no news, torch's C++ included
    if fault.file:
        (fault,) = (one for one in injections.faults_of(Path(fault.file)) if one.id == fault.id)
    with replaced(changes(fault)) as missed:
        refuse(fault, missed)
        ranks.join(lambda: (made, path), tables=False, quiet=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
