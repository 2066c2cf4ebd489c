"""Metrics of ranks, memory and speed by hand: load, imbalance, waits and bubbles, fragmentation at the peak, utilisation."""

from pathlib import Path

import pytest

from flowledger.diagnose.measures import Series, series_of
from flowledger.diagnose.measures.absent import needs
from flowledger.diagnose.measures.speed import Shape
from flowledger.ledger.rows import MemoryRow, MetricRow, Row, SampleRow, TensorRow, Trained
from flowledger.tables.gpus import gpu
from tests.diagnose.measured import book, stage_span, step_span

LENGTHS = {0: ((10, 20), (10, 30)), 1: ((5, 5),)}  # rank -> (prompt, response) of what it trains on
WHOLE_JOB = (
    "total_tokens", "tokens_per_s", "step_time_s", "goodput", "response_length/p99", "stage_time_s/update_actor",
    *(f"load/update_actor/{what}" for what in ("samples", "tokens", "length_squares", "longest")),
    *(f"imbalance/update_actor/{what}" for what in ("samples", "tokens", "length_squares", "longest", "time")),
)  # fmt: skip
BINDINGS = {"H": 8, "L": 2, "A": 2, "K": 1, "D": 4, "F": 16, "V": 32}


def rank_rows(rank: int, lengths: tuple[tuple[int, int], ...]) -> list[Row]:
    """A step of 4 s whose update takes 2 s; rank 1 comes to its collective half a second before rank 0."""
    rows: list[Row] = [
        step_span(1, seconds=4), stage_span(1, "update_actor", 2, 4, id=2),
        stage_span(
            1, "update_actor", 3.5 - 0.5 * rank, 3.75, id=3, span_kind="comm", comm_type="all_reduce", group="dp",
            peer_ranks=[0, 1], parent=2,
        ),
    ]  # fmt: skip
    for number, (prompt, response) in enumerate(lengths):
        name = f"{rank}-{number}"
        trained = [Trained(epoch=e, mini_batch=0, rank=rank, micro_batch=number) for e in (0, 1)]
        rows.append(SampleRow(step=1, sample_id=name, stage="rollout", prompt_length=prompt, response_length=response))
        rows.append(SampleRow(step=1, sample_id=name, stage="update_actor", trained=trained))
    return rows


def reading(stage: str, instant: str, allocated: int, reserved: int, used: int, **kinds: int) -> list[MemoryRow]:
    total = MemoryRow(
        step=1, stage=stage, instant=instant, kind="total", allocated=allocated, reserved=reserved, device_used=used,
        limit=1000,
    )  # fmt: skip
    parts = [MemoryRow(step=1, stage=stage, instant=instant, kind=kind, allocated=size) for kind, size in kinds.items()]
    return [total, *parts]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    memory = [
        *reading("rollout", "end", 500, 900, 950), *reading("update_actor", "peak", 600, 800, 820, param=300, grad=240),
    ]  # fmt: skip
    cache = [
        MetricRow(step=1, name=f"rollout/kv_blocks{which}", raw_name="", value=value, weight=2.0)
        for which, value in (("", 100.0), ("_used", 25.0))
    ]
    tensors = [
        TensorRow(step=1, tensor_name=name, storage=storage, bytes=size, shape_checksum=7, stage="rollout")
        for name, storage, size in (("prompt_ids", 1, 40), ("prompt_ids", 1, 40), ("response_ids", 2, 60))
    ]
    odd = TensorRow(step=1, tensor_name="response_ids", storage=3, bytes=10, shape_checksum=8, stage="rollout")
    ranks = [rank_rows(rank, lengths) for rank, lengths in LENGTHS.items()]
    first, second = [*ranks[0], *memory, *cache, *tensors], [*ranks[1], *reading("rollout", "end", 90, 100, 0), odd]
    folder = tmp_path_factory.mktemp("ranks")
    return series_of(book(folder / "run", first, second, bindings=BINDINGS, device="NVIDIA H100 80GB HBM3"))


def test_the_load_of_each_rank(series: Series) -> None:
    assert series.by_rank("load/update_actor/tokens") == {1: {0: 70, 1: 10}}
    assert series.by_rank("load/update_actor/length_squares") == {1: {0: 30**2 + 40**2, 1: 100}}
    assert series.by_rank("load/update_actor/longest") == {1: {0: 40, 1: 10}}
    assert series.by_rank("load/update_actor/samples") == {1: {0: 2, 1: 1}}
    assert series.by_step("load/update_actor/tokens") == {1: 40}
    assert series.by_step("load/update_actor/longest") == {1: 40}


def test_imbalance_is_the_most_by_the_mean(series: Series) -> None:
    expected = {"tokens": 70 / 40, "length_squares": 2500 / 1300, "samples": 2 / 1.5, "longest": 40 / 25}
    for name, value in {**expected, "time": 2 / 1.75}.items():  # rank 1 waited half a second of its two
        assert series.by_step(f"imbalance/update_actor/{name}")[1] == pytest.approx(value, abs=1e-3), name


def test_who_waits_for_a_later_rank_is_in_a_bubble(series: Series) -> None:
    """Their clocks differ by microseconds, as each part notes its own."""
    assert series.by_rank("wait_time_s/update_actor")[1] == pytest.approx({0: 0.0, 1: 0.5}, abs=1e-3)
    assert series.by_rank("comm_time_s/update_actor")[1] == pytest.approx({0: 0.25, 1: 0.75})
    assert series.by_step("bubble/update_actor")[1] == pytest.approx(0.5 / 4, abs=1e-3)
    assert series.by_step("bubble")[1] == pytest.approx(0.5 / 4, abs=1e-3)
    assert series.by_step("stage_time_s/update_actor")[1] == pytest.approx(2)
    assert series.by_step("goodput")[1] == pytest.approx(0.5)


def test_fragmentation_is_that_of_the_reading_with_the_most_allocated(series: Series) -> None:
    assert series.by_rank("memory/fragmentation")[1] == pytest.approx({0: 1 - 600 / 800, 1: 0.1})
    assert series.by_step("memory/allocated_peak") == {1: 600}
    assert series.by_step("memory/reserved_peak") == {1: 900}
    assert series.by_step("memory/device_used") == {1: 950}
    assert series.by_step("memory/headroom")[1] == pytest.approx(0.05)
    assert series.by_step("memory/residue_share")[1] == pytest.approx(60 / 600)


def test_tensors_count_each_storage_once_and_shapes_must_be_alike(series: Series) -> None:
    assert series.by_rank("tensor/bytes") == {1: {0: 100, 1: 10}}
    assert series.by_step("tensor/shape_mismatches") == {1: 1}


def test_speed_and_utilisation(series: Series) -> None:
    """Of 80 tokens, each trained on twice; the sizes by hand: 2 layers of attention and gated feed-forward, and the head."""
    assert series.by_step("tokens_per_s") == {1: 20}
    assert series.by_step("tokens_per_s_per_gpu") == {1: 10}
    active = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 32
    squares = 2 * (30**2 + 40**2 + 10**2)
    operations = 6 * active * 160 + 6 * (2 * 2 * 4) * squares
    peak = 2 * gpu("H100").matrix_flops
    assert series.by_step("mfu")[1] == pytest.approx(operations / (2 * peak))
    assert series.by_step("mfu/with_recompute") == series.by_step("mfu")  # nothing was recomputed
    assert series.by_step("rollout/kv_used") == {1: 0.25}


def test_recomputed_activations_are_a_forward_pass_more() -> None:
    shape = Shape(active=1000, attention=10)
    assert shape.flops(10, 100, again=True) == pytest.approx(4 / 3 * shape.flops(10, 100, again=False))
    assert shape.flops(10, 0, again=False) == 60_000


def test_on_a_cpu_nobody_states_a_peak(tmp_path: Path) -> None:
    with book(tmp_path / "run", rank_rows(0, LENGTHS[0]), bindings=BINDINGS) as ledger:
        made = series_of(ledger).made
        assert "CPU" in needs(ledger, made, "mfu") and not made.by_step("mfu")
        assert "several ranks" in needs(ledger, made, "imbalance/<stage>/tokens")


def test_which_rank_is_which_changes_nothing_of_the_whole_job(tmp_path: Path) -> None:
    """Three ranks of unequal load, and the same under other numbers. Only who waits is left out: it depends on nobody."""
    loads = [((3, 4), (5, 6)), ((7, 1),), ((2, 2), (1, 9), (4, 4))]

    def numbers(path: Path, of: tuple[int, ...]) -> dict[str, dict[int, float]]:
        ranks = [
            [row for row in rank_rows(which, loads[which]) if getattr(row, "comm_type", None) is None] for which in of
        ]
        with book(path, *ranks) as ledger:
            series = series_of(ledger)
            return {name: series.by_step(name) for name in WHOLE_JOB}

    plain, permuted = numbers(tmp_path / "a", (0, 1, 2)), numbers(tmp_path / "b", (2, 0, 1))
    assert all(plain.values()) and all(plain[name] == pytest.approx(permuted[name]) for name in plain)
