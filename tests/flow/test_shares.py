"""What a rank holds along a dimension: whole prompts where ranks sample, samples where they train."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.flow.dims import parse_dim
from flowledger.flow.mesh import mesh
from flowledger.flow.shares import share

ROWS = {"dp": "Shard(0)"}


@pytest.mark.parametrize(("named", "held"), [("rollout", (12, 8)), ("train", (10, 10))])
def test_five_prompts_of_four_samples_on_two_ranks(named: str, held: tuple[int, int]) -> None:
    bound = {"B_prompt": 5, "G": 4}
    found = tuple(share(parse_dim("B_prompt*G"), 0, ROWS, bound, mesh(dp=2), rank, mesh=named) for rank in range(2))
    assert found == held


@given(prompts=st.integers(1, 12), group=st.integers(1, 4), ranks=st.integers(1, 5))
def test_a_rank_samples_for_the_prompts_that_torch_gives_it(prompts: int, group: int, ranks: int) -> None:
    on, bound = mesh(dp=ranks), {"B_prompt": prompts, "G": group}
    chunks = [len(chunk) for chunk in torch.arange(prompts).chunk(ranks)]
    for rank, mine in enumerate([*chunks, *[0] * (ranks - len(chunks))]):
        assert share(parse_dim("B_prompt"), 0, ROWS, bound, on, rank, mesh="rollout") == mine
        assert share(parse_dim("B_prompt*G"), 0, ROWS, bound, on, rank, mesh="rollout") == mine * group
        assert share(parse_dim("B_prompt*G"), 0, {}, bound, on, rank, mesh="rollout") == prompts * group
        assert share(parse_dim("G"), 1, ROWS, bound, on, rank, mesh="rollout") == group
