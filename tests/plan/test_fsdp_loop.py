"""flowledger's own micro-batch against its plan: packed, log-probs in chunks, with and without checkpoints, on CPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flowledger.config.engine import Engine, Logits, Recompute
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.job import Job
from flowledger.plan.timeline import Timeline
from flowledger.run import forward
from flowledger.tables.models import Architecture
from tests.plan.fsdp_runs import Measured, architecture, causal_lm, checkpointed, counted

LENGTHS, RESPONSE = (200, 180, 220, 150), 120


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of padded rows."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    response: Tensor


def batch() -> Batch:
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    ids = torch.randint(1, 100, mask.shape) * mask
    return Batch(ids=ids, mask=mask, positions=(mask.cumsum(1) - 1).clamp(min=0), response=mask[:, -RESPONSE:].clone())


def run(
    shape: Architecture, dtype: torch.dtype, rows: Batch, chunk: int, *, recompute: bool, gradients: bool
) -> Measured:
    model = causal_lm(shape, dtype)
    forward.use_segments(model)
    model = checkpointed(model) if recompute else model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            new = forward.micro_batch_forward(
                model=model, full_sequence=rows.ids, attention_mask=rows.mask, position_ids=rows.positions,
                response_mask=rows.response, temperature=1.0, packed=True, chunk_tokens=chunk,
            )  # fmt: skip
        if gradients:
            new.new_log_prob.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    others = (rows.ids, rows.mask, rows.positions, rows.response)
    return counted(step, model, optimizer, others, warm=gradients)


def plan(
    shape: Architecture, dtype: torch.dtype, rows: Batch, chunk: int, *, recompute: bool, gradients: bool,
    prompt: int | None = None,
) -> Timeline:  # fmt: skip
    """`prompt`: tokens of one that all samples share."""
    engine = Engine(
        param_dtype="float32" if dtype == torch.float32 else "bfloat16", attention="sdpa",
        recompute=Recompute(granularity="full" if recompute else "none"),
        logits=Logits(
            implementation="chunked" if chunk else "full", chunk_tokens=chunk or None, dtype="float32",
            temperature_copy=True, entropy="full",
        ),
    )  # fmt: skip
    lengths = rows.mask.sum(1).tolist()
    saved = 0 if prompt is None else prompt * (len(lengths) - 1)
    job = Job(
        architecture=shape, engine=engine, world=1, sequences=len(lengths), tokens=sum(lengths) - saved,
        longest=max(lengths), gradients=gradients, logit_tokens=int(rows.response.sum()),
        beside_tokens=0 if prompt is None else sum(lengths[1:]),
    )  # fmt: skip
    return fsdp.timeline(job)


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
    ids=["fp32 tied", "fp32", "bf16 tied"],
)
@pytest.mark.parametrize(("chunk", "recompute"), [(0, False), (0, True), (64, True)])
def test_the_update(dtype: torch.dtype, tied: bool, chunk: int, recompute: bool) -> None:
    shape, rows = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=2048, tied=tied), batch()
    truth = run(shape, dtype, rows, chunk, recompute=recompute, gradients=True)
    made = plan(shape, dtype, rows, chunk, recompute=recompute, gradients=True)
    assert made.peak().bytes == pytest.approx(truth.peak, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_update_in_chunks_with_all_activations(dtype: torch.dtype) -> None:
    """The head's gradient grows chunk by chunk while all layers wait: the plan may say up to one such gradient more."""
    shape, rows = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=2048, tied=True), batch()
    truth = run(shape, dtype, rows, 64, recompute=False, gradients=True)
    made = plan(shape, dtype, rows, 64, recompute=False, gradients=True)
    assert 0.999 * truth.peak <= made.peak().bytes <= truth.peak + 2048 * 128 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_log_probs_without_gradients(dtype: torch.dtype) -> None:
    shape, rows = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=264), batch()
    truth = run(shape, dtype, rows, 64, recompute=False, gradients=False)
    made = plan(shape, dtype, rows, 64, recompute=False, gradients=False)
    assert made.peak().bytes == pytest.approx(truth.peak, rel=5e-3)


def one_prompt(prompt: int, responses: tuple[int, ...]) -> Batch:
    """Samples of one prompt."""
    ids = torch.randint(1, 100, (len(responses), prompt + max(responses)))
    ids[:, :prompt] = ids[0, :prompt]
    mask = (torch.arange(ids.shape[1]) < prompt + torch.tensor(responses)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Batch(ids=ids * mask, mask=mask, positions=positions, response=mask[:, prompt:].clone())


@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [(torch.float32, 0), (torch.float32, 64), (torch.bfloat16, 64)],
    ids=["fp32", "fp32 in chunks", "bf16 in chunks"],
)
@pytest.mark.parametrize(
    ("prompt", "responses"),
    [(40, (120, 120, 120, 120)), (100, (40, 40, 40, 40)), (40, (140, 130, 170, 100)), (60, (60, 20, 64, 50))],
    ids=["equal", "long prompt", "long ragged", "short ragged"],
)
@pytest.mark.parametrize("gradients", [True, False], ids=["update", "log-probs"])
def test_samples_that_share_a_prompt(
    prompt: int, responses: tuple[int, ...], dtype: torch.dtype, chunk: int, gradients: bool
) -> None:
    shape, rows = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=264, tied=True), one_prompt(prompt, responses)  # fmt: skip
    truth = run(shape, dtype, rows, chunk, recompute=False, gradients=gradients)
    made = plan(shape, dtype, rows, chunk, recompute=False, gradients=gradients, prompt=prompt)
    padded = len(set(responses)) > 1 and sum(responses) < 256  # short ones become a rectangle, which no plan counts
    assert made.peak().bytes == pytest.approx(truth.peak, rel=2e-3 if gradients and not padded else 0.03)
