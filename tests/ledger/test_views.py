from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, Row, SampleRow, SpanRow, StorageRow, TensorRow
from flowledger.ledger.writer import Writer
from tests.diagnose import sick
from tests.diagnose.ranks import book
from tests.ledger.synthetic import KINDS, MS, RESPONSE_LENGTHS, STAGE_MS, slow_run, synthetic_run

LOG_FIELDS = [
    "stage", "rank", "tensor_name", "logical_shape", "local_shape", "dtype", "numel", "bytes", "mask_ratio", "lifetime",
    "comm_type", "latency_ms", "owner",
]  # fmt: skip


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(synthetic_run(tmp_path_factory.mktemp("views") / "a")) as opened:
        yield opened


def of(tmp_path: Path, *rows: Row) -> Ledger:
    writer = Writer(create(tmp_path / "b", Manifest(run="b")).part("actor", 0))
    for row in rows:
        writer.put(row)
    writer.close()
    return Ledger(tmp_path / "b")


def test_a_stage_has_its_time_its_share_its_tokens_and_its_peak(ledger: Ledger) -> None:
    rows = {row["stage"]: row for row in ledger.rows("FROM stages WHERE step = 1")}
    assert list(rows) == list(STAGE_MS)  # in the order of a step
    assert {stage: round(row["seconds"] * 1e3) for stage, row in rows.items()} == STAGE_MS
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    update = rows["update_actor"]
    assert (update["tokens_logical"], update["tokens_valid"], update["tokens_computed"]) == (28, 21, 28)
    assert update["tokens_per_s"] == pytest.approx(21 / 0.030) and update["peak_bytes"] == 20_000


def test_a_begin_and_an_end_are_one_span_and_an_open_one_stays_open(tmp_path: Path) -> None:
    common = {"name": "a", "span_kind": "stage", "stage": "rollout", "step": 0}
    with of(
        tmp_path,
        SpanRow(id=1, event="begin", start_ns=10, **common),
        SpanRow(id=2, event="begin", start_ns=20, **common),
        SpanRow(id=1, event="end", start_ns=10, end_ns=4_000_010, latency_ms=4.0, tokens_valid=7, **common),
    ) as ledger:
        rows = ledger.rows("FROM spans_view ORDER BY id")
        assert [(r["start_ns"], r["end_ns"], r["latency_ms"], r["tokens_valid"]) for r in rows] == [
            (10, 4_000_010, 4.0, 7), (20, None, None, None),
        ]  # fmt: skip
        (stage,) = ledger.rows("FROM stages")
        assert stage["open_calls"] == 1 and stage["seconds"] == pytest.approx(0.004)


def test_shapes_collapse_steps_and_micro_batches_to_ranges(tmp_path: Path) -> None:
    def logits(shape: list[int], micro_batch: int, layer: int | None = None) -> Row:
        return TensorRow(
            step=0, stage="update_actor", phase="forward", tensor_name="logits", dims="[T_logit, V]", micro_batch=micro_batch,
            logical_shape=shape, local_shape=shape, access="write", layer=layer,
        )  # fmt: skip

    with of(tmp_path, logits([9, 16], 0, 0), logits([12, 16], 1, 1), logits([4, 16], 2, 1)) as ledger:
        (row,) = ledger.rows("FROM shapes")
    assert row["dims"] == "T_logit, V" and row["logical_shape"] == [12, 16] and row["logical_shape_min"] == [4, 16]
    assert row["layers"] == 2 and row["accesses"] == 3 and row["common_bug"] and row["lifetime"] == "micro_batch"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_mask_fits_exactly_when_numpy_broadcasts_it_or_its_leading_dims_match(
    ledger: Ledger, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mask = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))

    def broadcasts(small: list[int]) -> bool:
        try:
            return np.broadcast_shapes(tuple(small), tuple(shape)) == tuple(shape)
        except ValueError:
            return False

    expected = len(mask) <= len(shape) and (broadcasts(mask) or broadcasts([*mask, *[1] * (len(shape) - len(mask))]))
    assert ledger.rows("SELECT mask_fits(?::BIGINT[], ?::BIGINT[]) AS fits", [mask, shape]) == [{"fits": expected}]


def test_a_mask_that_does_not_broadcast_is_a_finding_that_names_both(tmp_path: Path) -> None:
    row = TensorRow(step=0, stage="update_actor", phase="loss", tensor_name="loss_mat", dims="B_micro, S_resp", access="write",
                    logical_shape=[4, 3], local_shape=[4, 3], mask="loss_mask", mask_shape=[3, 4])  # fmt: skip
    with of(tmp_path, row) as ledger:
        (finding,) = ledger.rows("FROM findings_view")
    assert finding["verdict"] == "fail" and finding["order"] == "shape_mismatch"
    assert (
        finding["message"] == "loss_mat [4, 3] in update_actor/loss: its mask loss_mask [3, 4] does not broadcast to it"
    )


def test_the_kinds_and_the_residue_add_up_to_what_is_allocated(ledger: Ledger) -> None:
    (peak,) = ledger.rows("FROM memory_by_stage WHERE step = 0 AND instant = 'peak'")
    assert {kind: peak[kind] for kind in KINDS} == KINDS
    assert peak["residue"] == 20_000 - sum(KINDS.values()) == 500
    assert peak["fragmentation"] == pytest.approx(0.2)
    (end,) = ledger.rows("FROM memory_by_stage WHERE step = 0 AND stage = 'rollout'")
    assert end["residue"] is None and end["allocated"] == 10_000  # nobody took it apart: nothing is claimed


def test_the_peak_names_its_step_stage_phase_and_micro_batch(ledger: Ledger) -> None:
    rows = ledger.rows("FROM peaks")
    assert [(r["step"], r["stage"], r["phase"], r["micro_batch"], r["peak"]) for r in rows] == [
        (step, "update_actor", "backward", 1, 20_000) for step in (0, 1)
    ]


def test_of_many_readings_of_one_instant_the_fullest_is_shown_whole(tmp_path: Path) -> None:
    def reading(micro_batch: int, param: int, activation: int) -> list[Row]:
        where = {"step": 0, "stage": "update_actor", "instant": "end", "micro_batch": micro_batch, "t_ns": micro_batch}
        sizes = {"param": param, "activation": activation, "total": param + activation}
        return [MemoryRow(kind=kind, allocated=size, **where) for kind, size in sizes.items()]

    with of(tmp_path, *reading(0, 900, 10), *reading(1, 100, 1000)) as ledger:
        (row,) = ledger.rows("FROM memory_by_stage")
    assert (row["param"], row["activation"], row["allocated"]) == (100, 1000, 1100)


def test_lifetimes_say_where_made_who_read_where_freed_and_who_holds(ledger: Ledger) -> None:
    rows = {row["tensor_name"]: row for row in ledger.rows("FROM lifetimes WHERE step = 0")}
    prompt = rows["prompt_ids"]
    assert (prompt["born_at"], prompt["readers"], prompt["freed_at"], prompt["outlives"]) == (
        "prompt",
        ["rollout"],
        "rollout",
        False,
    )
    assert (
        rows["old_log_prob"]["born_at"] == "old_log_prob/forward"
        and rows["old_log_prob"]["last_read_at"] == "update_actor"
    )
    assert rows["reward"]["holder"] == "dict in loop" and rows["reward"]["outlives"] is True
    assert rows["response_ids"]["freed_at"] is None and rows["response_ids"]["outlives"] is None


def test_a_tensor_freed_later_than_declared_outlives(tmp_path: Path) -> None:
    def life(storage: int, freed_stage: str, step: int) -> list[Row]:
        return [
            TensorRow(step=0, stage="prompt", tensor_name="prompt_ids", access="write", storage=storage, bytes=8),
            StorageRow(step=0, stage="prompt", storage=storage, event="born", bytes=8),
            StorageRow(step=step, stage=freed_stage, storage=storage, event="freed"),
        ]

    with of(tmp_path, *life(1, "rollout", 0), *life(2, "reward", 0), *life(3, "rollout", 1)) as ledger:
        assert [row["outlives"] for row in ledger.rows("FROM lifetimes ORDER BY storage")] == [False, True, True]


def test_samples_are_put_together_from_all_stages_and_the_last_word_wins(ledger: Ledger, tmp_path: Path) -> None:
    rows = ledger.rows("FROM samples_merged WHERE step = 1")
    assert [row["sample_id"] for row in rows] == ["4", "5", "6", "7"]
    assert tuple(row["response_length"] for row in rows) == RESPONSE_LENGTHS
    assert [row["group_id"] for row in rows] == ["2", "2", "3", "3"] and rows[2]["trained"][0]["micro_batch"] == 1
    with of(
        tmp_path, *(SampleRow(sample_id="1", reward=r, attempt=a) for r, a in [(1.0, 0), (2.0, 0), (None, 0), (9.0, 1)])
    ) as own:
        assert [(r["attempt"], r["reward"]) for r in own.rows("FROM samples_merged")] == [(0, 2.0), (1, 9.0)]


def test_tokens_are_put_together_and_stay_in_order(ledger: Ledger) -> None:
    rows = ledger.rows("FROM tokens_merged WHERE sample_id = '0'")
    assert "".join(row["text"] for row in rows) == "abcdefg" and [row["position"] for row in rows] == list(range(7))
    assert (
        [row["loss_mask"] for row in rows] == [None] * 4 + [1] * 3
        and rows[5]["new_log_prob"] == -0.4
        and rows[5]["token_id"] == 102
    )


def test_the_log_has_exactly_thirteen_fields_in_their_order(ledger: Ledger) -> None:
    names, rows = ledger.query("FROM log")
    assert names == LOG_FIELDS and len(rows) == 28
    first = dict(zip(names, rows[0], strict=True))
    assert (
        first["tensor_name"] == "prompt_ids" and first["latency_ms"] == 1.0 and first["bytes"] == 64 and first["owner"]
    )


def test_a_metric_is_the_weighted_mean_over_processes_and_nan_is_never_averaged_away(tmp_path: Path) -> None:
    with of(
        tmp_path,
        MetricRow(step=0, name="kl", raw_name="kl", value=1.0, weight=3.0),
        MetricRow(step=0, name="kl", raw_name="kl", value=5.0, weight=1.0),
        MetricRow(step=1, name="kl", raw_name="kl", value=1.0),
        MetricRow(step=1, name="kl", raw_name="kl", value=float("inf")),
    ) as ledger:
        assert [(r["value"], r["special"]) for r in ledger.rows("FROM metrics_by_step")] == [(2.0, None), (None, "inf")]


def test_what_each_rank_has_for_itself_is_summed_as_one_process_would_have_it(tmp_path: Path) -> None:
    """Six samples decode for 4, 4, 3, 2, 1, 1 steps. One process runs 6, 4, 3, 2: a mean of 15 / 4 over 4 steps."""

    def running(counts: list[int]) -> list[Row]:
        told = [MetricRow(step=0, name="rollout/running", raw_name="rollout/running", value=float(n)) for n in counts]
        return [*told, MetricRow(step=0, name="recorder/rows", raw_name="recorder/rows", value=5.0)]

    def merged(name: str, *ranks: list[int]) -> dict[str, float]:
        with Ledger(book(tmp_path / name, [running(counts) for counts in ranks])) as ledger:
            return {row["name"]: row["value"] for row in ledger.rows("FROM metrics_by_step")}

    assert merged("one", [6, 4, 3, 2]) == {"rollout/running": 15 / 4, "recorder/rows": 5}
    assert merged("two", [3, 2, 2, 2], [3, 2, 1]) == {"rollout/running": 15 / 4, "recorder/rows": 10}
    weighted = [
        MetricRow(step=0, name="rollout/running", raw_name="r", value=n, weight=w) for n, w in ((3.0, 1.0), (2.0, 3.0))
    ]
    with Ledger(book(tmp_path / "weighted", [weighted, running([3, 2, 1])[:3]])) as ledger:
        assert [row["value"] for row in ledger.rows("FROM metrics_by_step")] == [15 / 4]


def whole(step: int, *, span: int = 1, ended: bool = True) -> list[Row]:
    """A step that begins and, perhaps, ends."""
    told = {"id": span, "step": step, "name": "step", "span_kind": "stage", "start_ns": 10 * span}
    end = SpanRow(**told, event="end", end_ns=10 * span + 5)
    return [SpanRow(**told, event="begin"), *([end] if ended else [])]


def failed(step: int) -> Row:
    return FindingRow(id="call_failed", verdict="fail", message="reward raised ValueError", step=step)


@pytest.mark.parametrize(
    ("ranks", "cut"),
    [
        (
            [[*whole(0), *whole(1, span=2), *whole(2, span=3), failed(2), *whole(3, span=4)],
             [*whole(0), *whole(1, span=2, ended=False), *whole(2, span=3)]],
            [1, 2, 3],
        ),
        ([[*whole(0), *whole(1, span=2)], []], [0, 1]),
        ([[failed(0)]], []),
    ],
    ids=["one is open, an exception, one did not come", "one told nothing", "no step is recorded"],
)  # fmt: skip
def test_a_step_is_cut_off_where_not_every_rank_ended_it(
    tmp_path: Path, ranks: list[list[Row]], cut: list[int]
) -> None:
    with Ledger(book(tmp_path / "run", ranks)) as ledger:
        assert [row["step"] for row in ledger.rows("FROM cut_steps")] == cut
        walked = ledger.rows("FROM walked ORDER BY ALL")
        for _ in range(2):  # a second time there is nothing to do
            ledger.settle("walked", "cut_steps")
        assert [row["step"] for row in ledger.rows("FROM cut_steps ORDER BY step")] == cut
        assert ledger.rows("FROM walked ORDER BY ALL") == walked


def test_a_critic_learns_from_the_samples_of_its_rank_that_have_an_advantage(tmp_path: Path) -> None:
    """Two of three samples are left; before `critic.warmup_steps` the policy is not updated at all."""

    def rank(*kept: str, dropped: str | None = None) -> list[Row]:
        update = SpanRow(
            id=1, step=0, stage="update_critic", name="update_critic", span_kind="stage", event="whole", start_ns=0, end_ns=9,
        )  # fmt: skip
        samples = [
            SampleRow(
                step=0, stage="advantage", sample_id=one, advantage=0.5, prompt_length=2, response_length=int(one)
            )
            for one in kept
        ]
        gone = (
            [SampleRow(step=0, stage="advantage", sample_id=dropped, advantage=0.0, dropped_reason="rejected")]
            if dropped
            else []
        )
        return [update, *samples, *gone]

    with Ledger(book(tmp_path / "run", [rank("1", "3"), rank("4", dropped="5")])) as ledger:
        rows = ledger.rows("FROM balance_at(NULL)")
    assert [(row["stage"], row["rank"], row["samples"], row["tokens"], row["longest"]) for row in rows] == [
        ("update_critic", 0, 2, 3 + 5, 5), ("update_critic", 1, 1, 6, 6),
    ]  # fmt: skip


def test_a_rank_waits_in_a_collective_until_the_last_has_come(tmp_path: Path) -> None:
    with Ledger(slow_run(tmp_path / "slow")) as ledger:
        rows = ledger.rows("FROM waited ORDER BY id")
        met = ledger.rows("SELECT id, count(*) AS ranks, sum(seconds) AS seconds FROM waits GROUP BY id ORDER BY id")
    assert [(r["rank"], r["id"], r["stage"], r["seconds"], r["last_rank"], r["last_stage"]) for r in rows] == [
        (0, 3, "filter", 20.0, 1, "reward"),  # 1 to 21
        (0, 5, "update_actor", 3.0, 1, "update_actor"),  # 22 to 25
        (0, 6, "update_actor", 1.0, 1, "update_actor"),  # 23 to 26, of which the one before has 23 to 25
        (0, 7, "update_actor", 0.25, 1, "update_actor"),  # who broadcasts goes on when it has sent
        (0, 8, None, 1.5, 1, None),  # the last had left its stage, and begun no other
    ]
    assert [row["ranks"] for row in met] == [2] * 5  # none of the collective in which one rank is missing
    assert [row["seconds"] for row in met] == [20.0, 3.0, 1.0, 0.25, 1.5]  # so the last itself waited for nobody


def test_the_balance_has_every_stage_of_every_rank_and_counts_overlapping_collectives_once(tmp_path: Path) -> None:
    with Ledger(slow_run(tmp_path / "slow")) as ledger:
        rows = ledger.rows("FROM balance_at(0)")
        nowhere = ledger.rows("FROM balance_at(1)")
    columns = ("stage", "rank", "samples", "seconds", "comm_seconds", "waited_seconds", "waited_for")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("reward", 0, None, 1.0, 0.0, None, None),
        ("reward", 1, None, 21.0, 0.0, None, None),
        ("filter", 0, None, 20.5, 20.25, 20.0, 1),
        ("filter", 1, None, 0.5, 0.25, 0.0, None),
        ("update_actor", 0, None, 8.0, 5.25, 4.25, 1),  # 22 to 27 and 27 to 27.25; their latencies add up to 8.25
        ("update_actor", 1, None, 8.25, 2.25, 0.0, None),
    ]
    assert nowhere == []


def test_the_samples_of_a_rank_stand_in_the_stages_that_share_them(ledger: Ledger) -> None:
    rows = {row["stage"]: row for row in ledger.rows("FROM balance_at(1)")}
    assert list(rows) == list(STAGE_MS)
    assert {stage: row["samples"] for stage, row in rows.items() if row["samples"]} == {"rollout": 4, "update_actor": 4}
    assert rows["update_actor"]["tokens"] == 7 + 6 + 6 + 4 and rows["update_actor"]["micro_batches"] == 2


def test_a_stage_of_several_ranks_names_the_slowest_and_its_waiting(ledger: Ledger, tmp_path: Path) -> None:
    with Ledger(slow_run(tmp_path / "slow")) as several:
        rows = several.rows("FROM stages")
    assert [(r["stage"], r["seconds"], r["slowest_rank"], r["waited_seconds"]) for r in rows] == [
        ("reward", 21.0, 1, None), ("filter", 20.5, 1, 0.0), ("update_actor", 8.25, 1, 0.0),
    ]  # fmt: skip
    assert {row["slowest_rank"] for row in ledger.rows("FROM stages")} == {None}  # one process: nothing to name


# Rank -> the seconds at which it begins the stage and comes to the collective in which all meet; all are done at 8.
EQUAL = {
    "equals": ([(0, 8)] * 3, (0, 0.0)),
    "who waited less": ([(0, 4), (4, 8), (2, 6)], (1, 0.0)),
    "who worked longest": ([(0, 2), (5, 8), (6, 8)], (1, 0.0)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_slowest_rank_worked_longest_and_of_equals_waited_less_and_is_the_lowest(name: str, tmp_path: Path) -> None:
    times, found = EQUAL[name]
    meets = {"stage": "reward", "span_kind": "comm", "comm_type": "all_reduce", "peer_ranks": [0, 1, 2], "step": 0}
    ranks: list[list[Row]] = [
        [sick.span(1, "reward", begins, 8, step=0), sick.span(2, "all_reduce", comes, 8, **meets)]
        for begins, comes in times
    ]
    with Ledger(sick.run(tmp_path / "run", ranks)) as several:
        (row,) = several.rows("FROM stages")
    assert (row["slowest_rank"], row["waited_seconds"]) == found
    assert row["seconds"] == 8 - min(begins for begins, _ in times)  # of the stage the longest, whoever it was


def stage(number: int, name: str, start_ns: int, end_ns: int) -> SpanRow:
    return SpanRow(
        id=number, event="whole", step=0, stage=name, name=name, span_kind="stage", start_ns=start_ns, end_ns=end_ns
    )


def test_shares_are_of_all_ranks_time_and_a_stage_within_another_counts_once(tmp_path: Path) -> None:
    """Two ranks whose step takes 10 s: 4 of 20 rank-seconds are rollout's, 10 the update's, 2 the sync's inside of it."""
    second = 10**9
    whole = {"event": "whole", "step": 0, "name": "step", "span_kind": "host", "start_ns": 0, "end_ns": 10 * second}
    first = [stage(2, "rollout", 0, second), stage(3, "update_actor", second, 9 * second)]
    first.append(stage(4, "weight_sync", 2 * second, 4 * second))
    other = [stage(2, "rollout", 0, 3 * second), stage(3, "update_actor", 3 * second, 7 * second)]
    with Ledger(book(tmp_path / "two", [[SpanRow(id=1, **whole), *rows] for rows in (first, other)])) as ledger:
        rows = {row["stage"]: (row["seconds"], round(row["share"], 6)) for row in ledger.rows("FROM stages")}
    assert rows == {"rollout": (3.0, 0.2), "update_actor": (8.0, 0.5), "weight_sync": (2.0, 0.1)}


def test_stages_that_overlap_share_the_time_that_they_took_together(tmp_path: Path) -> None:
    spans = [("rollout", 0, 9), ("rollout", 3, 4), ("reward", 2, 22), ("values", 20, 22), ("values", 20, 22)]
    with of(tmp_path, *(stage(n, name, start * MS, end * MS) for n, (name, start, end) in enumerate(spans))) as ledger:
        shares = {row["stage"]: row["share"] for row in ledger.rows("FROM stages")}
    assert shares == pytest.approx({"rollout": 3 / 22, "reward": 17 / 22, "values": 2 / 22})


def test_ranks_that_train_on_the_same_samples_count_once_and_those_that_sampled_them_all_do(tmp_path: Path) -> None:
    """Two ranks of a pipeline: each samples 60 tokens, which balance reads; then both train on all 120."""
    run = create(tmp_path / "pp", Manifest(run="pp", mesh={"pp": 2}))
    for rank in (0, 1):
        writer = Writer(run.part("actor", rank, coordinates={"pp": rank}))
        for number, (name, tokens) in enumerate([("rollout", 60), ("balance", 60), ("update_actor", 120)]):
            spent = {"start_ns": number * MS, "end_ns": (number + 1) * MS, "latency_ms": 1.0, "span_kind": "stage"}
            writer.put(
                SpanRow(
                    id=number, event="whole", step=0, stage=name, name=name, rank=rank, tokens_logical=tokens, **spent
                )
            )
        writer.close()
    with Ledger(tmp_path / "pp") as ledger:
        assert {row["tokens_logical"] for row in ledger.rows("FROM stages")} == {120}
