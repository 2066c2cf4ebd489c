"""Everything that lives through all steps of a run: models, optimizer, prompts, rewards, random streams."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.estimates import activation_bytes
from flowledger.run import checkpoints, forward, imports, models, prompts, rewards
from flowledger.run.advantages import ADVANTAGES
from flowledger.run.exceptions import told
from flowledger.run.generate import Abort
from flowledger.run.losses import KL_FORMS, POLICY_LOSSES
from flowledger.run.weights import RolloutWeights, rollout_weights

# Tensors of size H that a layer saves per token without checkpointing: 20-30 in Llama-like models (norms, q, k, v, the
# gated FFN of about 3H), here rounded up so that `max_bytes` is kept.
ACTIVATION_FACTOR = 32.0


@dataclass(slots=True, kw_only=True)
class World:
    """The long-lived objects of one run on one process."""

    config: RunConfig
    policy: models.Policy
    reference: models.Reference | None
    weights: RolloutWeights
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    source: prompts.PromptSource
    scorer: rewards.Scorer
    generator: torch.Generator
    stop_ids: tuple[int, ...]
    pad_id: int
    abort: Abort | None
    bytes_per_token: int

    @property
    def bindings(self) -> dict[str, int]:
        """Symbol -> size, as the configuration says it; lengths that the data decides are left out."""
        c = self.config
        batch = {"B_prompt": c.data.prompts_per_step, "G": c.rollout.samples_per_prompt, "B": c.samples_per_step}
        reward = {"N_reward": len(c.reward.components)}
        return batch | reward | self.policy.sizes | c.mesh.degrees


def build(config: RunConfig) -> World:
    """Build a run's world. Raises BadInput for whatever the configuration names and the machine does not have."""
    check_names(config)
    checkpoints.check_room(config)
    abort = _abort_function(config.rollout.abort_function) if config.rollout.abort_function else None
    scorer = rewards.Scorer(config.reward, config.data, seed=config.seed)  # first: its process starts meanwhile
    try:
        return _build(config, scorer, abort)
    except BaseException:
        scorer.close()
        raise


def _build(config: RunConfig, scorer: rewards.Scorer, abort: Abort | None) -> World:
    torch.manual_seed(config.seed)
    source = prompts.open_source(config.data, seed=config.seed)
    policy = models.load_policy(config.model, seed=config.seed)
    _check_stop_tokens(config, policy.sizes["V"])
    forward.use_segments(policy.model)
    forward.check_forward(policy.model, policy.sizes["V"])
    scorer.load_models(policy, seed=config.seed)
    reference = models.reference_of(policy) if config.ref else None
    weights = rollout_weights(policy.model, shared=config.rollout.weights == "shared")
    if config.actor.activation_checkpointing:
        model: Any = policy.model
        _recompute_activations(model)
        model.train()  # checkpointing works in training mode only; there is no dropout
    optimizer = torch.optim.AdamW(
        [p for p in policy.model.parameters() if p.requires_grad],
        lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps, weight_decay=config.optim.weight_decay,
    )  # fmt: skip
    warmup = config.optim.warmup_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
    sizes = policy.sizes
    return World(
        config=config, policy=policy, reference=reference, weights=weights, optimizer=optimizer, schedule=schedule,
        source=source, scorer=scorer, generator=torch.Generator().manual_seed(config.seed),
        stop_ids=(*policy.stop_ids, *config.rollout.stop_token_ids), pad_id=policy.pad_id, abort=abort,
        bytes_per_token=activation_bytes(
            layers=sizes["L"], local_tokens=1, hidden_size=sizes["H"], bytes_per_element=4, factor=ACTIVATION_FACTOR
        ),
    )  # fmt: skip


def _abort_function(path: str) -> Abort:
    """The user's function. Raises BadInput where it cannot be called with a sample id and a list of tokens."""
    function = imports.load_function(path, key="rollout.abort_function")
    try:
        inspect.signature(function).bind(0, [])
    except TypeError as error:
        raise BadInput(
            f"rollout.abort_function = {path!r} cannot be called as (sample_id, response_ids): {told(error)}"
        ) from None
    except ValueError:  # a function in C that does not say what it takes: the first call will show
        pass
    return function


def _check_stop_tokens(config: RunConfig, vocabulary: int) -> None:
    for token in config.rollout.stop_token_ids:
        if token >= vocabulary:
            raise BadInput(
                f"rollout.stop_token_ids holds {token} ({config.source_of('rollout.stop_token_ids')}), and the model "
                f"has {vocabulary} tokens; use ids from 0 to {vocabulary - 1}"
            )


def _recompute_activations(model: Any) -> None:
    """Switch activation checkpointing on; transformers renamed the switch in version 5 and warns of the old name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def check_names(config: RunConfig) -> None:
    """Refuse names that no function bears, with the nearest one that exists."""
    tables: dict[str, tuple[str, Mapping[str, object]]] = {
        "algorithm.advantage": (config.algorithm.advantage, ADVANTAGES),
        "algorithm.policy_loss": (config.algorithm.policy_loss, POLICY_LOSSES),
        "algorithm.kl_form": (config.algorithm.kl_form, KL_FORMS),
    }
    for key, (value, known) in tables.items():
        if value not in known:
            ways = (
                f"is not one of {', '.join(known)}"
                if len(known) > 1
                else f"is not known; the only one is {next(iter(known))}"
            )
            raise BadInput(f"{key} = {value!r} ({config.source_of(key)}) {ways}{nearest(value, known)}")
    degrees = {axis: degree for axis, degree in config.mesh.degrees.items() if degree != 1}
    for axis, degree in degrees.items():
        raise BadInput(
            f"mesh.{axis} = {degree} ({config.source_of(f'mesh.{axis}')}): this loop runs on one process; use 1"
        )
    if config.critic:
        raise BadInput(
            f"critic ({config.source_of('critic')}): algorithm.advantage = {config.algorithm.advantage!r} uses no critic; remove it"
        )
