"""How flowledger's own loop computes, said in the words of an engine: its settings are few, and the rest is fixed."""

from flowledger.config.engine import Engine, Logits, Optimizer, Recompute, Serving
from flowledger.config.schema import RunConfig


def engine(config: RunConfig) -> Engine:
    """The engine of the loop's models: Hugging Face modules, float32 logits in chunks, fused AdamW."""
    mesh = config.mesh
    return config.actor.engine.model_copy(
        update={
            "strategy": "single" if mesh.dp * mesh.model == 1 else "fsdp2",
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
    samples = config.samples_per_step
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
