"""How work is dealt, from rows written by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.schema import MicroBatch
from flowledger.diagnose.checks import work
from flowledger.ledger.rows import MetricRow, Row, SampleRow, SpanRow, Trained
from flowledger.run import batching
from tests.diagnose.by_hand import told

S = 1_000_000_000


def trained(*ranks: Sequence[Sequence[int]], step: int = 0, rejected: bool = False) -> list[Row]:
    """The samples of each rank, micro-batch by micro-batch, by their lengths; one of the step may have been rejected."""
    rows: list[Row] = []
    for rank, micro_batches in enumerate(ranks):
        for micro, lengths in enumerate(micro_batches):
            for length in lengths:
                entry = Trained(epoch=0, mini_batch=0, rank=rank, micro_batch=micro)
                rows.append(
                    SampleRow(sample_id=str(100 * step + len(rows)), step=step, prompt_length=2, response_length=length - 2, trained=[entry], rank=rank)
                )  # fmt: skip
    return [
        *rows,
        *([SampleRow(sample_id=str(100 * step + 99), step=step, dropped_reason="rejected")] if rejected else []),
    ]


DEALS = {
    0: ([[90, 90]], [[10, 10]]),  # all long ones on one rank
    1: ([[51, 60]], [[40, 49]]),  # 11 % above the mean, and dealt by length it would be none
    2: ([[90, 10]], [[10, 10]]),  # no deal is better
    3: ([[50, 60]], [[40, 50]]),  # 10 % above the mean
}


def test_a_deal_is_bad_where_another_is_much_better(tmp_path: Path) -> None:
    rows = [row for step, ranks in DEALS.items() for row in trained(*ranks, step=step)]
    found = told(work.check, tmp_path / "run", rows, ranks=2)["samples_dealt_unevenly"]
    assert (found.verdict, found.rank, found.step) == ("warn", 0, 0)
    assert [text[:7] for text in found.evidence or ()] == ["step 0:", "step 1:", "the rul"]
    assert "180 tokens and the mean is 100; dealt by length it would be 100" in found.message


CUTS = {
    0: trained([[10], [10], [10]], step=0),  # three micro-batches, and one would do
    1: trained([[10], [10, 10]], step=1),  # two, and one would do: it is not worth a word
    2: trained([[10], [21], [10]], step=2),  # the limit asks for three
    3: trained([[10], [10], [10]], [[10], [21], [10]], step=3),  # the other rank needs as many
    4: trained([[10], [10], [10]], step=4, rejected=True),  # some were rejected after the cut
}


def test_micro_batches_are_as_many_as_their_limits_ask_for(tmp_path: Path) -> None:
    rows, limits = [row for one in CUTS.values() for row in one], {"samples": None, "max_tokens": 30}
    found = told(work.check, tmp_path / "run", rows, {"actor": {"micro_batch": limits}}, ranks=2)[
        "micro_batches_too_small"
    ]
    assert found.verdict == "warn"
    assert [text[:7] for text in found.evidence or ()] == ["step 0:", "the rul"]
    assert "3 micro-batches of 10 tokens; the limits max_tokens = 30 ask for 1" in found.message


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.none() | st.integers(1, 5), st.none() | st.integers(1, 150),
    st.none() | st.integers(1, 150),
)  # fmt: skip
def test_the_number_that_limits_ask_for_is_the_loops_own(
    lengths: list[int], samples: int | None, tokens: int | None, padded: int | None
) -> None:
    limits = MicroBatch(samples=samples, max_tokens=tokens, max_padded_tokens=padded)
    cut = batching.micro_batches(tuple(range(len(lengths))), lengths, limits, 1)
    assert work._needed(lengths, limits.model_dump()) == len(cut)


def decode(running: int, waiting: int, step: int = 0) -> list[Row]:
    return [
        MetricRow(name=f"rollout/{name}", raw_name=name, value=float(value), step=step, stage="rollout")
        for name, value in (("running", running), ("waiting", waiting))
    ]


def test_slots_are_full_while_samples_wait(tmp_path: Path) -> None:
    rows = [*decode(4, 3), *decode(3, 0), *decode(4, 3, step=1), *decode(3, 1, step=1)]
    found = told(work.check, tmp_path / "run", rows, {"rollout": {"max_running": 4}})
    assert (found["slots_idle"].verdict, found["slots_idle"].step) == ("warn", 1)
    assert "1 of 2 decode steps run 3 samples while others wait" in found["slots_idle"].message
    assert all(found[name].verdict == "skipped" for name in found.keys() - {"slots_idle"})


def steps(writing: Sequence[float], whole: float = 10.0) -> list[Row]:
    """Steps of so many seconds, each with so many for its checkpoint at the end."""
    rows: list[Row] = []
    for step, seconds in enumerate(writing):
        begin, end = int(step * whole * S), int((step + 1) * whole * S)
        rows.append(
            SpanRow(id=2 * step, event="whole", name="rl_step", span_kind="host", step=step, start_ns=begin, end_ns=end)
        )
        if not seconds:
            continue
        rows.append(
            SpanRow(id=2 * step + 1, event="whole", name="checkpoint", span_kind="stage", stage="checkpoint", step=step,
            start_ns=int(end - seconds * S), end_ns=end)
        )  # fmt: skip
    return rows


@pytest.mark.parametrize(("seconds", "whole", "step"), [([9.0, 2.9, 0.0, 6.1], 10.0, 3), ([0.9, 0.9], 1.0, None)])
def test_checkpoints_cost_less_than_a_third_of_the_time(
    tmp_path: Path, seconds: list[float], whole: float, step: int | None
) -> None:
    """29 % of step 1, then 6.1 s of the 20 s of steps 2 and 3; a checkpoint of less than a second is none to speak of."""
    found = told(work.check, tmp_path / "run", steps(seconds, whole))["checkpoints_too_slow"]
    assert (found.step, found.verdict == "warn") == (step, step is not None)
