"""Samples cut over ranks (sp, cp): attention, log-probs, gradients and a whole step are those of one process."""

import importlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowledger.config.engine import Mesh
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import forward, models
from flowledger.run.packing import Packed, pack
from flowledger.run.parallel import block_attention, collectives, ring, ulysses
from flowledger.run.parallel.ranks import ALONE, GROUPS, Group, Ranks, coordinates, degrees_of, join
from flowledger.run.parallel.sharded import cut
from tests.run import test_segments as packed_once
from tests.run import worlds

LR = 1e-4  # what Adam makes of rounding moves weights apart by a part of it, and later gradients with them


# --- attention of a ring, its ranks as threads ---


class Cable:
    """Brings blocks to the next of several threads."""

    def __init__(self, size: int) -> None:
        self.inboxes: list[queue.SimpleQueue[Tensor]] = [queue.SimpleQueue() for _ in range(size)]
        self.begun = 0

    def start(self, *, block: Tensor, group: Group) -> Any:
        self.begun += 1
        self.inboxes[(group.at + 1) % group.size].put(block.clone())
        return Arrival(self.inboxes[group.at])


@dataclass(frozen=True)
class Arrival:
    inbox: "queue.SimpleQueue[Tensor]"

    def wait(self) -> Tensor:
        return self.inbox.get(timeout=20)


def held_by(at: int, cp: int, samples: Sequence[int]) -> Tensor:
    """Places of a cp rank in a row: of each sample's 2*cp chunks the one at `at` from either end."""
    found, start = [], 0
    for tokens in samples:
        chunks = torch.arange(start, start + tokens).chunk(2 * cp) if tokens else ()
        found += [chunks[at], chunks[-1 - at]] if chunks else []
        start += tokens
    return torch.cat(found)


def by_ring(qkv: Sequence[Tensor], samples: Sequence[int], cp: int, window: int | None, grad: Tensor) -> list[Tensor]:
    """What a ring finds for whole q, k, v [1, A, T, D], and its gradients, put together from the ranks."""
    places = [held_by(at, cp, samples) for at in range(cp)]
    whole: list[Tensor] = [torch.empty_like(x) for x in (grad, *qkv)]

    def rank(at: int) -> None:
        mine = [x[:, :, places[at]].clone().requires_grad_() for x in qkv]
        around = ring.Ring(tuple(samples), Group("cp", tuple(range(cp)), at))
        out = ring.attend(query=mine[0], key=mine[1], value=mine[2], ring=around, window=window, scale=None)
        out.backward(grad[:, :, places[at]])
        for all_of_it, part in zip(whole, [out.detach(), *(x.grad for x in mine)], strict=True):
            assert part is not None
            all_of_it[:, :, places[at]] = part

    threads = [threading.Thread(target=rank, args=(at,), daemon=True) for at in range(cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return whole


def by_hand(qkv: Sequence[Tensor], samples: Sequence[int], window: int | None, grad: Tensor) -> list[Tensor]:
    """Softmax of all scores of a row at once in float64, and what autograd makes of it."""
    q, k, v = (x.double().requires_grad_() for x in qkv)
    heads = q.shape[1] // k.shape[1]
    sample = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(samples))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (sample[:, None] == sample) & (distance >= 0) & (distance < (window or q.shape[2]))
    scores = q @ k.repeat_interleave(heads, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(heads, 1)
    out.backward(grad.double())
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


@settings(max_examples=40, deadline=None)
@given(
    cp=st.sampled_from([2, 3, 4]),
    chunks=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 9]),
    kernel=st.sampled_from([block_attention.FLASH_CPU, block_attention.PLAIN]),
)
def test_a_ring_attends_as_one_process_does(
    cp: int, chunks: list[int], heads: tuple[int, int], window: int | None, kernel: block_attention.BlockAttention
) -> None:
    samples = [2 * cp * chunk for chunk in chunks]
    random = torch.Generator().manual_seed(sum(samples) + cp)
    q, k, v, grad = (torch.randn(1, n, sum(samples), 8, generator=random) for n in (*heads, heads[1], heads[0]))
    cable = Cable(cp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "start", cable.start)
        patch.setattr(ring, "of_device", lambda device: kernel)
        found = by_ring((q, k, v), samples, cp, window, grad)
    for made, truth in zip(found, by_hand((q, k, v), samples, window, grad), strict=True):
        torch.testing.assert_close(made.double(), truth, atol=2e-6, rtol=2e-5)
    # forward passes keys and values cp - 1 times on, backward as well, and their gradients cp times: home at last
    assert cable.begun == cp * (3 * cp - 2)


@pytest.mark.parametrize("kernel", [block_attention.FLASH_CPU, block_attention.PLAIN], ids=["flash", "plain"])
def test_a_ring_in_bfloat16_is_as_exact_as_bfloat16(
    kernel: block_attention.BlockAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, 24, 8, generator=random).bfloat16() for n in (4, 2, 2, 4))
    monkeypatch.setattr(ring, "start", Cable(2).start)
    monkeypatch.setattr(ring, "of_device", lambda device: kernel)
    for made, truth in zip(
        by_ring((q, k, v), [16, 8], 2, None, grad), by_hand((q, k, v), [16, 8], None, grad), strict=True
    ):
        assert made.dtype == torch.bfloat16
        torch.testing.assert_close(made.double(), truth, atol=0.03, rtol=0.03)


def test_each_rank_of_a_ring_computes_as_much_and_nothing_that_causality_hides() -> None:
    """4 ranks, a sample of 64 tokens, chunks of 8: own 16 x 16 causal, then three blocks of 16 x 8 or 8 x 16 pairs."""
    for at in range(4):
        own, *others = ring.Ring((64,), Group("cp", (0, 1, 2, 3), at)).rounds(None)
        assert [(one.queries, one.keys, one.causal) for one in own] == [(slice(0, 16), slice(0, 16), True)]
        sizes = [[(one.queries.stop - one.queries.start, one.keys.stop - one.keys.start) for one in r] for r in others]
        assert sizes == [[(16, 8)]] * at + [[(8, 16)]] * (3 - at)


def test_a_window_leaves_out_the_blocks_that_it_hides() -> None:
    """Chunks of 8 and a window of 8: rank 0 has chunks 0 and 7; of the other ranks only rank 1's chunk 6 is near."""
    rounds = ring.Ring((64,), Group("cp", (0, 1, 2, 3), 0)).rounds(8)
    assert [len(meeting) for meeting in rounds] == [1, 0, 0, 1]  # in rounds 1 to 3 come ranks 3, 2 and 1


# --- rows that are shared ---


def place(rank: int, **degrees: int) -> Ranks:
    """A rank of a mesh that nobody has started."""
    mesh = Mesh(**degrees)  # type: ignore[arg-type]  # cp_kind is not among them
    axes = degrees_of(mesh)
    here, groups = coordinates(axes, rank), {}
    for name, parts in GROUPS.items():
        members = tuple(
            other for other in range(mesh.dp * mesh.model)
            if all(at == here[axis] for axis, at in coordinates(axes, other).items() if axis not in parts)
        )  # fmt: skip
        groups[name] = Group(name, members, members.index(rank))
    return Ranks(rank=rank, size=mesh.dp * mesh.model, degrees=axes, groups=groups)


def packed(lengths: list[tuple[int, int]], ranks: Ranks = ALONE, **given: Any) -> Packed:
    """Samples of (prompt, response) tokens; token j of sample i is 100*(i + 1) + j."""
    wide, long = (max(sizes) for sizes in zip(*lengths, strict=True))
    column = torch.arange(wide + long)
    firsts = torch.tensor([wide - prompt for prompt, _ in lengths])[:, None]
    ends = torch.tensor([wide + response for _, response in lengths])[:, None]
    mask = ((column >= firsts) & (column < ends)).long()
    positions = (column - firsts).clamp(min=0) * mask
    ids = (100 * torch.arange(1, len(lengths) + 1)[:, None] + positions) * mask
    return pack(ids, mask, positions, mask[:, wide:], shared_prompts=True, ranks=ranks, **given)


def tokens_of(made: Packed) -> int:
    """T of the whole row."""
    return sum(made.segments.pieces)


def test_zig_zag_slices_by_hand() -> None:
    """cp 2: samples of 5 and 4 tokens are filled to 8 and 4, and cut in 4 chunks of 2 and of 1."""
    first, second = (packed([(2, 3), (3, 1)], place(at, cp=2)) for at in range(2))
    assert first.ids.tolist() == [[100, 101, 0, 0, 200, 203]]
    assert second.ids.tolist() == [[102, 103, 104, 0, 201, 202]]
    assert first.positions.tolist() == [[0, 1, 1, 2, 0, 3]]  # filling counts on its own
    assert second.positions.tolist() == [[2, 3, 4, 0, 1, 2]]
    assert first.wanted.tolist() == [
        [True, False, False],
        [False, False, False],
    ]  # 101 predicts the first response token
    assert second.wanted.tolist() == [[False, True, True], [True, False, False]]
    assert (first.before.tolist(), second.before.tolist()) == ([1], [0, 1, 5])
    assert tokens_of(first) == tokens_of(second) == 12


def test_sp_cuts_a_row_in_equal_neighbours_and_prompts_stay_shared() -> None:
    whole = packed([(2, 2), (2, 2), (1, 1)])
    assert tokens_of(whole) == whole.ids.shape[1] == 10
    parts = [packed([(2, 2), (2, 2), (1, 1)], place(at, sp=4)) for at in range(4)]
    assert [part.ids.shape[1] for part in parts] == [3, 3, 3, 3]
    joined = torch.cat([part.ids for part in parts], 1)
    assert torch.equal(joined[:, :10], whole.ids)
    assert joined[0, 10:].tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
    cp=st.sampled_from([1, 2, 3]), sp=st.sampled_from([1, 2, 3]), tp=st.sampled_from([1, 4]), cuts=st.booleans(),
)  # fmt: skip
def test_every_token_is_on_one_rank_and_its_prediction_too(
    lengths: list[tuple[int, int]], cp: int, sp: int, tp: int, cuts: bool
) -> None:
    if not any(response for _, response in lengths):
        lengths = [*lengths, (1, 1)]
    size = cp * sp * tp
    parts = [packed(lengths, place(rank, cp=cp, sp=sp, tp=tp), sequence_parallel=cuts) for rank in range(0, size, tp)]
    tokens = sorted(token for part in parts for token in part.ids[0].tolist() if token)
    assert tokens == sorted(100 * (i + 1) + j for i, sizes in enumerate(lengths) for j in range(sum(sizes)))
    assert {part.ids.shape[1] for part in parts} == {tokens_of(parts[0]) // (cp * sp)}
    assert parts[0].ids.shape[1] % (tp if cuts else 1) == 0
    for part in parts:  # the token before: one less in the same sample
        sample, at = part.wanted.nonzero(as_tuple=True)
        prompts = torch.tensor([prompt for prompt, _ in lengths])
        assert part.ids[0, part.before].tolist() == (100 * (sample + 1) + prompts[sample] + at - 1).tolist()
    assert int(sum(part.wanted.long() for part in parts).sum()) == sum(response for _, response in lengths)  # type: ignore[union-attr]  # a tensor: there is a part


def test_a_row_is_filled_no_more_than_it_must_be() -> None:
    row = [(3, 4)]  # 7 tokens
    sizes = {
        (): 7, (("dp", 4),): 7, (("tp", 2),): 7, (("sp", 2),): 8, (("sp", 3),): 9, (("cp", 2),): 8, (("cp", 3),): 12,
        (("cp", 2), ("sp", 3)): 12,  # a cp rank has 2*c tokens, which 3 divides: 6
    }  # fmt: skip
    for degrees, tokens in sizes.items():
        assert tokens_of(packed(row, place(0, **dict(degrees)))) == tokens, degrees
    assert packed(row, place(0, tp=3), sequence_parallel=True).ids.shape == (1, 9)


def test_without_a_token_every_rank_has_one_to_compute() -> None:
    nobody = torch.zeros(0, 4, dtype=torch.long)
    for degrees, each in (({}, 1), ({"cp": 2}, 2), ({"sp": 2}, 1), ({"cp": 2, "sp": 4}, 1)):
        made = pack(nobody, nobody, nobody, nobody[:, 2:], shared_prompts=True, ranks=place(0, **degrees))
        assert made.ids.shape == (1, each)


def test_keys_and_values_are_repeated_where_there_are_fewer_heads_than_ranks() -> None:
    keys = torch.arange(6.0).view(1, 6, 1, 1)
    assert ulysses.repeated(keys, Group("sp", (0, 1, 2))) is keys
    four = ulysses.repeated(keys[:, :2], Group("sp", (0, 1, 2, 3)))
    assert four.flatten().tolist() == [0, 0, 1, 1]
    assert ulysses.repeated(keys, Group("sp", (0, 1, 2, 3))).flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_heads_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(BadInput, match=r"4 attention heads of a rank are not divisible by sp = 3.*use (2|4)"):
        ulysses.exchange(x=torch.zeros(1, 4, 2, 2), group=Group("sp", (0, 1, 2)), to="heads")


def test_padded_batches_are_not_shared() -> None:
    with pytest.raises(BadInput, match=r"actor.packed = false: .* 4 ranks .* set actor.packed = true"):
        forward.micro_batch_forward(
            model=torch.nn.Identity(), **packed_once.EQUAL, temperature=1.0, packed=False, chunk_tokens=0,
            ranks=place(0, cp=2, sp=2),
        )  # fmt: skip


# --- real ranks ---


def beside(name: str) -> ModuleType:
    """A module of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("benchmarks")
        return importlib.import_module(name)


BATCH: dict[str, Any] = {
    "data": {"prompts_per_step": 4}, "actor": {"mini_batch_prompts": 4, "micro_batch": {"samples": 4}},
    "rollout": {"samples_per_prompt": 2}, "optim": {"lr": LR},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two mini-batches": {"actor": {"epochs": 2, "mini_batch_prompts": 2, "micro_batch": {"samples": 3}}},
    "all at once": {
        "critic": {"path": "start"}, "algorithm": {"advantage": "gae", "entropy_coef": 0.1}, "actor": {
            "mini_batch_prompts": 2, "activation_checkpointing": True, "log_prob_chunk_tokens": 5,
        },
    },
}  # fmt: skip
CASES: list[tuple[dict[str, Any], str]] = [
    ({"sp": 2}, "all at once"), ({"cp": 2}, "all at once"), ({"cp": 2, "cp_kind": "all_to_all"}, "plain"),
    ({"sp": 2, "cp": 2}, "plain"), ({"dp": 2, "sp": 2}, "two mini-batches"),
]  # fmt: skip


def case(name: str, mesh: dict[str, Any]) -> RunConfig:
    given = SETTINGS[name]
    sections = {key: {**BATCH.get(key, {}), **given.get(key, {})} for key in BATCH.keys() | given.keys()}
    return worlds.config(**sections, mesh=mesh)


def ranks_of(mesh: dict[str, Any]) -> int:
    return Mesh(**mesh).dp * Mesh(**mesh).model


@pytest.fixture(scope="module")
def traces() -> dict[int, Any]:
    """Case -> what its ranks have of a step; one set of processes a size."""
    forked, equality, found = beside("forked"), beside("equality"), {}
    for size in sorted({ranks_of(mesh) for mesh, _ in CASES}):
        mine = [number for number, (mesh, _) in enumerate(CASES) if ranks_of(mesh) == size]

        def steps(mine: list[int] = mine) -> list[Any]:
            return [equality.step(case(CASES[number][1], CASES[number][0])) for number in mine]

        found |= dict(zip(mine, zip(*forked.ranks(size, steps), strict=True), strict=True))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    equality = beside("equality")
    return {name: equality.step(case(name, {})) for name in SETTINGS}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{mesh} {name}" for mesh, name in CASES])
def test_a_step_is_that_of_one_process(number: int, traces: dict[int, Any], alone: dict[str, Any]) -> None:
    mesh, name = CASES[number]
    equality = beside("equality")
    assert len(traces[number]) == ranks_of(mesh)
    for trace in traces[number]:
        gap = equality.gap(alone[name], trace, LR)
        losses = {loss: alone[name].metrics[loss] for loss in equality.LOSSES if loss in alone[name].metrics}
        assert {loss: trace.metrics[loss] for loss in losses} == pytest.approx(
            losses, rel=1e-5, abs=1e-7
        )  # 0 from terms of 1
        assert gap.grad <= 1e-5, gap
        assert gap.weight_over_lr <= 1e-2, gap


MODELS = ("mistral", "gemma3", "gpt2")  # windows in all layers, in some; learned positions
EMPTY = {name: rows[:0] for name, rows in packed_once.EQUAL.items()}


def said(model_name: str, rows: dict[str, Tensor], ranks: Ranks) -> tuple[forward.Forward, dict[str, Tensor]]:
    """Log-probs of ragged rows and the gradient of a sum of them, added up over ranks."""
    model = packed_once.model_of(model_name)
    made, gradients = packed_once.taken(model, rows, packed=True, ranks=ranks)  # type: ignore[arg-type]  # passed on
    made = replace(made, new_log_prob=made.new_log_prob.detach(), entropy=made.entropy.detach())
    return made, {name: collectives.total(grad, ranks.group("tokens")) for name, grad in gradients.items()}


@pytest.fixture(scope="module")
def forwards() -> list[dict[tuple[str, str], Any]]:
    """By rank: (model, kind of cp) -> what a forward and a backward pass say on cp 2 * sp 2."""

    def all_of_them() -> dict[tuple[str, str], Any]:
        meshes = {kind: join(Mesh(cp=2, sp=2, cp_kind=kind)) for kind in ("ring", "all_to_all")}
        return {
            (name, kind): said(name, packed_once.RAGGED, ranks) for name in MODELS for kind, ranks in meshes.items()
        } | {("empty", kind): said("qwen3", EMPTY, ranks) for kind, ranks in meshes.items()}

    made: list[dict[tuple[str, str], Any]] = beside("forked").ranks(4, all_of_them)
    return made


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_of_ragged_rows(
    name: str, kind: str, forwards: list[dict[tuple[str, str], Any]]
) -> None:
    truth, gradients = packed_once.taken(packed_once.model_of(name), packed_once.RAGGED, packed=False)
    for one in forwards:
        made, found = one[name, kind]
        for column in ("new_log_prob", "entropy"):
            torch.testing.assert_close(getattr(made, column), getattr(truth, column).detach(), atol=2e-5, rtol=1e-5)
        assert found.keys() == gradients.keys()
        for parameter, grad in gradients.items():
            assert float((found[parameter] - grad).abs().max()) <= 2e-5 * float(grad.abs().max()) + 1e-6, parameter


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_an_empty_micro_batch_passes_through_the_same_collectives(
    kind: str, forwards: list[dict[tuple[str, str], Any]]
) -> None:
    for one in forwards:
        made, gradients = one["empty", kind]
        assert made.new_log_prob.shape == (0, 7)
        assert all(not bool(grad.any()) for grad in gradients.values())


def test_a_ring_is_as_near_in_bfloat16_as_one_process_is() -> None:
    def log_probs(mesh: Mesh, dtype: torch.dtype, recompute: bool) -> Tensor:
        ranks, model = join(mesh), packed_once.model_of("qwen3").to(dtype)
        cut(model, ranks)
        if recompute:
            models.recompute_activations(model)
        rows = packed_once.RAGGED
        made = forward.micro_batch_forward(
            model=model, **rows, temperature=1.0, packed=True, chunk_tokens=0, ranks=ranks
        )
        made.new_log_prob.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return made.new_log_prob.detach()

    truth, near = (log_probs(Mesh(), dtype, False) for dtype in (torch.float32, torch.bfloat16))
    first, second = beside("forked").ranks(2, log_probs, Mesh(cp=2), torch.bfloat16, True)
    assert torch.equal(first, second)
    assert 0 < float((first - truth).abs().mean()) <= 1.5 * float((near - truth).abs().mean())
