"""The table of losses against torch itself: every storage that an operator makes on CPU, from birth to death."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from flowledger.config.engine import Engine, Logits
from flowledger.plan.job import Job
from flowledger.plan.logits import BACKWARD, FORWARD, chunk_rows, implementation, logits_lives, logits_peak, table
from flowledger.plan.timeline import Clock
from flowledger.run.head import Head, token_probs
from flowledger.tables.models import Architecture
from tests.plan.live_storages import Tracker

T, V, H = 96, 4096, 16
ELEMENTS = T * V


def job(gradients: bool = True, stored: str = "bfloat16", strategy: str = "fsdp2", **logits: Any) -> Job:
    shape = Architecture(name="head", layers=1, hidden=H, heads=1, kv_heads=1, head_dim=H, ffn=H, vocab=V)
    engine = Engine.model_validate({"strategy": strategy, "param_dtype": stored, "logits": logits})
    return Job(architecture=shape, engine=engine, world=1, sequences=1, tokens=T, longest=T, gradients=gradients)


def tracked(run: Callable[[Tensor, Tensor, Tensor], object], dtype: torch.dtype, *, gradients: bool = True) -> int:
    """Peak bytes of a loss over hidden states [T, H] (with gradient) and a frozen head [V, H]."""
    torch.manual_seed(0)
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=gradients)
    head = torch.randn(V, H, dtype=dtype)
    targets = torch.randint(V, (T,))
    with Tracker(hidden, head, targets) as tracker, torch.set_grad_enabled(gradients):
        run(hidden, head, targets)
    return tracker.peak


def named_copy(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)
    single = logits.float()
    functional.cross_entropy(single, targets).backward()


def hugging_face(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)[None]
    ForCausalLMLoss(logits, targets[None], V, shift_labels=targets[None]).backward()


def recast(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)
    logits = logits.float()
    functional.cross_entropy(logits, targets).backward()


def narrow(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)
    functional.cross_entropy(logits, targets).backward()


def dropped(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    def compute_loss() -> Tensor:
        logits = functional.linear(hidden, head)
        return functional.cross_entropy(logits, targets)

    compute_loss().backward()


def gathered(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)
    (-logits.log_softmax(-1).gather(-1, targets[:, None])).sum().backward()


def temperature(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    logits = functional.linear(hidden, head)
    scaled = logits / 0.7
    (-scaled.log_softmax(-1).gather(-1, targets[:, None])).sum().backward()


@pytest.mark.parametrize(
    ("run", "logits", "kept", "each"),
    [
        (named_copy, {"upcast": True}, True, 18),
        (hugging_face, {"upcast": True, "dtype": "float32"}, True, 14),
        (recast, {"dtype": "float32"}, True, 16),
        (narrow, {}, True, 8),
        (dropped, {}, False, 6),
        (gathered, {}, True, 8),
        (temperature, {"temperature_copy": True}, True, 10),
    ],
)
def test_a_loss_with_gradient_takes_what_torch_takes(
    run: Callable[[Tensor, Tensor, Tensor], None], logits: dict[str, object], kept: bool, each: int
) -> None:
    predicted = logits_peak(job(**logits), T, V, outputs_kept=kept)
    assert predicted == each * ELEMENTS
    assert predicted <= tracked(run, torch.bfloat16) <= predicted + 64 * T


def test_log_probs_without_gradient() -> None:
    def naive(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(hidden, head)
        single = logits.float()
        return single.log_softmax(-1).gather(-1, targets[:, None])

    def in_float32(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(hidden, head)
        return logits.log_softmax(-1).gather(-1, targets[:, None])

    def by_pieces(hidden: Tensor, head: Tensor, targets: Tensor) -> list[Tensor]:
        logits = functional.linear(hidden, head)
        return [
            rows.float().log_softmax(-1).gather(-1, wanted[:, None])
            for rows, wanted in zip(logits.split(32), targets.split(32), strict=True)
        ]

    for run, dtype, made in (
        (naive, torch.bfloat16, job(False, upcast=True)),
        (in_float32, torch.float32, job(False, "float32")),
        (by_pieces, torch.bfloat16, job(False, upcast=True, chunk_tokens=32)),
    ):
        predicted = logits_peak(made, T, V)
        assert predicted <= tracked(run, dtype, gradients=False) <= predicted + 64 * T


def own(gradients: bool, chunk: int, entropy_grad: bool) -> tuple[int, int]:
    """Peak of flowledger's own loop over its head, and what the table says. The head's gradient is there already."""
    torch.manual_seed(0)
    embedding = nn.Linear(H, V, bias=False)
    embedding.weight.grad = torch.zeros_like(embedding.weight)
    hidden = torch.randn(T, H, requires_grad=True)
    targets = torch.randint(V, (T,))
    with (
        Tracker(hidden, targets, embedding.weight, embedding.weight.grad) as tracker,
        torch.set_grad_enabled(gradients),
    ):
        picked, entropy = token_probs(hidden, targets, Head(embedding=embedding), 0.7, chunk, entropy_grad, False)
        if gradients:
            (picked + entropy).sum().backward()
    made = job(
        gradients, "float32", "single", dtype="float32", temperature_copy=True, entropy="full",
        entropy_grad=entropy_grad, implementation="chunked" if chunk else "full", chunk_tokens=chunk or None,
    )  # fmt: skip
    return tracker.peak, logits_peak(made, T, V)


@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_own_loop(gradients: bool, chunk: int, entropy_grad: bool) -> None:
    peak, predicted = own(gradients, chunk, entropy_grad)
    if gradients and not chunk:
        predicted = max(predicted, V * T * 4 + V * H * 4)  # the head's backward: gradient of logits and of the weight
    assert predicted <= peak <= predicted + 64 * T + 16 * T * H


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_differentiable_entropy(dtype: torch.dtype, gradients: bool) -> None:
    """softmax, logsumexp and their difference (verl's form) over logits that are there already."""

    def entropy(logits: Tensor) -> Tensor:
        probabilities = functional.softmax(logits, -1)
        return torch.logsumexp(logits, -1) - (probabilities * logits).sum(-1)

    torch.manual_seed(0)
    leaf = torch.randn(T, V, dtype=dtype, requires_grad=gradients)
    with Tracker(leaf) as tracker, torch.set_grad_enabled(gradients):
        found = entropy(leaf)
        if gradients:
            found.sum().backward()
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    made = job(gradients, names[dtype], cross_entropy="flash", entropy="full")
    made = replace(made, environment=(("TORCHDYNAMO_DISABLE", "1"),))
    clock = Clock()
    beside = [live for live in logits_lives(made, T, V, clock) if live.label != "logits"]
    at = [index for index, name in enumerate(clock.names) if name.startswith("entropy/")]
    predicted = max(sum(live.total for live in beside if live.born <= index <= live.dies) for index in at)
    assert predicted <= tracker.peak <= predicted + 64 * T


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_entropy_keeps_only_figures_of_a_row() -> None:
    """The partition of forward and backward that torch.compile makes, without its code generator."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    wide: dict[str, int] = {}

    def seen(name: str) -> Callable[[Any, Any], Any]:
        def compiler(module: Any, _: Any) -> Any:
            made = [node for node in module.graph.output_node().args[0] if node.op != "placeholder"]
            wide[name] = sum(node.meta["val"].numel() >= ELEMENTS for node in made)
            return make_boxed_func(module.forward)

        return compiler

    def entropy(logits: Tensor) -> Tensor:
        probabilities = functional.softmax(logits, -1)
        return torch.logsumexp(logits, -1) - (probabilities * logits).sum(-1)

    compiled = aot_function(
        entropy, fw_compiler=seen("forward"), bw_compiler=seen("backward"),
        partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
    )  # fmt: skip
    compiled(torch.randn(T, V, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert wide == {"forward": 0, "backward": 1}
    quiet, asked = job(cross_entropy="flash"), job(cross_entropy="flash", entropy="full")
    assert logits_peak(replace(quiet, gradients=False), T, V) == logits_peak(replace(asked, gradients=False), T, V)


def test_megatron_vocabulary_parallel_loss() -> None:
    """Float32 copy, exponentials and gradient in one storage; autograd casts the gradient back at last."""

    class Parallel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
            shifted = logits.float()
            shifted -= shifted.amax(-1, keepdim=True)
            picked = shifted[torch.arange(T), targets].clone()
            torch.exp(shifted, out=shifted)
            total = shifted.sum(-1)
            shifted.div_(total[:, None])
            ctx.save_for_backward(shifted, targets)
            return total.log() - picked

        @staticmethod
        def backward(ctx: Any, *gradient: Tensor) -> Any:
            softmax, targets = ctx.saved_tensors
            softmax[torch.arange(T), targets] -= 1
            return softmax.mul_(gradient[0][:, None]), None

    def run(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
        def loss() -> Tensor:
            return Parallel.apply(functional.linear(hidden, head), targets)  # type: ignore[no-any-return]

        loss().sum().backward()

    predicted = logits_peak(job(cross_entropy="parallel"), T, V)
    assert predicted == 6 * ELEMENTS
    assert predicted <= tracked(run, torch.bfloat16) <= predicted + 64 * T


def test_instants_and_names() -> None:
    clock = Clock()
    lives = logits_lives(job(), T, V, clock)
    assert tuple(clock.names) == (*FORWARD, *BACKWARD)
    assert {live.label for live in lives} == {
        "logits",
        "log-probs of the vocabulary",
        "gradient of the log-probs",
        "gradient of logits",
    }
    clock = Clock()
    lives = logits_lives(job(False), T, V, clock)
    assert tuple(clock.names) == FORWARD
    assert all(0 <= live.born <= live.dies < len(FORWARD) for live in lives)


def test_every_row_of_the_table_is_reachable_and_in_order() -> None:
    order = (*FORWARD, *BACKWARD)
    for row in table():
        assert order.index(row.born) <= order.index(row.dies), row
        assert row.source, row


def test_implementations() -> None:
    assert implementation(job(cross_entropy="te")) == "te"
    assert implementation(job(chunk_tokens=128)) == "pieces"
    assert implementation(job(implementation="chunked", chunk_tokens=128)) == "chunked"
    assert implementation(job(implementation="fused")) == "fused"
    assert implementation(job(dtype="float32", temperature_copy=True, entropy="full", strategy="single")) == "own"


def test_a_value_head_is_one_number_a_token() -> None:
    made = job()
    clock = Clock()
    lives = logits_lives(replace(made, head="value"), T, V, clock)
    assert sum(live.total for live in lives) <= 8 * T
    assert tuple(clock.names) == (*FORWARD, *BACKWARD)


def test_liger_makes_a_chunk_as_large_as_the_hidden_states() -> None:
    """linkedin/Liger-Kernel benchmark: 16384 rows of Llama-3-8B go by 512."""
    shape = Architecture(name="8B", layers=1, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
    made = Job(
        architecture=shape, engine=Engine(logits=Logits(implementation="fused")), world=1, sequences=1, tokens=16384,
        longest=16384,
    )  # fmt: skip
    assert chunk_rows(made, 16384, 128256, "fused") == 512
