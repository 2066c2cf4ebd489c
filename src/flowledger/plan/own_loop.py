"""How flowledger's own loop computes, said in the words of an engine: its settings are few, and the rest is fixed."""

from flowledger.config.engine import Engine, Logits, Mesh, Optimizer, Recompute, Serving
from flowledger.config.schema import RunConfig
from flowledger.plan.fsdp.timeline import timeline
from flowledger.plan.job import Job
from flowledger.plan.timeline import Timeline
from flowledger.tables.models import Architecture


def engine(config: RunConfig) -> Engine:
    """The engine of the loop's models: Hugging Face modules, float32 logits in chunks, fused AdamW."""
    mesh = config.mesh
    return config.actor.engine.model_copy(
        update={
            "strategy": "single" if mesh.dp * mesh.cp * mesh.sp == 1 else "fsdp2",  # tp and pp leave nothing to shard
            "outside": "root",
            "mesh": mesh,
            "param_dtype": config.model.dtype,
            "recompute": Recompute(granularity="full" if config.actor.activation_checkpointing else "none"),
            "lora": config.model.lora,
            "optimizer": Optimizer(implementation="fused"),
            "logits": Logits(
                implementation="chunked" if config.actor.log_prob_chunk_tokens else "full",
                chunk_tokens=config.actor.log_prob_chunk_tokens or None,
                dtype="float32",
                temperature_copy=True,
                entropy="full",
            ),
            "attention": "sdpa",
            "packed": config.actor.packed,
        }
    )


def serving(config: RunConfig) -> Serving:
    """Its rollout: a cache of fixed slots in the same process, beside a copy of the policy or the policy itself."""
    samples = config.rollout.samples_per_prompt * prompts_of_rank(config)
    return config.rollout.serving.model_copy(
        update={
            "engine": "flowledger",
            "dtype": config.model.dtype,
            "kv_dtype": config.model.dtype,
            "max_running": min(samples, config.rollout.max_running or samples),
            "max_model_tokens": config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1,
            "colocated": True,
        }
    )


def prompts_of_rank(config: RunConfig) -> int:
    """Prompts that one rank samples responses to: the step's are cut over the world as torch.chunk does."""
    return -(-config.data.prompts_per_step // (config.mesh.dp * config.mesh.model))


def prefill(config: RunConfig, architecture: Architecture) -> int:
    """Bytes that the forward pass over the prompts of a rollout takes for a moment, beside the cache that it fills.

    All prompts whose samples find a slot go through the model together, padded, each without its last token; nothing is
    said of the output head, which sees one token of each.
    """
    prompts, tokens = prompts_of_rank(config), config.data.max_prompt_tokens - 1
    if slots := config.rollout.max_running:
        prompts = min(prompts, -(-slots // config.rollout.samples_per_prompt))
    whole = engine(config).model_copy(update={"strategy": "single", "mesh": Mesh(), "packed": False, "lora": None})
    job = Job(
        architecture=architecture, engine=whole, world=1, sequences=prompts, tokens=prompts * tokens, longest=tokens,
        gradients=False, head="none",
    )  # fmt: skip
    made = timeline(job)
    lives = tuple(live for live in made.lives if not live.persistent)
    return Timeline(made.instants, lives).peak().bytes if tokens else 0
