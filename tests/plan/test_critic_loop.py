"""The critic of flowledger's own loop against its plan: its micro-batch alone, and a recorded run of examples/ppo.yaml."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flowledger.config.engine import Engine, Logits, Recompute
from flowledger.ledger.reader import Ledger
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.job import Job
from flowledger.plan.weights import weights
from flowledger.run import forward
from flowledger.run.algorithms.aggregation import aggregate_tokens, totals_of
from flowledger.run.algorithms.value_loss import value_loss
from flowledger.run.models import recompute_activations
from flowledger.run.value_model import ValueModel, token_values
from flowledger.tables.models import Architecture
from tests.plan.conftest import COMMON, Witnesses, planned, record, with_observed_tokens
from tests.plan.fsdp_runs import Measured, architecture, causal_lm, counted
from tests.plan.test_fsdp_loop import LENGTHS, Batch, batch
from tests.plan.test_memory import TOLERANCE, later, recorded_peaks


def run(shape: Architecture, dtype: torch.dtype, rows: Batch, *, recompute: bool, gradients: bool) -> Measured:
    """One micro-batch through a value model, and with gradients the optimizer step."""
    backbone: nn.Module = causal_lm(shape, dtype).eval().get_decoder()  # type: ignore[operator]
    forward.use_segments(backbone)
    if recompute:
        recompute_activations(backbone)
    model = ValueModel(backbone, nn.Linear(shape.hidden, 1).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    old, returns = torch.zeros(rows.response.shape), torch.ones(rows.response.shape)
    totals = totals_of(rows.response, horizon=1)

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            new = token_values(
                model=model, full_sequence=rows.ids, attention_mask=rows.mask, position_ids=rows.positions,
                response_mask=rows.response, packed=True,
            )  # fmt: skip
        if gradients:
            made = value_loss(new_values=new, old_values=old, returns=returns, mask=rows.response, clip=0.5)
            loss = aggregate_tokens(made.loss_mat, mask=rows.response, mode="token-mean", totals=totals).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    others = (rows.ids, rows.mask, rows.positions, rows.response, old, returns)
    return counted(step, model, optimizer, others, warm=gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("recompute", "gradients"), [(False, True), (True, True), (False, False)], ids=["update", "recomputed", "values"]
)
def test_a_micro_batch_of_the_critic(dtype: torch.dtype, recompute: bool, gradients: bool) -> None:
    shape, rows = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=2048, tied=True), batch()
    truth = run(shape, dtype, rows, recompute=recompute, gradients=gradients)
    engine = Engine(
        param_dtype="float32" if dtype == torch.float32 else "bfloat16", attention="sdpa",
        recompute=Recompute(granularity="full" if recompute else "none"),
        logits=Logits(implementation="chunked", chunk_tokens=64, dtype="float32", temperature_copy=True, entropy="full"),
    )  # fmt: skip
    job = Job(
        architecture=shape, engine=engine, world=1, sequences=len(LENGTHS), tokens=int(rows.mask.sum()),
        longest=max(LENGTHS), gradients=gradients, head="value", logit_tokens=int(rows.response.sum()),
    )  # fmt: skip
    assert fsdp.timeline(job).peak().bytes == pytest.approx(truth.peak, rel=3.5e-3)


RUNS = {
    "usual": (),
    "variant": (  # adapters on the policy and none on the critic, which recomputes and has batches of its own
        "model.lora.rank=4", "model.lora.alpha=8", "model.lora.target_modules=[q_proj,v_proj]", "critic.path=tiny",
        "actor.activation_checkpointing=true", "critic.mini_batch_prompts=4", "critic.micro_batch.samples=8",
        "rollout.weights=shared", "model.tiny.hidden_size=128", "model.tiny.layers=3", "model.tiny.heads=8",
        "model.tiny.ffn_size=384",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witnesses]:
    overrides = (*COMMON, "critic.warmup_steps=0", *RUNS[request.param])
    ledger = Ledger(record(tmp_path_factory.mktemp("critic") / request.param, *overrides, source="ppo.yaml"))
    yield Witnesses(ledger, with_observed_tokens(planned("ppo.yaml", *overrides), ledger))
    ledger.close()


def test_the_peak_of_every_stage_is_within_two_percent_of_the_recorded_one(witness: Witnesses) -> None:
    plan, seen = later(witness.plan), recorded_peaks(witness)
    assert {"values", "update_critic", "update_actor"} <= set(seen)
    off = {stage: plan[stage].peak.bytes / row["known"] - 1 for stage, row in seen.items()}
    assert {stage: f"{error:+.1%}" for stage, error in off.items() if abs(error) > TOLERANCE} == {}


def test_gradients_and_states_of_the_critic_are_exact(witness: Witnesses) -> None:
    """Up to one float32 counter of steps a trained tensor, of policy and critic."""
    plan, seen = later(witness.plan), recorded_peaks(witness)
    assert {stage: one.kinds.get("grad", 0) for stage, one in plan.items() if stage in seen} == {
        stage: row["grad"] or 0 for stage, row in seen.items()
    }
    lora = witness.plan.config.model.lora
    layers = witness.plan.architecture.layers
    policy = 2 * layers * len(lora.target_modules) if lora else len(weights(witness.plan.architecture))
    counters = 4 * (policy + len(weights(witness.plan.architecture, head="value")))
    row, made = seen["update_critic"], plan["update_critic"].kinds
    assert made["optimizer"] == row["optimizer"] - counters
    rotations = row["param"] - made["param"]  # two tables a model that exists, of head_dim / 2 float32
    assert rotations % (2 * (witness.plan.architecture.head_dim // 2) * 4) == 0 and 0 < rotations < 400


def test_the_stages_of_the_critic_are_recorded_with_their_phases_and_its_role(witness: Witnesses) -> None:
    rows = witness.ledger.rows(
        "SELECT DISTINCT stage, phase, role FROM spans WHERE step = 1 AND stage IN ('values', 'update_critic')"
    )
    assert {row["role"] for row in rows} == {"critic"}
    assert {row["phase"] for row in rows if row["stage"] == "update_critic"} >= {"forward", "loss", "backward", "step"}
    assert {row["phase"] for row in rows if row["stage"] == "values"} >= {"forward"}


def test_the_tensors_of_the_critic_are_where_the_plan_says(witness: Witnesses) -> None:
    names = "('params', 'grads', 'optimizer_state', 'values', 'returns', 'value_loss')"
    rows = witness.ledger.rows(
        "SELECT DISTINCT stage, tensor_name, access FROM accesses WHERE step = 1 AND stage IN ('values', 'update_critic') "
        f"AND tensor_name IN {names}"
    )
    recorded = {(row["stage"], row["tensor_name"], row["access"]) for row in rows}
    planned_ = {(row.stage, row.tensor_name, row.access) for row in witness.plan.shapes}
    assert recorded <= planned_
    assert {("values", "values", "write"), ("update_critic", "value_loss", "write"), ("update_critic", "grads", "write")} <= recorded  # fmt: skip
