"""Models cut over tp and FSDP: what each rank holds, the shared vocabulary, norms, blame, and whole steps (law 7)."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from flowledger.config.engine import Engine, Mesh
from flowledger.config.schema import Tiny
from flowledger.flow.errors import BadInput
from flowledger.flow.seams import replaced
from flowledger.run import finite, forward, head, loop, models, tiny
from flowledger.run.causal_lm import layers_of
from flowledger.run.parallel import ranks as meshes
from flowledger.run.parallel import sharded, tensor, vocabulary
from flowledger.run.parallel.ranks import ALONE, Group, Ranks
from tests.run import worlds

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
LR = 1e-4
SEQUENCE = {"engine": {"sequence_parallel": True}}
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD,
    "max_position_embeddings": 128,
}  # fmt: skip
SAVED: dict[str, Callable[[], Any]] = {  # 267 tokens: no two ranks have equally many
    "qwen2": lambda: Qwen2Config(**SIZES, vocab_size=267, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, vocab_size=267, tie_word_embeddings=False),
    "llama-biases": lambda: LlamaConfig(
        **SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 1}, vocab_size=267, attention_bias=True, mlp_bias=True
    ),
}
CRITIC = {"critic": {"path": "start"}, "algorithm": {"advantage": "gae"}}
KL = {"ref": {"path": "start"}, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.1}}
TWICE = {"epochs": 2}

# mesh, model, changes: each axis of the settings somewhere, on two ranks and on four
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "tp2": ({"tp": 2}, "tiny", {**KL, "actor": {**TWICE, "log_prob_chunk_tokens": 7}}),
    "tp2 padded, biases, tied, uneven vocabulary": ({"tp": 2}, "qwen2", {**KL, "actor": {"packed": False}}),
    "tp2 sequence parallel, head norms, recomputed": (
        {"tp": 2}, "qwen3", {**KL, "actor": {**SEQUENCE, "activation_checkpointing": True, "log_prob_chunk_tokens": 9}},
    ),
    "dp2 lora": (
        {"dp": 2}, "lora", {**KL, "actor": {**TWICE, "activation_checkpointing": True}},
    ),
    "tp4": ({"tp": 4}, "llama-biases", KL),
    "dp2 tp2 sequence parallel, critic": (
        {"dp": 2, "tp": 2}, "qwen3", {**CRITIC, "actor": SEQUENCE},
    ),
}  # fmt: skip


def saved(config: Any, folder: Path) -> dict[str, str]:
    """A model of this configuration in a directory, none of its weights and biases at a round number."""
    with torch.random.fork_rng(devices=[]), models.quiet():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    return {"path": str(folder)}


def small(mesh: Mesh, *, sequence_parallel: bool = False) -> tuple[Any, Ranks]:
    """The tiny model on this rank of a mesh, cut."""
    torch.manual_seed(0)
    model, ranks = tiny.causal_lm(Tiny(hidden_size=32, layers=1, heads=4, kv_heads=2, ffn_size=48)), meshes.join(mesh)
    forward.use_segments(model)
    sharded.cut(model, ranks, Engine(sequence_parallel=sequence_parallel))
    return model, ranks


def log_probs(model: nn.Module, ranks: Ranks = ALONE) -> Tensor:
    ids = torch.arange(18).reshape(3, 6)
    return forward.micro_batch_forward(
        model=model, full_sequence=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(6).expand(3, 6),
        response_mask=torch.ones(3, 4), temperature=1.0, packed=True, chunk_tokens=0, ranks=ranks,
    ).new_log_prob  # fmt: skip


def held() -> dict[str, Any]:
    """Local shapes of the weights of a tp rank, of its hidden states, and whether the embeddings are one."""
    model, ranks = small(Mesh(tp=2), sequence_parallel=True)
    seen: list[tuple[int, ...]] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, given, made: seen.extend((given[0].shape, made.shape)))
    log_probs(model, ranks)
    shapes = {name: tuple(sharded.local(p).shape) for name, p in model.named_parameters()}
    return {"shapes": shapes, "hidden": seen, "tied": model.lm_head.weight is model.model.embed_tokens.weight}


def norms(mesh: Mesh) -> dict[str, Tensor]:
    """The norm of gradients over ranks, and of the same put together, before and after clipping to 0.5."""
    model, ranks = small(mesh)
    log_probs(model, ranks).sum().backward()
    gradients = [p.grad for p in model.parameters()]

    def both() -> list[Tensor]:
        together = torch.cat([sharded.whole(grad).flatten() for grad in gradients])
        return [sharded.gradient_norm(gradients, ranks), together.norm()]

    before = both()
    sharded.clip(gradients, 0.5, before[0])
    return {"before": torch.stack(before), "after": torch.stack(both())}


def blamed(value: float, mesh: Mesh) -> str:
    """What a rank says of one gradient element of this value in the last rows of an MLP, which only the last ranks have."""
    model, ranks = small(mesh)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grad = sharded.local(model.model.layers[0].mlp.up_proj.weight.grad)
    if ranks.rank == ranks.size - 1:
        grad[-1, -1] = value
    with pytest.raises(finite.NotFinite) as error:
        finite.check_norm(model, sharded.gradient_norm([p.grad for p in model.parameters()], ranks), ranks)
    return str(error.value)


def probabilities(*, cut: bool) -> list[Tensor]:
    """What the head says of each token, and the gradients of all of it, with logits scaled, capped and in chunks."""
    torch.manual_seed(3)
    embedding, hidden = nn.Linear(8, 10, bias=False), torch.randn(7, 8, requires_grad=True)
    if cut:  # 3, 3, 3 and 1 tokens
        parallelize_module(embedding, meshes.join(Mesh(tp=4)).submesh("tp"), ColwiseParallel(), src_data_rank=None)
    group, first = vocabulary.share_of(embedding.weight)
    one = head.Head(embedding=embedding, multiplier=1.5, softcap=4.0, group=group, first=first)
    made = head.token_probs(hidden, torch.tensor([0, 9, 3, 2, 5, 6, 8]), one, 0.7, 3, True, True)
    sum((values * torch.arange(1.0, 8.0) ** power).sum() for power, values in enumerate(made)).backward()  # type: ignore[union-attr]  # there are three
    assert hidden.grad is not None and embedding.weight.grad is not None
    return [*(x.detach() for x in made), hidden.grad, sharded.whole(embedding.weight.grad)]


def after_each_call(config: Any) -> list[tuple[str, int, int]]:
    """Function, parameters that are not shards, elements of the shards: after each pass of a step."""
    seen: list[tuple[str, int, int]] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(**given: Any) -> Any:
            made, held = original(**given), list(given["model"].parameters())
            whole = sum(not isinstance(p, DTensor) for p in held)
            seen.append((original.__name__, whole, sum(sharded.local(p).numel() for p in held)))
            return made

        return watched

    watched = ("forward:micro_batch_forward", "update:micro_batch_backward", "value_model:token_values")
    with (
        loop.prepared(config) as world,
        replaced([(f"flowledger.run.{name}", make) for name in watched]) as missed,
    ):
        assert not missed
        list(loop.train(world))
    return seen


def gaps(equality: Any, cases: dict[str, Any]) -> dict[str, Any]:
    """Of each case how far this rank's step is from that of one process."""
    return {name: equality.gap(one, equality.step(config), LR) for name, (one, config) in cases.items()}


def on_two(equality: Any, cases: dict[str, Any], critic: Any, half: Any) -> dict[str, Any]:
    """All that is asked of two ranks, in one job: DTensor learns how to shard an operator once a process."""
    return {
        "gaps": gaps(equality, cases),
        "held": held(),
        "after": after_each_call(critic),
        "bfloat16": equality.step(half),
        "blamed": [blamed(value, mesh) for value in (float("nan"), 1e30) for mesh in (Mesh(tp=2), Mesh(dp=2))],
    }


def on_four(equality: Any, cases: dict[str, Any]) -> dict[str, Any]:
    """All that is asked of four ranks."""
    return {
        "gaps": gaps(equality, cases),
        "norms": norms(Mesh(dp=2, tp=2)),
        "probabilities": probabilities(cut=True),
    }


def config_of(mesh: dict[str, int], changes: dict[str, Any]) -> Any:
    base: dict[str, Any] = {"data": {"prompts_per_step": 4}, "rollout": {"samples_per_prompt": 2}}
    actor = {"mini_batch_prompts": 4, "micro_batch": {"samples": 4}} | changes.get("actor", {})
    optim = {
        "lr": LR,
        "eps": 1e-6,
    }  # with AdamW's own eps it is rounding that steps a weight whose gradient is near 1e-8
    return worlds.config(**base | changes | {"actor": actor, "optim": optim, "mesh": mesh})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[dict[str, Any]]]]:
    """Ranks of the job -> what each of them says."""
    folder = tmp_path_factory.mktemp("models")
    paths: dict[str, Any] = {name: saved(config(), folder / name) for name, config in SAVED.items()}
    paths |= {"tiny": {}, "lora": {"lora": {"rank": 4}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        equality, forked = importlib.import_module("equality"), importlib.import_module("forked")
        cases: dict[int, dict[str, Any]] = {2: {}, 4: {}}
        for name, (mesh, model, changes) in CASES.items():
            changes = {**changes, "model": paths[model]}
            one = equality.step(config_of({}, changes))
            cases[torch.Size(mesh.values()).numel()][name] = one, config_of(mesh, changes)
        critic = config_of({"dp": 2}, {**CRITIC, "actor": {"log_prob_chunk_tokens": 5}})
        half = config_of({"tp": 2}, {"model": {"dtype": "bfloat16"}, "actor": SEQUENCE})
        yield {
            2: forked.ranks(2, on_two, equality, cases[2], critic, half),
            4: forked.ranks(4, on_four, equality, cases[4]),
        }
    for name in ("equality", "forked"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process(answers: dict[int, list[dict[str, Any]]], name: str) -> None:
    for rank in answers[torch.Size(CASES[name][0].values()).numel()]:
        gap = rank["gaps"][name]
        assert gap.grad <= 1e-5
        assert gap.loss <= 1e-5
        assert gap.weight_over_lr <= 1e-2


def test_each_rank_of_tp_holds_half_of_the_heads_the_neurons_and_the_vocabulary(
    answers: dict[int, list[dict[str, Any]]],
) -> None:
    layer = "model.layers.0"
    by_hand = {
        "model.embed_tokens.weight": (132, 32),  # of 264 tokens
        f"{layer}.self_attn.q_proj.weight": (16, 32),  # two heads of 8 of four
        f"{layer}.self_attn.k_proj.weight": (8, 32),
        f"{layer}.self_attn.v_proj.weight": (8, 32),
        f"{layer}.self_attn.o_proj.weight": (32, 16),
        f"{layer}.mlp.gate_proj.weight": (24, 32),
        f"{layer}.mlp.up_proj.weight": (24, 32),
        f"{layer}.mlp.down_proj.weight": (32, 24),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        "model.norm.weight": (32,),
    }
    for rank in answers[2]:
        assert rank["held"]["shapes"] == by_hand
        assert rank["held"]["tied"]
        # three sequences of two prompt tokens and four more: 18 tokens; gathered before the MLP, cut after it
        assert rank["held"]["hidden"] == [(1, 18, 32), (1, 9, 32)]


def test_parameters_are_shards_after_every_pass(answers: dict[int, list[dict[str, Any]]]) -> None:
    for rank in answers[2]:
        assert {name for name, _, _ in rank["after"]} == {
            "micro_batch_forward", "micro_batch_backward", "token_values",
        }  # fmt: skip
        assert not any(whole for _, whole, _ in rank["after"])
        # of 264*32 + 2*(2*32*32 + 2*32*16 + 3*32*48 + 2*32) + 32 one half, and the first rank a head of 32 + 1 too
        assert {elements for _, _, elements in rank["after"]} <= {23968 // 2, 23968 // 2 + 33}


def test_the_norm_counts_each_element_once_and_clipping_brings_it_to_its_limit(
    answers: dict[int, list[dict[str, Any]]],
) -> None:
    for rank in answers[4]:
        ours, together = rank["norms"]["before"]
        torch.testing.assert_close(ours, together)
        assert ours > 0.5
        torch.testing.assert_close(rank["norms"]["after"], torch.tensor([0.5, 0.5]), rtol=1e-5, atol=0)


def test_what_a_shared_vocabulary_says_of_a_token_is_what_one_process_says(
    answers: dict[int, list[dict[str, Any]]],
) -> None:
    alone = probabilities(cut=False)
    for rank in answers[4]:
        for ours, theirs in zip(rank["probabilities"], alone, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_every_rank_blames_the_weight_that_one_rank_saw(answers: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (rank["blamed"] for rank in answers[2])
    assert first == second
    nan, large = first[:2], first[2:]
    for text in nan:
        assert (
            "gradients of 1 parameters are not finite; backward met it first in model.layers.0 (mlp.up_proj.weight)"
            in text
        )
    for text in large:
        assert "their norm overflows float32; the largest is 1e+30 in model.layers.0.mlp.up_proj.weight" in text


def test_bfloat16_steps(answers: dict[int, list[dict[str, Any]]]) -> None:
    for rank in answers[2]:
        trace = rank["bfloat16"]
        assert {weight.dtype for weight in trace.weights.values()} == {torch.bfloat16}
        assert all(torch.isfinite(weight).all() for weight in trace.weights.values())
        assert trace.metrics["grad_norm"] > 0


# --- What cannot be cut ---


def two_ranks() -> Ranks:
    """One of two ranks of tp that nobody has started: what is refused is refused before they talk."""
    group = Group("tp", (0, 1))
    return Ranks(size=2, groups={**ALONE.groups, "tp": group}, meshes={"tp": object()})  # type: ignore[dict-item]  # not used


def shaped(**changes: Any) -> dict[str, Any]:
    return {**SIZES, "vocab_size": 20, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fused": (lambda: Phi3Config(**shaped()), "'phi3' has self_attn.qkv_proj.weight"),
    "an embedding that scales": (lambda: Gemma3TextConfig(**shaped()), "'gemma3_text' has Gemma3TextScaledWordEmbedding"),
    "norms over all heads": (lambda: Olmo2Config(**shaped()), "'olmo2' has self_attn.q_norm.weight"),
    "another last norm": (lambda: GPTNeoXConfig(**shaped()), "'gpt_neox' has another last norm"),
    "one key head": (lambda: LlamaConfig(**shaped(num_key_value_heads=1)), "num_key_value_heads = 1; use 1"),
    "odd heads": (
        lambda: LlamaConfig(**shaped(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)), "num_attention_heads = 3; use 1",
    ),
    "odd neurons": (lambda: LlamaConfig(**shaped(intermediate_size=45)), "intermediate_size = 45; use 1"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "words"), REFUSED.values(), ids=REFUSED)
def test_what_tp_cannot_cut_is_refused(config: Callable[[], Any], words: str) -> None:
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(BadInput, match=r"mesh\.tp = 2") as error:
        tensor.cut(model, two_ranks())
    assert words in str(error.value)


def test_adapters_are_refused() -> None:
    policy = models.load_policy(worlds.config(model={"lora": {"rank": 4}}).model, seed=0)
    with pytest.raises(BadInput, match=r"model\.lora with mesh\.tp = 2: .* use mesh\.tp = 1"):
        tensor.cut(policy.model, two_ranks())


def test_layers_are_found_by_their_names_or_the_model_is_refused() -> None:
    gpt2: Any = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2))
    assert layers_of(gpt2) is gpt2.transformer.h
    gpt2.transformer.h = nn.Identity()
    with pytest.raises(BadInput, match="'gpt2' has no list of layers to cut; use one process"):
        layers_of(gpt2)
