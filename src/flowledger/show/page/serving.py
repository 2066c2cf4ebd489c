"""The server that keeps the live page up: a process of its own, so that neither it nor the alarms beside it hold the other up."""

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from flowledger.show.page.door import Door, Guarded
from flowledger.show.page.growing import FITS, Growing, Maker, Sayer
from flowledger.show.page.live import EVERY_S, Live, app

END_S = 1.5
SWITCH_S = 5e-4  # what a browser is told does not wait for rows that are added up in another thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served: a run, the plan beside it, and what the front door says of them."""

    run: Path
    plan: Path | None = None
    make: Maker
    said: Sayer = list
    lang: str = "en"
    every: float = EVERY_S
    fits: int = FITS


class Server(uvicorn.Server):
    """One that ends its streams before it waits for them to end."""

    def __init__(self, served: Served, door: Door) -> None:
        self.live = Live(
            Growing(served.run, served.plan, served.make, served.said, served.fits), served.lang, served.every
        )
        settings: dict[str, Any] = {
            "log_level": "error", "access_log": False, "server_header": False, "proxy_headers": False, "ws": "none",
            "lifespan": "on", "timeout_graceful_shutdown": 1,
        }  # fmt: skip
        super().__init__(uvicorn.Config(Guarded(app(self.live), door), **settings))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then all else."""
        self.live.closing = True
        await self.live.tell()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever started it ends it: by `should_exit`."""
        yield


def serve(served: Served, door: Door, listening: socket.socket, wait: Callable[[], object]) -> None:
    """Serve until `wait` comes back, or SIGTERM does. A reading that goes on then is not waited for: nothing is written here."""
    server = Server(served, door)

    def end(*_: object) -> None:
        server.should_exit = True
        timer = threading.Timer(END_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def ended() -> None:
        wait()
        end()

    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(
        100_000, 50, 50
    )  # a tally has a million objects without a cycle, and rows come by the ten thousand
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=ended, daemon=True).start()
    server.run(sockets=[listening])
