"""Rows of several ranks, put together and dealt: which bytes travel, and that they come back as they were."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.engine import Mesh
from flowledger.config.schema import RunConfig
from flowledger.run import advantage
from flowledger.run.advantage import advantages
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.figures import figures
from flowledger.run.parallel import collectives, ranks, rows
from flowledger.run.parallel.ranks import ALONE, Group, Ranks
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import forked

    return forked.ranks(size, function, *args)  # type: ignore[no-any-return]


def columns(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of every shape and dtype that travels; a row has 7*4 + 3*1 + 3*4 + 1 + 8 = 52 bytes."""
    random = torch.Generator().manual_seed(seed)
    return {
        "full_sequence": torch.randint(0, 2**31 - 1, (n, 7), generator=random),
        "loss_mask": torch.randint(0, 2, (n, 3), generator=random),
        "rollout_log_prob": torch.randn(n, 3, generator=random),
        "dropped_reason": torch.randint(-1, 7, (n,), generator=random),
        "sample_id": torch.randint(2**40, 2**60, (n,), generator=random),
    }


@pytest.mark.parametrize("n", [0, 1, 5])
def test_columns_come_out_of_their_bytes_as_they_went_in(n: int) -> None:
    given_ = columns(n)
    together = rows.packed(given_)
    assert (together.dtype, tuple(together.shape)) == (torch.uint8, (n, 52))
    back = rows.unpacked(together, columns(2))
    assert back.keys() == given_.keys()
    for name, x in given_.items():
        assert back[name].dtype == x.dtype and torch.equal(back[name], x), name


@given(total=st.integers(0, 40), size=st.integers(1, 9))
@settings(deadline=None)
def test_counts_are_those_of_the_chunks(total: int, size: int) -> None:
    each = [Ranks(rank=rank, size=size) for rank in range(size)]
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(size)] if total else []
    assert rows.counts_of(total, each[0]) == [*chunks, *[0] * (size - len(chunks))]
    assert rows.counts_of(total, each[0]) == [len(rows.part_of(total, one)) for one in each]


def _gathered() -> list[list[int]]:
    here = ranks.join(Mesh(dp=3))
    group, mine = here.group("world"), torch.arange(10)[slice(*((0, 4), (4, 8), (8, 10))[here.rank])]
    uneven = collectives.gathered(mine, group, [4, 4, 2])
    even = collectives.gathered(torch.full((2, 2), here.rank), group)
    nobody = collectives.gathered(mine[:1] if here.rank < 1 else mine[:0], group, [1, 0, 0])
    return [uneven.tolist(), even.flatten().tolist(), nobody.tolist()]


NUMBERS = {"few": [[3.0, -1.0], [], [0.5]], "equal": [[0.1] * 3, [0.1], [0.1]], "far": [[1e6 + 1], [1e6], [1e6 + 2]]}


def _figures() -> dict[str, Any]:
    here = ranks.join(Mesh(dp=3))
    return figures({name: torch.tensor(parts[here.rank]) for name, parts in NUMBERS.items()}, here.group("world"))


def _both() -> tuple[Any, Any]:
    return _gathered(), _figures()


def test_rows_and_figures_of_three_ranks_are_those_of_all_numbers() -> None:
    for gathered, made in on_ranks(3, _both):
        assert gathered == [list(range(10)), [0] * 4 + [1] * 4 + [2] * 4, [0]]
        for name, parts in NUMBERS.items():
            whole, one = torch.tensor([x for part in parts for x in part]).double(), made[name]
            assert (one.count, one.sum, one.min, one.max) == (
                len(whole), pytest.approx(float(whole.sum()), rel=1e-12), float(whole.min()), float(whole.max()),
            )  # fmt: skip
            assert one.std == pytest.approx(float(whole.std(correction=0)), rel=1e-9, abs=1e-12)
        assert made["equal"].std == 0.0


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_figures_are_torchs(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    one = figures({"x": x}, ALONE.group("world"))["x"]
    assert (one.min, one.max) == (float(x.min()), float(x.max()))
    assert one.mean == pytest.approx(float(x.double().mean()), rel=1e-12, abs=1e-12)
    assert one.std == pytest.approx(float(x.double().std(correction=0)), rel=1e-9, abs=1e-6)


class Watched(rows.Rows):
    """All rows of the step, of which it notes what is read together."""

    read: list[set[str]] = []  # noqa: RUF012  of the test that made it

    def whole(self, columns: rows.Columns) -> dict[str, torch.Tensor]:
        self.read.append(set(columns))
        return super().whole(columns)


def step(config: RunConfig) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 2])[:, None]).long()

    def tokens() -> torch.Tensor:
        return -torch.rand(4, 5, generator=random) * mask

    return {
        "algorithm": config.algorithm, "kl_coef": 0.1, "component_weights": (1.0, 2.0), "loss_mask": mask,
        "token_level_reward": tokens(), "reward_components": torch.rand(4, 2, generator=random),
        "dropped_reason": (None,) * 4, "rollout_log_prob": tokens(), "old_log_prob": tokens(),
        "ref_log_prob": tokens(), "values": tokens(), "sum_pi_squared": -tokens(),
        "baseline_reward": torch.tensor([0.5, 0.25]), "group_id": torch.tensor([0, 0, 1, 1]),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_is_given_what_it_declares_and_needs_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything gathered it computes the same."""
    words = step(worlds.config(algorithm={"advantage": name}, **CRITIC if name == "gae" else {}))
    Watched.read.clear()
    made = advantages(**words, rows=Watched())
    (read,) = Watched.read
    everything = {key for key, value in words.items() if isinstance(value, torch.Tensor)}
    monkeypatch.setattr(advantage.passes, "reads_whole", lambda _: everything)
    whole = advantages(**words, rows=Watched())
    assert torch.equal(made.advantages, whole.advantages) and torch.equal(made.returns, whole.returns)
    assert read < Watched.read[-1] and "ref_log_prob" not in read and "rollout_log_prob" not in read
    assert ("values" in read) == (name == "gae") and ("reward_components" in read) == (name == "gdpo")


CRITIC: dict[str, Any] = {"critic": {"path": "start"}}


def test_what_one_rank_has_is_not_copied() -> None:
    given_ = columns(3)
    assert (
        rows.held_rows([(0, 1, 2)], Ranks(rank=1, size=2, groups={**ALONE.groups, "tp": Group("tp", (0, 1), 1)}))
        is rows.WHOLE
    )
    assert all(rows.WHOLE.whole(given_)[name] is x for name, x in given_.items())
