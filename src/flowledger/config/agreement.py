"""What sections of a configuration ask of each other. Each rule raises ValueError with keys, values and the way out."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flowledger.config import objective
from flowledger.config.bounds import STEP_SAMPLES, STEP_TOKENS
from flowledger.flow.errors import nearest_divisor

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

OWN = "flowledger"  # the framework whose runs the reference loop makes


def step_is_of_this_world(config: "RunConfig") -> None:
    samples, tokens = config.samples_per_step, config.samples_per_step * config.rollout.max_response_tokens
    if samples > STEP_SAMPLES or tokens > STEP_TOKENS:
        raise ValueError(
            f"data.prompts_per_step = {config.data.prompts_per_step} * rollout.samples_per_prompt = "
            f"{config.rollout.samples_per_prompt} makes {samples} samples of up to {config.rollout.max_response_tokens} "
            f"tokens a step; at most {STEP_SAMPLES} samples and {STEP_TOKENS} tokens"
        )


def batches_fit(config: "RunConfig") -> None:
    prompts, mini = config.data.prompts_per_step, config.mini_batch_prompts
    if prompts % mini:
        raise ValueError(
            f"actor.mini_batch_prompts = {mini} does not divide data.prompts_per_step = {prompts} "
            f"(each optimizer step takes equally many prompts); use {nearest_divisor(mini, of=prompts)}"
        )
    samples = config.actor.micro_batch.samples
    if (
        samples is not None
        and "micro_batch" in config.actor.model_fields_set  # the default takes what there is
        and not config.actor.micro_batch.dynamic
        and samples > mini * config.rollout.samples_per_prompt
    ):
        raise ValueError(
            f"actor.micro_batch.samples = {samples} exceeds the mini-batch of {mini}*{config.rollout.samples_per_prompt} "
            f"= {mini * config.rollout.samples_per_prompt} samples; use {mini * config.rollout.samples_per_prompt} or less"
        )


def parts_that_need_each_other(config: "RunConfig") -> None:
    if config.ref is not None and config.ref.path != "start":
        raise ValueError(f"ref.path = {config.ref.path!r}: the loop's reference policy is the start model; use `start`")
    if config.algorithm.kl_coef > 0 and config.ref is None:
        raise ValueError(
            f"algorithm.kl_coef = {config.algorithm.kl_coef} needs a reference policy; add `ref: {{path: start}}` or set it to 0"
        )
    if config.data.task is None and any(component.kind == "task" for component in config.reward.components):
        raise ValueError("a reward component of kind `task` needs data.task (it is that task's own scorer)")


def adapters_are_those_of_the_loop(config: "RunConfig") -> None:
    lora = config.model.lora
    if lora and lora.dtype not in (None, "float32"):
        raise ValueError(
            f"model.lora.dtype = {lora.dtype}: the loop keeps adapters in float32, as peft does; use float32 or null"
        )
    if lora and lora.extra_trainable:
        raise ValueError(
            f"model.lora.extra_trainable = {list(lora.extra_trainable)}: the loop trains adapters alone; leave it out"
        )


Rule = Callable[["RunConfig"], None]
ANY_FRAMEWORK: tuple[Rule, ...] = (step_is_of_this_world,)
OF_THE_LOOP: tuple[Rule, ...] = (
    batches_fit,
    *objective.RULES,
    parts_that_need_each_other,
    adapters_are_those_of_the_loop,
)


def check(config: "RunConfig") -> None:
    """Every rule; a foreign framework has rules of its own, which `flowledger check` reports. Raises ValueError."""
    for rule in (*ANY_FRAMEWORK, *(OF_THE_LOOP if config.framework == OWN else ())):
        rule(config)
