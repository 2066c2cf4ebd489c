"""What is kept too long, from readings written by hand: each rule once broken and once just kept."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from flowledger.diagnose.checks.retained import check
from flowledger.ledger.rows import MemoryRow, Row, StorageRow, TensorRow
from tests.diagnose.by_hand import told

MIB = 1 << 20
KINDS = ("param", "grad", "optimizer", "activation", "kv_cache", "temporary", "batch")


def reading(step: int, instant: str, stage: str | None = None, phase: str | None = None, **kinds: int) -> list[Row]:
    """One moment of a watched step, every kind told."""
    where = {
        "step": step,
        "stage": stage,
        "phase": phase,
        "mini_batch": 0 if phase else None,
        "epoch": 0 if phase else None,
    }
    return [
        MemoryRow(instant=instant, kind=kind, allocated=kinds.get(kind, 0), t_ns=-1, **where)  # type: ignore[arg-type]
        for kind in KINDS
    ]


def mini_batch(left: int, most: int = 1000) -> list[Row]:
    """Activations of a forward pass, and those that are left when the optimizer steps."""
    return [
        *reading(0, "end", "update_actor", "forward", activation=most),
        *reading(0, "begin", "update_actor", "step", activation=left),
    ]


def total(step: int, allocated: int) -> MemoryRow:
    """The allocator at the end of a step."""
    return MemoryRow(instant="end", kind="total", allocated=allocated, reserved=allocated, step=step)


def sync(after: int) -> list[Row]:
    """Weight sync of 1000 bytes of weights that leaves `after` bytes behind."""
    weights = TensorRow(
        tensor_name="params", stage="weight_sync", step=0, access="read", bytes=1000, numel=250, dtype="float32",
        local_shape=[250],
    )  # fmt: skip
    return [
        *reading(0, "begin", "weight_sync", param=1000),
        weights,
        *reading(0, "end", "weight_sync", param=1000, temporary=after),
    ]


def held(step: int, freed_in: int | None = None) -> list[Row]:
    """A storage that is alive after its stage, and dies in a later step, in this one, or never."""
    rows: list[Row] = [
        StorageRow(storage=step, event="held", bytes=8, kind="batch", holder="list LOG", step=step, stage="rollout")
    ]
    if freed_in is not None:
        rows.append(StorageRow(storage=step, event="freed", bytes=8, kind="batch", step=freed_in))
    return rows


def begins(*live: int) -> list[Row]:
    """Live temporaries where steps begin, beside 10,000 bytes of weights."""
    return [row for step, size in enumerate(live) for row in reading(step, "begin", param=10_000, temporary=size)]


BORN = StorageRow(storage=99, event="born", bytes=8, kind="batch", step=0)
RULES: dict[str, tuple[str, Sequence[Row], Sequence[Row]]] = {
    "an eighth of the activations is left": ("graph_retained", mini_batch(125), mini_batch(100)),
    "held into the next step": ("held_beyond_lifetime", [BORN, *held(0, freed_in=1)], [BORN, *held(0, freed_in=0)]),
    "gradients in rollout": (
        "gradients_kept", reading(1, "end", "rollout", grad=8), reading(1, "end", "update_actor", grad=8),
    ),
    "a cache in the update": (
        "kv_cache_kept", reading(0, "end", "update_actor", kv_cache=8), reading(0, "end", "rollout", kv_cache=8),
    ),
    "more than half of the weights is left": ("weights_copied", sync(501), sync(500)),
    "tensors grow by 60 bytes of 10,000, twice": ("tensors_leak", begins(0, 60, 121), begins(0, 60, 100, 160)),
    "memory grows by 17 MiB, twice": (
        "memory_grows_fast",
        [total(step, (100 + 17 * step) * MIB) for step in range(4)],
        [total(step, (100 + 17 * min(step, 2)) * MIB) for step in range(5)],  # steps 0 and 1 are the warm-up
    ),
}  # fmt: skip


def test_what_is_kept_is_found_and_what_is_due_is_not(tmp_path: Path) -> None:
    sick = told(check, tmp_path / "sick", [row for _, rows, _ in RULES.values() for row in rows])
    well = told(check, tmp_path / "well", [row for _, _, rows in RULES.values() for row in rows])
    for name, (rule, _, _) in RULES.items():
        assert sick[rule].verdict in ("warn", "fail") and sick[rule].next_step, name
        assert well[rule].verdict == "pass", (name, well[rule].message)


def test_a_loop_that_is_not_ours_may_keep_a_batch_for_a_while(tmp_path: Path) -> None:
    for_good, for_a_while = (
        [
            BORN,
            *reading(1, "end", "rollout", grad=8),
            *(row for step in (3, 2, 1, 0) for row in held(step, freed_in)),
        ]
        for freed_in in (None, 9)
    )
    kept = told(check, tmp_path / "kept", for_good, framework="trl")
    assert (kept["held_beyond_lifetime"].verdict, kept["held_beyond_lifetime"].step) == ("warn", 0)
    assert "list LOG" in kept["held_beyond_lifetime"].message
    assert kept["gradients_kept"].verdict == "skipped" and kept["gradients_kept"].needs
    assert told(check, tmp_path / "freed", for_a_while, framework="trl")["held_beyond_lifetime"].verdict == "pass"


def test_without_rows_each_question_says_what_it_lacks(tmp_path: Path) -> None:
    found = told(check, tmp_path / "run", [])
    assert len(found) == 7 and all(one.verdict == "skipped" and one.needs for one in found.values())


@pytest.mark.parametrize("first", [0, 1, 40], ids=["from 0", "from 1", "resumed"])
def test_the_first_two_steps_fill_what_stays_whatever_number_they_have(tmp_path: Path, first: int) -> None:
    """300 MiB, 340, 380 is how a run begins; another two such steps are growth."""
    rows = [total(first + n, (300 + 40 * n) * MIB) for n in range(4)]
    begins = told(check, tmp_path / "begins", rows[:3])["memory_grows_fast"]
    goes_on = told(check, tmp_path / "on", rows)["memory_grows_fast"]
    assert (begins.verdict, goes_on.verdict, goes_on.step) == ("pass", "warn", first + 3)
