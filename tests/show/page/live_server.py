"""The live page's server in a thread, a run that is being written, and a browser that is only a socket."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from flowledger.ledger import directory
from flowledger.ledger.manifest import Manifest, Process
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, SpanRow
from flowledger.show.page.address import Address, bind
from flowledger.show.page.book import Book
from flowledger.show.page.door import Door
from flowledger.show.page.growing import FITS
from flowledger.show.page.serving import Served, Server

SECOND = 1_000_000_000


class Written:
    """A run that is being written, a step at a time, by two ranks."""

    def __init__(
        self, path: Path, name: str = "run", created: str = "2026-01-01T00:00:00+00:00", launcher: Process | None = None
    ) -> None:
        manifest = Manifest(
            run=name, created=created, mesh={"dp": 2}, rank_classes={"all": [0, 1]}, launcher=launcher or Process.this()
        )
        self.run = directory.create(path, manifest)
        self.parts = [self.run.part("actor", rank) for rank in range(2)]
        self.seq = 0

    def step(self, step: int, *, ends: bool = True, seconds: float = 2.0) -> None:
        """What both ranks write of one step. The first is half a second slower in its one stage."""
        for rank, part in enumerate(self.parts):
            begin, own = step * 10 * SECOND, int((seconds - 0.5 * rank) * SECOND)
            place: dict[str, Any] = {
                "step": step,
                "role": "actor",
                "rank": rank,
                "span_kind": "stage",
                "start_ns": begin,
            }
            rows = [SpanRow(id=step * 2, event="begin", name="step", t_ns=begin, **place)]
            if ends:
                stage = {**place, "stage": "update_actor", "name": "update_actor"}
                rows.append(SpanRow(id=step * 2 + 1, event="whole", end_ns=begin + own, t_ns=begin + own, **stage))
                rows.append(
                    SpanRow(id=step * 2, event="end", name="step", end_ns=begin + own, t_ns=begin + own, **place)
                )
            memory = MemoryRow(
                step=step,
                stage="update_actor",
                rank=rank,
                instant="end",
                kind="total",
                allocated=1000 + step * 10 + rank,
                t_ns=begin,
            )
            self.append(part, "spans", rows)
            self.append(part, "memory", [memory])
            self.append(
                part, "metrics", [MetricRow(step=step, name="kl", raw_name="kl", value=step / 10 + rank, t_ns=begin)]
            )

    def find(self, message: str) -> None:
        """A finding of the recorder's."""
        self.append(
            self.parts[0], "findings", [FindingRow(id="hostile", order="laws", verdict="fail", message=message)]
        )

    def append(self, part: Path, table: str, rows: list[Any]) -> None:
        for row in rows:
            self.seq += 1
            row.seq = self.seq
        with (part / f"{table}-0.jsonl").open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(rows))


def rows_alone(ledger: Ledger, planned: Ledger | None) -> Book:
    """What a page is of where nobody says anything of the run."""
    return Book(ledger=ledger, planned=planned, findings=ledger.rows("FROM findings_view"))


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Browser:
    """Asks one server."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        """One request; `host=` and other headers by name, `_` for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in {"host": f"127.0.0.1:{self.port}", **headers}.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    @contextmanager
    def listening(self, query: str, seconds: float = 20) -> Iterator[Iterator[tuple[str, Any, str]]]:
        """The events of the stream: (name, data, id), as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", f"/events?{query}")
            yield _events(connection.getresponse(), time.monotonic() + seconds)
        finally:
            connection.close()

    def document(self) -> Any:
        """The page's data, as its scripts find it."""
        page = self.ask().body.decode()
        return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def _events(answer: http.client.HTTPResponse, until: float) -> Iterator[tuple[str, Any, str]]:
    assert answer.status == 200, answer.read()
    found: dict[str, str] = {}
    for line in answer:
        assert time.monotonic() < until, "no such event came"
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            found[name] = value
        elif "event" in found:
            yield found["event"], json.loads(found["data"]), found.get("id", "")
            found = {}


@contextmanager
def serving(
    run: Path, *, token: str | None = None, fits: int = FITS, every: float = 0.02, port: int = 0
) -> Iterator[Browser]:
    """A server of a run. `token`: what it would ask for on another address."""
    listening = bind(Address(port=port))
    door = replace(Door.of(listening), token=token)
    server = Server(Served(run=run, make=rows_alone, every=every, fits=fits), door)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield Browser(door.port)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def ready(browser: Browser) -> Any:
    """The page's document, once there is a run in it."""
    for _ in range(400):
        if (found := browser.document())["live"]["run"]:
            return found
        time.sleep(0.02)
    raise AssertionError("the run was never read")
