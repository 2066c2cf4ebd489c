"""A pipeline against one process: which rank has what, stages run in a row, and whole steps on forked ranks (law 7)."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

from flowledger.config.engine import Engine, Mesh
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.flow.seams import replaced
from flowledger.run import loop
from flowledger.run.parallel import pipeline, schedules
from flowledger.run.parallel.pipeline import Passing
from flowledger.run.parallel.ranks import ALONE, Group, Ranks
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def made(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-any-return]


def place(at: int, pp: int, vpp: int = 1) -> Ranks:
    """One rank of a pipeline that nobody has started."""
    group = Group("pp", tuple(range(pp)), at)
    return Ranks(rank=at, size=pp, groups={**ALONE.groups, "pp": group}, vpp=vpp)


def parts(model: nn.Module, pp: int, engine: Engine, vpp: int = 1) -> list[nn.Module]:
    """What each rank has left of a model."""
    cut = [copy.deepcopy(model) for _ in range(pp)]
    for at, part in enumerate(cut):
        pipeline.cut(part, place(at, pp, vpp), engine)
    return cut


def in_a_row(cut: list[nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states of a decoder whose chunks are called one after another."""
    line = pipeline.of(cut[0])
    assert line is not None
    passing = Passing(None)
    for chunk in range(len(line.chunks)):
        model: Any = cut[chunk % len(cut)]
        with pipeline.shown(model, line, chunk, passing):
            last = model.get_decoder()(input_ids=ids, use_cache=False)[0]
        rows = None if passing.left is None else passing.left.flatten(0, 1)
        passing = Passing(None if rows is None else torch.cat([rows, torch.full_like(rows[:3], torch.nan)]))  # filling
    return last  # type: ignore[no-any-return]


@settings(max_examples=5, deadline=None)
@given(
    pp=st.integers(2, 4),
    vpp=st.integers(1, 2),
    sizes=st.lists(st.integers(1, 2), min_size=8, max_size=8),
    tied=st.booleans(),
)
def test_every_weight_is_on_one_rank_and_the_stages_in_a_row_are_the_model(
    pp: int, vpp: int, sizes: list[int], tied: bool
) -> None:
    sizes = sizes[: pp * vpp]
    model: Any = made(LlamaConfig(**SIZES | {"num_hidden_layers": sum(sizes)}, tie_word_embeddings=tied))
    engine = Engine(layers_in_stages=tuple(sizes), pipeline="interleaved" if vpp > 1 else "gpipe")
    cut = parts(model, pp, engine, vpp)
    names = Counter(name for part in cut for name, _ in part.named_parameters())
    assert set(names) == {name for name, _ in model.named_parameters()}
    assert {name for name, count in names.items() if count > 1} == ({"model.embed_tokens.weight"} if tied else set())
    counted = Counter(id for part in cut for id in [p.numel() for p in pipeline.counted(part)])
    assert counted == Counter(p.numel() for p in model.parameters())  # each once in a norm
    for at, part in enumerate(cut):
        mine = {
            layer for chunk in range(at, pp * vpp, pp) for layer in range(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        }
        has = {int(name.split(".")[2]) for name, _ in part.named_parameters() if ".layers." in name}
        assert has == mine
        held = {name for name, holder in pipeline.holders(part).items() if holder == at}
        assert held <= {name for name, _ in part.named_parameters()}
        assert set(pipeline.holders(part)) == set(names)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(in_a_row(cut, ids), model.get_decoder()(input_ids=ids)[0])


def test_layers_with_windows_of_their_own_keep_them() -> None:
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model: Any = made(Qwen2Config(**SIZES, **window))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        found = in_a_row(parts(model, 2, Engine(layers_in_first_stage=3, layers_in_last_stage=1)), ids)
        torch.testing.assert_close(found, model.get_decoder()(input_ids=ids)[0])


@pytest.mark.parametrize(
    ("config", "changes", "pp", "vpp", "said"),
    [
        (LlamaConfig(**SIZES), {}, 3, 1, r"4 layers .*pp\*vpp = 3\*1 stages; use 2 stages"),
        (LlamaConfig(**SIZES), {"layers_in_stages": (2, 0, 2)}, 3, 1, "rank 1 of mesh.pp = 3 has no layer"),
        (LlamaConfig(**SIZES), {"pipeline": "interleaved"}, 2, 1, "use 1f1b, or mesh.vpp = 2"),
        (LlamaConfig(**SIZES), {"pipeline": "gpipe"}, 2, 2, "gpipe with mesh.vpp = 2.*use interleaved"),
        (GraniteConfig(**SIZES, embedding_multiplier=3.0), {}, 2, 1, "'granite' computes something else in stages"),
        (GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2), {}, 2, 1, "'gpt2' is not embedding, layers and norm"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(config: Any, changes: dict[str, Any], pp: int, vpp: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        pipeline.cut(made(config), place(0, pp, vpp), Engine(**changes))


@given(number=st.integers(1, 40), pp=st.integers(2, 8))
def test_interleaved_micro_batches_come_in_rounds_of_equally_many(number: int, pp: int) -> None:
    line = pipeline.Pipeline(
        group=Group("pp", tuple(range(pp))), kind="interleaved", chunks=(), holders={}, entrance="", norm="", tied=None,
        hidden=1, dtype=torch.float32, sequence=1,
    )  # fmt: skip
    given_ = [(at,) for at in range(number)]
    filled = schedules._rounds(given_, line)
    assert list(filled[:number]) == given_ and all(part == () for part in filled[number:])
    assert len(filled) % max(1, len(filled) // pp) == 0
    assert len(filled) < number + pp
    assert schedules._rounds(given_, replace(line, kind="1f1b")) == given_


# ---------------------------------------------------------------- whole steps


def config(layers: int = 2, **changes: Any) -> RunConfig:
    tiny = {"hidden_size": 16, "layers": layers, "heads": 2, "kv_heads": 1, "ffn_size": 24}
    sections: dict[str, Any] = {
        "model": {"tiny": tiny}, "data": {"prompts_per_step": 4}, "rollout": {"samples_per_prompt": 4},
        "actor": {"mini_batch_prompts": 2, "epochs": 2, "micro_batch": {"samples": 2}},
    }  # fmt: skip
    for name, value in changes.items():
        sections[name] = sections.get(name, {}) | value
    return worlds.config(**sections)


# Otherwise 2 mini-batches of 4 micro-batches, twice.
ONE_STEP: dict[str, Any] = {"actor": {"mini_batch_prompts": 4, "epochs": 1, "micro_batch": {"samples": 6}}}
CASES: dict[str, tuple[dict[str, int], int, dict[str, Any], dict[str, Any]]] = {
    "1f1b, uneven, with a reference": (
        {"pp": 2}, 3, {"layers_in_first_stage": 1, "layers_in_last_stage": 2},
        {"ref": {"path": "start"}, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    ),
    "gpipe, with a critic": (
        {"pp": 2}, 2, {"pipeline": "gpipe"}, ONE_STEP | {"critic": {"path": "start"}, "algorithm": {"advantage": "gae"}},
    ),
    "more stages than micro-batches": ({"pp": 4}, 4, {}, ONE_STEP),
    "interleaved, a round that is not full": (
        {"pp": 2, "vpp": 2}, 4, {"pipeline": "interleaved"},
        {"rollout": {"samples_per_prompt": 5}, "actor": {"mini_batch_prompts": 4, "epochs": 1, "micro_batch": {"samples": 4}}},
    ),
    "with dp, recomputed": (
        {"pp": 2, "dp": 2}, 2, {}, {"actor": ONE_STEP["actor"] | {"activation_checkpointing": True}} | {"algorithm": {"advantage": "grpo_passk"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_a_pipeline_is_the_step_of_one_process(equality: ModuleType, forked: ModuleType, case: str) -> None:
    mesh, layers, engine, changes = CASES[case]
    one = config(layers, **changes)
    several = one.model_copy(
        update={"mesh": Mesh(**mesh), "actor": one.actor.model_copy(update={"engine": Engine(**engine)})}
    )
    alone = equality.step(one)
    assert max(float(grad.abs().max()) for grad in alone.gradients[0].values()) > 1e-3  # there is something to learn
    traces = forked.ranks(mesh["pp"] * mesh.get("dp", 1), equality.step, several)
    for trace in traces:
        gap = equality.gap(alone, trace, lr=1e-3)
        assert gap.loss <= 1e-5 and gap.grad <= 1e-5 and gap.weight_over_lr <= 1e-2, gap
        assert trace.metrics.keys() == alone.metrics.keys()


def test_trouble_of_a_stage_is_told_as_it_is(forked: ModuleType) -> None:
    def step() -> None:
        def make(original: Any) -> Any:
            def refuse(**_: Any) -> None:
                raise BadInput("no such loss")

            return refuse

        several = config().model_copy(update={"mesh": Mesh(pp=2)})
        with loop.prepared(several) as world, replaced([("flowledger.run.loss:micro_batch_loss", make)]):
            list(loop.train(world))

    with pytest.raises(forked.Failed, match="rank 1: BadInput: no such loss"):
        forked.ranks(2, step)
