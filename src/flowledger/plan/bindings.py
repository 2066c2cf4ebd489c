"""The value of every symbol of a shape, from a configuration and a model's sizes; what is not known is not bound."""

from flowledger.config.schema import MicroBatch, RunConfig
from flowledger.plan.engines import replicas
from flowledger.tables.models import Architecture


def bindings(
    config: RunConfig, architecture: Architecture | None, dp: int, tokens: int | None, *,
    micro: MicroBatch | None = None, samples_at_once: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Symbol -> value. `tokens` are those of the largest micro-batch on one data-parallel rank; B_micro and T count all ranks.

    `micro` and `samples_at_once`: what cuts micro-batches, and of how many samples; null: as in the policy's update.

    S_prompt and S_resp are the limits of the configuration: a step pads to its longest prompt, which may be shorter.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    samples = config.samples_per_step
    each = micro_samples(micro or config.actor.micro_batch, config, dp, tokens, samples_at_once)
    of_engines = (config.rollout.serving.max_running or samples) * replicas(config)
    slots = min(samples, config.rollout.max_running or of_engines)
    found = {
        "B_prompt": config.data.prompts_per_step,
        "G": config.rollout.samples_per_prompt,
        "B": samples,
        "B_mini": config.mini_batch_samples,
        "B_micro": each * dp,
        "B_run": slots,
        "B_slot": slots,
        "B_admit": min(config.data.prompts_per_step, -(-slots // config.rollout.samples_per_prompt)),
        "S_prompt": prompt,
        "S_resp": response,
        "S": prompt + response,
        "S_cache": prompt + response - 1,  # the last token is sampled and never fed back
        "N_decode": response * -(-samples // slots),  # at most: every sample as long as it may get, slots refilled
        "N_reward": len(config.reward.components),
    }
    if tokens is not None:
        rows = tokens
        if config.framework == "flowledger":  # its head sees only what predicts a response token, a chunk at a time
            rows = min(each * response, tokens)
            rows = min(rows, config.actor.log_prob_chunk_tokens or rows)
        found |= {"T": tokens * dp, "T_logit": rows * dp}
    return found | (_sizes(architecture) if architecture else {})


def micro_samples(
    micro: MicroBatch, config: RunConfig, dp: int, tokens: int | None, samples_at_once: int | None = None
) -> int:
    """Samples of one micro-batch on one data-parallel rank: as given, or what the token budget holds at full length."""
    mini = max(1, -(-(samples_at_once or config.mini_batch_samples) // dp))
    if micro.dynamic and tokens is not None:
        return max(1, min(mini, tokens // (config.data.max_prompt_tokens + config.rollout.max_response_tokens)))
    return min(mini, micro.samples or mini)


def _sizes(architecture: Architecture) -> dict[str, int]:
    sizes = {
        "L": architecture.layers,
        "H": architecture.hidden,
        "A": architecture.heads,
        "K": architecture.kv_heads,
        "D": architecture.head_dim,
        "F": architecture.ffn,
        "V": architecture.vocab,
    }
    return sizes | ({"E": architecture.moe.experts} if architecture.moe else {})
