"""What a framework says beside what was recorded: equal where it is, and found where it is not."""

from pathlib import Path

import pytest

from flowledger.diagnose import agreement
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, Row, SampleRow, SpanRow
from flowledger.ledger.writer import Writer


def told(step: int, name: str, value: float, raw: str = "") -> MetricRow:
    return MetricRow(step=step, t_ns=step, name=name, raw_name=raw or name, value=value)


def sample(step: int, number: int, reward: float, length: int) -> SampleRow:
    return SampleRow(
        step=step, t_ns=step, sample_id=f"{step}-{number}", reward=reward, response_length=length, prompt_length=3
    )


def synchronised(way: str, number: int, tensors: int, size: int, checksum: int) -> list[Row]:
    at = 100 * number
    span = SpanRow(
        step=number, stage="weight_sync", id=number + 1, event="end", name="weight_sync", span_kind="stage", start_ns=at,
        end_ns=at + 50, t_ns=at + 50,
    )  # fmt: skip
    numbers = {"tensors": tensors, "bytes": size, "checksum": checksum}
    metrics = [
        MetricRow(step=number, t_ns=at + 10, name=f"weight_sync/{way}_{what}", raw_name="", value=float(value))
        for what, value in numbers.items()
    ]
    return [*metrics, span]


def book(folder: Path, *parts: list[Row], framework: str = "verl") -> Ledger:
    """A run of one process a part; the first is a rank."""
    made = create(folder / "run", Manifest(run="run", level="tensors", framework=framework))
    for number, rows in enumerate(parts):
        ink = Writer(made.part("rollout" if number else "actor", None if number else 0))
        for row in rows:
            ink.put(row)
        ink.close()
    made.close()
    return Ledger(folder / "run")


SAMPLES = [sample(step, number, reward, 4 + number) for step in (1, 2) for number, reward in enumerate((0.5, 1.0))]


def test_equal_numbers_pass_and_say_how_many(tmp_path):
    rows = [*SAMPLES, *(told(step, "reward/mean", 0.75, "critic/score/mean") for step in (1, 2)), told(1, "loss", 9.0)]
    with book(tmp_path, rows) as ledger:
        (finding,) = agreement.check(ledger)
    assert (finding.id, finding.verdict) == ("metrics_agree", "pass")
    assert finding.message.startswith("2 numbers")


def test_a_number_that_the_samples_do_not_give_is_named(tmp_path):
    rows = [*SAMPLES, *(told(step, "response_length/mean", value) for step, value in ((1, 4.5), (2, 4.6)))]
    with book(tmp_path, rows) as ledger:
        (finding,) = agreement.check(ledger)
    assert finding.verdict == "warn"
    assert finding.evidence == ["step 2: response_length/mean = 4.6, but the recorded samples give 4.5"]


@pytest.mark.parametrize(
    ("framework", "steps"), [("own", (1, 2)), ("trl", (2,))], ids=["a loop of one's own", "logged at every second step"]
)
def test_what_cannot_be_compared_is_not(tmp_path, framework, steps):
    rows = [*SAMPLES, *(told(step, "reward/mean", 9.0) for step in steps)]
    with book(tmp_path, rows, framework=framework) as ledger:
        assert agreement.check(ledger) == []


def test_weights_that_arrive_in_two_buckets_are_added_up(tmp_path):
    sent = [row for number in (0, 1) for row in synchronised("sent", number, 2, 40, 5 + number)]
    buckets = [
        *synchronised("received", 0, 1, 30, 2**32 - 1), *synchronised("received", 0, 1, 10, 6)[:3],
        *synchronised("received", 1, 2, 40, 6),
    ]  # fmt: skip
    with book(tmp_path, sent, buckets) as ledger:
        (finding,) = agreement.check(ledger)
    assert (finding.id, finding.verdict) == ("weights_arrived", "pass")
    assert finding.message == "2 synchronisations of weights, as sent and as received: equal"


def test_weights_of_another_step_are_found(tmp_path):
    sent = [row for number in (0, 1) for row in synchronised("sent", number, 2, 40, 5 + number)]
    received = [row for number in (0, 1) for row in synchronised("received", number, 2, 40, 5)]  # the old ones again
    with book(tmp_path, sent, received) as ledger:
        (finding,) = agreement.check(ledger)
    assert finding.verdict == "warn"
    assert finding.evidence is not None and len(finding.evidence) == 1
    assert "5 received, 6 sent" in finding.evidence[0]
