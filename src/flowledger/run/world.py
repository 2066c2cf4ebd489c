"""Everything that lives through all steps of a run: models, optimizer, prompts, rewards, random streams."""

import inspect
from dataclasses import dataclass

import torch

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import checkpoints, decode, device, forward, imports, models, prompts, rewards
from flowledger.run.algorithms.kl import KlControl
from flowledger.run.batches import Advantages, Update
from flowledger.run.critic import Critic, load_critic
from flowledger.run.environments import Environment, open_environment
from flowledger.run.exceptions import told
from flowledger.run.generate import Abort
from flowledger.run.optimizer import adamw
from flowledger.run.parallel import processes
from flowledger.run.parallel.ranks import Ranks, join
from flowledger.run.parallel.sharded import cut
from flowledger.run.weights import RolloutWeights, rollout_weights


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
    environment: Environment | None
    bytes_per_token: int
    kl: KlControl
    critic: Critic | None
    ranks: Ranks

    @property
    def bindings(self) -> dict[str, int]:
        """Symbol -> size, as the configuration says it; lengths that the data decides are left out."""
        c = self.config
        batch = {"B_prompt": c.data.prompts_per_step, "G": c.rollout.samples_per_prompt, "B": c.samples_per_step}
        reward = {"N_reward": len(c.reward.components)}
        return batch | reward | self.policy.sizes | c.mesh.degrees

    def advance(self, advantages: Advantages, update: Update | None) -> None:
        """Move what changes from step to step: the learning rates, and the KL coefficient where it adapts."""
        if update is not None:
            self.schedule.step()
        in_reward, in_loss = advantages.metrics.get("reward_kl"), (update.metrics if update else {}).get("ref_kl")
        kl = in_loss if in_reward is None else in_reward
        if kl is not None:
            self.kl.update(kl, samples=self.config.samples_per_step)


def build(config: RunConfig) -> World:
    """Build a run's world. Raises BadInput for whatever the configuration names and the machine does not have."""
    processes.check(config)
    processes.start()
    ranks = join(config.mesh, device.chosen(config.device))
    checkpoints.check_room(config)
    abort = _abort_function(config.rollout.abort_function) if config.rollout.abort_function else None
    environment = open_environment(config.rollout, config.data)
    scorer = rewards.Scorer(config.reward, config.data, seed=config.seed)  # first: its process starts meanwhile
    try:
        return _build(config, scorer, abort, environment, ranks)
    except BaseException:
        scorer.close()
        raise


def _build(
    config: RunConfig, scorer: rewards.Scorer, abort: Abort | None, environment: Environment | None, ranks: Ranks
) -> World:
    torch.manual_seed(config.seed)
    source = prompts.open_source(config.data, seed=config.seed)
    policy = models.load_policy(config.model, seed=config.seed, device=ranks.device)
    processes.check_model(config, policy.sizes)
    _check_stop_tokens(config, policy.sizes["V"])
    forward.use_segments(policy.model)
    actor = config.actor
    forward.check_forward(policy.model, policy.sizes["V"], packed=actor.packed, shared_prompts=actor.shared_prompts)
    scorer.load_models(policy, seed=config.seed)
    reference = models.reference_of(policy) if config.ref else None
    critic = load_critic(config, policy, ranks) if config.critic else None
    weights = rollout_weights(policy.model, shared=config.rollout.weights == "shared")
    decode.verify(weights.model)
    if config.actor.activation_checkpointing:
        models.recompute_activations(policy.model)
    cut(policy.model, ranks, config.actor.engine)
    if reference is not None and not reference.adapters_off:
        cut(reference.model, ranks, config.actor.engine)
    optimizer = adamw(policy.model, config.optim, lr=config.optim.lr)
    warmup = config.optim.warmup_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
    sizes = policy.sizes
    return World(
        config=config, policy=policy, reference=reference, weights=weights, optimizer=optimizer, schedule=schedule,
        source=source, scorer=scorer, generator=torch.Generator().manual_seed(config.seed),
        stop_ids=(*policy.stop_ids, *config.rollout.stop_token_ids), pad_id=policy.pad_id, abort=abort,
        environment=environment,
        bytes_per_token=models.bytes_per_token(layers=sizes["L"], hidden_size=sizes["H"]),
        kl=KlControl.of(config.algorithm), critic=critic, ranks=ranks,
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
