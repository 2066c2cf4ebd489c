"""A run as traces and gauges of OpenTelemetry: what is sent is plain data, made of the ledger's rows."""

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flowledger import cli
from flowledger.cli.export import collector
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show import export_otlp
from flowledger.show.export_otlp import Span
from flowledger.show.export_path import path_of
from flowledger.show.export_rows import Steps
from tests.ledger.synthetic import MS, STAGE_MS, STEP_MS, slow_run, stage_start, synthetic_run

INSTALLED = (
    importlib.util.find_spec("opentelemetry") is not None
    and importlib.util.find_spec("opentelemetry.exporter") is not None
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("otlp") / "a")


@pytest.fixture(scope="module")
def ledger(run: Path) -> Iterator[Ledger]:
    with Ledger(run) as opened:
        yield opened


@pytest.fixture(scope="module")
def traces(ledger: Ledger) -> list[Span]:
    return list(export_otlp.traces(ledger, Steps(), path_of(ledger, "2", Steps())))


def test_a_trace_is_a_step_with_its_stages_and_phases(traces: list[Span], ledger: Ledger) -> None:
    (clock,) = ledger.rows("SELECT apart FROM clocks")
    by_id = {one.span: one for one in traces}
    assert len(by_id) == len(traces) and all(len(one.trace) == 32 and len(one.span) == 16 for one in traces)
    steps = [one for one in traces if one.name == "step"]
    assert [one.parent for one in steps] == [None, None] and len({one.trace for one in steps}) == 2
    assert [one.end_ns - one.start_ns for one in steps] == [STEP_MS * MS] * 2
    stages = [one for one in traces if one.parent in {step.span for step in steps}]
    assert [one.name for one in stages] == 2 * list(STAGE_MS)
    assert [one.start_ns - clock["apart"] for one in stages if one.name == "rollout"] == [
        stage_start(step, "rollout") for step in (0, 1)
    ]
    phases = [one for one in traces if "flowledger.phase" in one.attributes]
    assert len(phases) == 12 and {by_id[str(one.parent)].name for one in phases} == {"update_actor"}
    assert all(by_id[str(one.parent)].trace == one.trace for one in phases)


def test_a_sample_is_a_trace_of_its_own_with_a_link_to_each_interval(traces: list[Span]) -> None:
    by_id = {(one.trace, one.span): one for one in traces}
    (journey,) = [one for one in traces if one.links]
    assert journey.name == "sample 2" and journey.parent is None and journey.attributes == {"flowledger.sample_id": "2"}
    linked = [by_id[trace, span] for trace, span, _ in journey.links]
    assert [one.name for one in linked] == ["prompt", "rollout", "reward", "advantage", "forward"]
    assert journey.links[-1][2]["flowledger.micro_batch"] == 1
    assert (journey.start_ns, journey.end_ns) == (linked[0].start_ns, linked[-1].end_ns)


def test_several_ranks_hang_under_one_root_and_collectives_are_counted(tmp_path: Path) -> None:
    with Ledger(slow_run(tmp_path / "slow")) as ledger:
        made = list(export_otlp.traces(ledger, Steps(), None))
        said = export_otlp.left_out(ledger, Steps(), None, len(made), 0)
    root = made[0]
    assert root.name == "step 0" and root.parent is None and {one.parent for one in made[1:]} == {root.span}
    assert Counter(one.attributes["flowledger.rank"] for one in made[1:]) == {0: 3, 1: 3}
    assert root.end_ns - root.start_ns == 34_000 * MS
    assert any("11 collectives and waits are not sent" in line for line in said)
    assert any("no numbers with a time" in line for line in said)


def test_what_never_ended_ends_where_the_run_was_heard_last(tmp_path: Path) -> None:
    """The micro-batch around `forward` was to be written at its end: what lay in it hangs under the step."""
    book = create(tmp_path / "died", Manifest(run="died"))
    ink = Writer(book.part("actor", 0))
    ink.put(SpanRow(id=1, step=0, t_ns=1, event="begin", name="step", span_kind="stage", start_ns=5 * MS))
    ink.put(
        SpanRow(
            id=3,
            parent=2,
            step=0,
            t_ns=1,
            event="whole",
            name="forward",
            span_kind="compute",
            start_ns=6 * MS,
            end_ns=9 * MS,
        )
    )
    ink.close()
    with Ledger(book.path) as ledger:
        step, forward = export_otlp.traces(ledger, Steps(), None)
    assert step.attributes["flowledger.never_ended"] is True and step.end_ns == forward.end_ns
    assert forward.parent == step.span and step.parent is None


def test_metrics_are_gauges_at_the_times_when_they_were_told(ledger: Ledger) -> None:
    (clock,) = ledger.rows("SELECT apart FROM clocks")
    found = {one.name: one for one in export_otlp.gauges(ledger, Steps(), {"step_time_s": {0: 0.1}})}
    assert found.keys() == {"flowledger.reward_mean", "flowledger.grad_norm", "flowledger.kl", "flowledger.step_time_s"}
    ends = [clock["apart"] + (step + 1) * STEP_MS * MS for step in (0, 1)]
    assert found["flowledger.grad_norm"].points == (
        (ends[0], 1.0, {"flowledger.step": 0}), (ends[1], 2.0, {"flowledger.step": 1}),
    )  # fmt: skip
    assert str(found["flowledger.kl"].points[0][1]) == "nan"  # it must not vanish
    assert found["flowledger.step_time_s"].unit == "s" and found["flowledger.step_time_s"].description


def test_the_same_run_has_the_same_numbers_again(ledger: Ledger, traces: list[Span]) -> None:
    assert list(export_otlp.traces(ledger, Steps(), path_of(ledger, "2", Steps()))) == traces


def test_a_collector_gets_it_or_the_extra_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the extra all of it arrives, in messages that a collector takes; without, one line says what to install."""
    taken: list[tuple[str, int, str | None]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            taken.append((self.path, len(self.rfile.read(size)), self.headers["x-key"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(sys, "argv", ["flowledger", "export", str(run), "--to", "otlp", "--endpoint", url])
        code: object = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code
        server.shutdown()
    out, err = capsys.readouterr()
    if INSTALLED:
        assert code == 0 and "35 spans and" in out and "secret" not in out + err
        assert [(path, key) for path, _, key in taken] == [("/v1/traces", "secret"), ("/v1/metrics", "secret")]
        assert all(size > 1000 for _, size, _ in taken)
    else:
        assert (code, taken) == (2, []) and "pip install 'flowledger[otlp]'" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "ftp://host", "http://", "http://host:99999", "file:///etc/passwd"]
)
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(BadInput, match="is no address of a collector: give http://HOST:4318"):
        collector(endpoint)


@pytest.mark.parametrize("endpoint", ["https://host", "https://host/", "https://host/v1/traces"])
def test_an_address_may_be_that_of_traces(endpoint: str) -> None:
    assert collector(endpoint) == "https://host"


def test_metrics_without_times_are_not_sent(tmp_path: Path) -> None:
    book = create(tmp_path / "log", Manifest(run="log"))
    ink = Writer(book.part("driver", None, source="import"))
    ink.put(MetricRow(step=3, name="loss", raw_name="loss", value=1.0))
    ink.close()
    with Ledger(book.path) as ledger:
        assert list(export_otlp.gauges(ledger, Steps(), {})) == []
        assert list(export_otlp.traces(ledger, Steps(), None)) == []
