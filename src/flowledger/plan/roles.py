"""Which models a configuration puts to work, on which ranks, and the job of each in each stage.

A stage of the step is one model at work: `old_log_prob` the actor without gradients, `update_actor` the actor with, and
so on. `work` gives the job of each; everything else about memory follows from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flowledger.config import passes
from flowledger.config.agreement import OWN
from flowledger.config.engine import Engine, Mesh
from flowledger.config.schema import MicroBatch, RunConfig
from flowledger.plan import own_loop
from flowledger.plan.job import Job
from flowledger.plan.shapes import RankClass
from flowledger.plan.weights import local_numel, stage_layers, weights
from flowledger.tables.algorithms import find
from flowledger.tables.models import Architecture

OUTER = {"embed": "first", "positions": "first", "final_norm": "last", "head": "last"}  # part -> pipeline stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One model at work in one stage, with its micro-batch."""

    stage: str
    role: str
    engine: Engine
    micro: MicroBatch
    gradients: bool
    head: str = "lm"
    updates: int = 1  # optimizer steps of one step
    mini_batch_samples: int = 0  # samples that are cut into micro-batches together; 0: all of the step


def stages(config: RunConfig) -> tuple[str, ...]:
    """The stages that this configuration runs in a step, whatever their order."""
    optional = {
        "old_log_prob": config.old_log_prob_pass,
        "ref_log_prob": config.ref is not None,
        "values": config.critic is not None,
        "update_critic": config.critic is not None,
        "checkpoint": config.checkpoint is not None,
    }
    always = ("prompt", "rollout", "reward", "filter", "balance", "advantage", "update_actor", "weight_sync")
    return (*always, *(name for name, runs in optional.items() if runs))


def unused(config: RunConfig) -> frozenset[tuple[str, str]]:
    """(stage, tensor) that the settings leave out: a KL stands either in the loss or in the reward, or has no weight.

    The own loop measures it without a weight too.
    """
    algorithm = config.algorithm
    measured = config.ref is not None and (config.framework == OWN or algorithm.kl_coef != 0)
    in_reward, in_loss = (measured and algorithm.kl_in == place for place in ("reward", "loss"))
    bypass = algorithm.policy_loss == passes.BYPASS
    weighted = algorithm.rollout_correction.importance != "none" and not bypass
    needs = {need for row in find(algorithm.advantage) if row.what == "advantage" for need in row.needs}
    made = {  # (stage, tensor) -> whether the settings ask for it
        ("advantage", "kl"): in_reward,
        ("update_actor", "kl"): in_loss,
        ("update_actor", "kl_loss"): in_loss,
        ("old_log_prob", "sum_pi_squared"): "sum_pi_squared" in needs,
        ("advantage", "sum_pi_squared"): "sum_pi_squared" in needs,
        ("reward", "baseline_reward"): "baseline" in needs,
        ("advantage", "baseline_reward"): "baseline" in needs,
        ("advantage", "rollout_is_weights"): weighted,
        ("update_actor", "rollout_is_weights"): weighted,
    }
    return frozenset(where for where, asked in made.items() if not asked)


def cut_anew(config: RunConfig, stage: str) -> bool:
    """Whether a stage of the own loop has micro- or mini-batches that are not those of the policy's update."""
    if stage == "update_critic":
        return config.critic is not None and bool(config.critic.micro_batch or config.critic.mini_batch_prompts)
    return stage != "update_actor" and passes.limits_of(config, stage) is not None


def unwritten(config: RunConfig) -> frozenset[tuple[str, str]]:
    """(stage, tensor) that the stage reads alone, where other settings would have it written there too."""
    algorithm = config.algorithm
    rejects, bypasses = bool(algorithm.rollout_correction.rejections), algorithm.policy_loss == passes.BYPASS
    made = {
        ("advantage", "loss_mask"): rejects and not bypasses,
        ("update_actor", "loss_mask"): rejects and bypasses,
        ("update_actor", "old_log_prob"): not (config.old_log_prob_pass or bypasses),
    }
    return frozenset(where for where, asked in made.items() if not asked)


def stand_ins(config: RunConfig) -> dict[str, str]:
    """Tensor that no stage makes -> the one that is handed on in its place: in bypass mode the rollout's log-probs."""
    return {"old_log_prob": "rollout_log_prob"} if config.bypasses else {}


def works(config: RunConfig) -> tuple[Work, ...]:
    """Every stage in which a model computes in a training engine."""
    actor = config.actor
    own = config.framework == OWN
    engine = own_loop.engine(config) if own else _with_mesh(actor.engine, config)
    # the own loop's passes go over the micro-batches of its update, mini-batch by mini-batch, where they have no limits
    log_prob = actor.log_prob_micro_batch
    cut = config.mini_batch_samples if own else 0
    found = [
        Work(
            stage="old_log_prob", role="actor", engine=engine if own else _entropy(engine, actor.log_prob_entropy),
            micro=log_prob or actor.micro_batch, gradients=False, mini_batch_samples=0 if log_prob else cut,
        ),
        Work(
            stage="update_actor", role="actor", engine=engine, micro=actor.micro_batch, gradients=True,
            updates=_updates(config, config.mini_batch_samples, actor.epochs), mini_batch_samples=config.mini_batch_samples,
        ),
    ]  # fmt: skip
    if config.ref:
        frozen = _with_mesh(config.ref.engine or _whole(engine), config)
        # with LoRA and no engine of its own, the reference is the actor without its adapters
        shared = engine.lora is not None and config.ref.engine is None
        found.append(
            Work(
                stage="ref_log_prob",
                role="actor" if shared else "ref",
                engine=engine if own and shared else frozen if own else _entropy(frozen, "none"),
                micro=config.ref.micro_batch or log_prob or actor.micro_batch,
                gradients=False,
                mini_batch_samples=0 if config.ref.micro_batch or log_prob else cut,
            )
        )
    if critic := config.critic:
        critic_engine = (
            _whole(own_loop.engine(config, "critic")) if own else _with_mesh(critic.engine or engine, config)
        )
        update = critic.micro_batch or actor.micro_batch
        prompts = critic.mini_batch_prompts
        mini = prompts * config.rollout.samples_per_prompt if prompts else config.mini_batch_samples
        found += [
            Work(
                stage="values", role="critic", engine=critic_engine, micro=critic.values_micro_batch or update,
                gradients=False, head="value",
                mini_batch_samples=0 if critic.values_micro_batch or critic.micro_batch else cut,
            ),
            Work(
                stage="update_critic", role="critic", engine=critic_engine, micro=update, gradients=True, head="value",
                updates=_updates(config, mini, critic.epochs or actor.epochs), mini_batch_samples=mini,
            ),
        ]  # fmt: skip
    return tuple(one for one in found if one.stage in stages(config))


def job(
    work: Work,
    config: RunConfig,
    architecture: Architecture,
    *,
    tokens: int,
    sequences: int,
    micro_batches: int,
    pp_rank: int,
    beside_tokens: int = 0,
) -> Job:
    """The job of one stage on one pipeline stage. `tokens`: of the worst micro-batch on one data-parallel rank."""
    logit_tokens = None
    if config.framework == "trl":  # logits_to_keep: completions only
        logit_tokens = sequences * (config.rollout.max_response_tokens + 1)
    elif config.framework == OWN:  # the head sees only what predicts a response token
        logit_tokens = sequences * config.rollout.max_response_tokens
    return Job(
        architecture=architecture, engine=work.engine, world=world(config), gpus_per_node=config.hardware.gpus_per_node,
        device=config.hardware.gpu, sequences=sequences, tokens=tokens, longest=longest(config),
        micro_batches=micro_batches, gradients=work.gradients, head=work.head, logit_tokens=logit_tokens, pp_rank=pp_rank,
        beside_tokens=beside_tokens, own_loop=config.framework == OWN,
    )  # fmt: skip


def own_models(config: RunConfig) -> dict[str, str]:
    """Role -> path of a model that is not the policy's."""
    named = {
        "critic": config.critic.path if config.critic else "start",
        "ref": config.ref.path if config.ref else "start",
    }
    return {role: path for role, path in named.items() if path not in ("start", config.model.path)}


def longest(config: RunConfig) -> int:
    """Tokens of the longest possible sample: prompt and response limits together."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def world(config: RunConfig) -> int:
    """Ranks of the trainer: what its mesh comes to. Where that is not known, all GPUs.

    A pool of GPUs that only generates is part of `hardware` in some frameworks (AReaL, NeMo-RL), never of the mesh.
    """
    mesh = config.actor.engine.mesh or config.mesh
    ranks = mesh.dp * mesh.model
    return ranks if config.framework == OWN or 1 < ranks <= config.hardware.world else config.hardware.world


def classes(engine: Engine, architecture: Architecture, ranks: int) -> tuple[RankClass, ...]:
    """The pipeline stages of a model: their ranks, layers and parameters. Without pp: one class of all ranks."""
    mesh = engine.mesh or Mesh()
    split = stage_layers(
        architecture.layers, mesh.pp, mesh.vpp, engine.layers_in_first_stage, engine.layers_in_last_stage,
        engine.layers_in_stages,
    )  # fmt: skip
    elements = _layer_elements(architecture, mesh)
    each = max(1, ranks // mesh.pp)
    return tuple(
        RankClass(
            name="all" if mesh.pp == 1 else f"pp{index}", first=index * each, count=each, layers=tuple(layers),
            is_first=index == 0, is_last=index == mesh.pp - 1,
            outer_elements=_outer_elements(architecture, mesh, index),
            layer_elements={layer: elements.get(layer, 0) for layer in layers},
        )
        for index, layers in enumerate(split)
    )  # fmt: skip


def _layer_elements(architecture: Architecture, mesh: Mesh) -> Mapping[int, int]:
    """Layer -> parameters of it on one rank of the tensor and expert groups."""
    found: dict[int, int] = {}
    for weight in weights(architecture):
        if weight.layer is not None:
            found[weight.layer] = found.get(weight.layer, 0) + local_numel(
                weight, mesh.tp, mesh.ep, mesh.etp or mesh.tp
            )
    return found


def _outer_elements(architecture: Architecture, mesh: Mesh, index: int) -> int:
    """Parameters outside layers on a rank of this pipeline stage: the embedding on the first, norm and head on the last."""
    held = {part for part, at in OUTER.items() if index == (0 if at == "first" else mesh.pp - 1)}
    return sum(
        local_numel(weight, mesh.tp, mesh.ep, mesh.etp or mesh.tp)
        for weight in weights(architecture)
        if weight.layer is None and weight.part in held
    )


def _with_mesh(engine: Engine, config: RunConfig) -> Engine:
    return engine if engine.mesh else engine.model_copy(update={"mesh": config.mesh})


def _updates(config: RunConfig, mini_batch_samples: int, epochs: int) -> int:
    return -(-config.samples_per_step // mini_batch_samples) * epochs


def _whole(engine: Engine) -> Engine:
    """Without adapters: a reference has none, and flowledger's own critic trains in full."""
    return engine.model_copy(update={"lora": None})


def _entropy(engine: Engine, entropy: str) -> Engine:
    return engine.model_copy(update={"logits": engine.logits.model_copy(update={"entropy": entropy})})
