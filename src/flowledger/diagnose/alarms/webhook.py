"""Alarms sent to a URL: one POST of JSON each, from a thread of its own, so that nothing ever waits for it."""

import contextlib
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from flowledger.flow.errors import BadInput

TIMEOUT_S = 5.0
TRIES = 3
PAUSE_S = 0.5  # before the second try; twice as long before the third
WAITING = 100  # messages that may wait; more are dropped and counted


class Webhook:
    """Raises BadInput for a URL that is not http or https."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, pause_s: float = PAUSE_S) -> None:
        self.url = checked(url)
        self.sent = self.lost = 0
        self.failure = ""  # why the last one was lost
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="flowledger-webhook", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Put one on its way. Never waits and never raises."""
        try:
            self._queue.put_nowait(json.dumps(message, ensure_ascii=False, allow_nan=False, default=str).encode())
        except (queue.Full, ValueError) as error:
            self.lost += 1
            self.failure = "too many wait already" if isinstance(error, queue.Full) else str(error)

    def close(self, patience_s: float = TIMEOUT_S) -> None:
        """Let what waits go out, for so long at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=patience_s)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self.lost += self._queue.qsize() + 1
            self.failure = self.failure or "no answer"

    def _run(self) -> None:
        while (body := self._queue.get()) is not None:
            if self._delivered(body):
                self.sent += 1
            else:
                self.lost += 1

    def _delivered(self, body: bytes) -> bool:
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(
                    self.url, data=body, method="POST", headers={"Content-Type": "application/json; charset=utf-8"}
                )
                with _OPENER.open(request, timeout=self._timeout_s):
                    return True
            except urllib.error.HTTPError as error:
                self.failure = f"HTTP {error.code}"
                if 400 <= error.code < 500 and error.code not in (408, 429):  # the same again would be refused again
                    return False
            except (OSError, ValueError) as error:
                self.failure = str(getattr(error, "reason", error)) or type(error).__name__
            except Exception as error:  # noqa: BLE001  a broken answer, of whatever kind
                self.failure = type(error).__name__
        return False


def checked(url: str) -> str:
    """The URL. Raises BadInput for one that cannot be posted to."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        fine = False
    if not fine or any(char.isspace() or not char.isprintable() for char in url):
        raise BadInput(f"--webhook {url!r}: a URL that begins with http:// or https:// and names a host")
    if parts.username or parts.password:
        raise BadInput(f"--webhook {where(url)}: a name and a password in a URL are not sent; give a URL without them")
    return url


def where(url: str) -> str:
    """The URL as far as it may be printed: what stands behind the host is often the secret."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}/…"


class _Stay(urllib.request.HTTPRedirectHandler):
    """Alarms go where the user has said, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)
