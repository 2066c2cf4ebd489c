"""How flowledger's own loop computes, said in the words of an engine: its settings are few, and the rest is fixed."""

from dataclasses import dataclass, replace

from flowledger.config.engine import Engine, Logits, Lora, Mesh, Optimizer, Recompute, Serving
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.plan.fsdp.timeline import timeline
from flowledger.plan.job import Job
from flowledger.plan.serving import Served
from flowledger.plan.serving import engine as engine_of
from flowledger.plan.setting import RankClass
from flowledger.plan.timeline import Timeline
from flowledger.tables.models import Architecture


def asked(config: RunConfig, role: str) -> Engine:
    """The settings that cut a role's model: the actor's, but where the critic has its own."""
    critic = config.critic.engine if config.critic and role == "critic" else None
    return critic or config.actor.engine


def engine(config: RunConfig, role: str = "actor") -> Engine:
    """The engine of a model of the loop: a Hugging Face module, float32 logits in chunks, fused AdamW."""
    mesh = config.mesh.model_copy(update={"etp": 1})  # tp leaves experts whole
    return asked(config, role).model_copy(
        update={
            "strategy": "single" if mesh.dp * mesh.cp * mesh.sp == 1 else "fsdp2",  # tp and pp leave nothing to shard
            "outside": "root",
            "mesh": mesh,
            "param_dtype": config.model.dtype,
            "recompute": Recompute(granularity="full" if config.actor.activation_checkpointing else "none"),
            "lora": adapters(config),
            "optimizer": Optimizer(implementation="fused"),
            "logits": Logits(
                implementation="chunked" if config.actor.log_prob_chunk_tokens else "full",
                chunk_tokens=config.actor.log_prob_chunk_tokens or None,
                dtype="float32",
                temperature_copy=True,
                entropy="full",
                entropy_grad=config.algorithm.entropy_coef != 0,
            ),
            "attention": "sdpa",
            "packed": config.actor.packed,
        }
    )


def dealt(engine: Engine, layers: int) -> Engine:
    """The same with every layer on a pipeline stage: where those asked for do not share them, which the rules refuse, evenly.

    The first stages get what is left over, so that the rest of the plan can be made.
    """
    mesh = engine.mesh or Mesh()
    first, last, told = engine.layers_in_first_stage, engine.layers_in_last_stage, engine.layers_in_stages
    try:
        stage_layers(layers, mesh.pp, mesh.vpp, first, last, told)
    except BadInput:
        each, left = divmod(layers, mesh.pp * mesh.vpp)
        told = tuple(each + (stage < left) for stage in range(mesh.pp * mesh.vpp))
        return engine.model_copy(update={"layers_in_stages": told})
    return engine


def adapters(config: RunConfig) -> Lora | None:
    """LoRA as peft makes it: float32 adapters, whatever the dtype of the model.

    Source: peft 0.21 tuners/tuners_utils.py cast_adapter_dtype, which get_peft_model calls unless told otherwise.
    """
    lora = config.model.lora
    return lora and lora.model_copy(update={"dtype": "float32"})


@dataclass(frozen=True, slots=True)
class Share:
    """Neighbouring ranks that sample responses to equally many prompts."""

    first: int
    count: int
    prompts: int  # of each


def shares(config: RunConfig) -> tuple[Share, ...]:
    """Who samples how much: the prompts of a step are cut over the world as torch.chunk does, so the last may have less."""
    world, prompts = config.mesh.dp * config.mesh.model, config.data.prompts_per_step
    each = -(-prompts // world)
    whole, rest = divmod(prompts, each)
    cut = (Share(0, whole, each), Share(whole, min(rest, 1), rest))
    filled = whole + min(rest, 1)
    return tuple(one for one in (*cut, Share(filled, world - filled, 0)) if one.count)


def within(classes: tuple[RankClass, ...], share: Share) -> list[RankClass]:
    """Of each class of ranks those that have this share."""
    found = []
    for one in classes:
        first, stop = max(one.first, share.first), min(one.first + one.count, share.first + share.count)
        if first < stop:
            part = (
                ""
                if stop - first == one.count
                else f"rank {first}"
                if stop - first == 1
                else f"ranks {first}-{stop - 1}"
            )
            found.append(replace(one, first=first, count=stop - first, part=part))
    return found


def serving(config: RunConfig, prompts: int, group: int) -> Serving:
    """The rollout of a rank, `group` samples to each of its prompts: a cache of fixed slots in the same process.

    It samples from a copy of the policy, or from the policy itself.
    """
    samples = prompts * group
    return config.rollout.serving.model_copy(
        update={
            "engine": "flowledger",
            "mesh": Mesh(),
            "dtype": config.model.dtype,
            "kv_dtype": config.model.dtype,
            "max_running": min(samples, config.rollout.max_running or samples),
            "max_model_tokens": config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1,
            "colocated": True,
        }
    )


def served(config: RunConfig, architecture: Architecture, prompts: int, *, greedy: bool = False) -> Served:
    """What the rollout of a rank takes. `greedy`: the pass that gives each prompt one response, for a baseline."""
    group = 1 if greedy else config.rollout.samples_per_prompt
    made = engine_of(
        architecture,
        serving(config, prompts, group),
        device_bytes=0,
        shared=config.rollout.weights == "shared",
        lora=adapters(config),
    )
    return replace(made, prefill=prefill(config, architecture, prompts, group))


def prefill(config: RunConfig, architecture: Architecture, prompts: int, group: int) -> int:
    """Bytes that the forward pass over the prompts of a rank takes for a moment, beside the cache that it fills.

    All prompts whose samples find a slot go through the model together, padded, each without its last token; nothing is
    said of the output head, which sees one token of each.
    """
    tokens = config.data.max_prompt_tokens - 1
    if slots := config.rollout.max_running:
        prompts = min(prompts, -(-slots // group))
    stages = {"layers_in_stages": (), "layers_in_first_stage": None, "layers_in_last_stage": None}  # it has all layers
    whole = engine(config).model_copy(update={"strategy": "single", "mesh": Mesh(), "packed": False, **stages})
    job = Job(
        architecture=architecture, engine=whole, world=1, sequences=prompts, tokens=prompts * tokens, longest=tokens,
        gradients=False, head="none",
    )  # fmt: skip
    made = timeline(job)
    lives = tuple(live for live in made.lives if not live.persistent)
    return Timeline(made.instants, lives).peak().bytes if prompts and tokens else 0
