"""The three models of a verl run, and under which keys each stands."""

from dataclasses import dataclass

from flowledger.config.settings import Settings

FSDP = ("fsdp", "fsdp2", "fsdp_turbo")
SECTIONS = {"megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Where a role's settings stand: `section.ppo_…`, `section.<engine>.…`, `model.…`, `optim.…`."""

    name: str
    section: str
    model: str
    fsdp: str  # the engine section where the strategy is FSDP
    trains: bool = True

    def engine(self, strategy: str) -> str:
        """The section of the engine's own keys, for a strategy."""
        return self.fsdp if strategy in FSDP else f"{self.section}.{SECTIONS.get(strategy, strategy)}"

    @property
    def optim(self) -> str:
        return f"{self.section}.optim"


_ACTOR = "actor_rollout_ref.actor"
ACTOR = Role(name="actor", section=_ACTOR, model="actor_rollout_ref.model", fsdp=f"{_ACTOR}.fsdp_config")
REF = Role(
    name="ref",
    section="actor_rollout_ref.ref",
    model="actor_rollout_ref.model",
    fsdp="actor_rollout_ref.ref.fsdp_config",
    trains=False,
)
CRITIC = Role(name="critic", section="critic", model="critic.model", fsdp="critic.fsdp")


def strategy(settings: Settings, role: Role) -> str:
    """`actor.strategy`, which verl writes over the one of the engine's own section."""
    return settings.text(f"{role.section}.strategy") or "fsdp"


def world(settings: Settings) -> int:
    """GPUs of the trainer."""
    return settings.count("trainer.nnodes") * settings.count("trainer.n_gpus_per_node")


def sequence_ranks(settings: Settings, role: Role) -> tuple[int, str]:
    """Ranks that share the tokens of one micro-batch (Ulysses, or Megatron's context parallelism), and the key.

    verl multiplies a token budget by it (`forward_backward_batch` of each engine). For FSDP the role's own value wins
    where it is above 1.
    """
    name = strategy(settings, role)
    section = role.engine(name)
    keys = {
        "megatron": (f"{section}.context_parallel_size",),
        "veomni": (f"{section}.ulysses_parallel_size",),
        "torchtitan": (f"{section}.context_parallel_size",),
    }.get(name, (f"{role.section}.ulysses_sequence_parallel_size", f"{section}.ulysses_sequence_parallel_size"))
    values = [(settings.integer(key) or 1, key) for key in keys]
    return next(((value, key) for value, key in values if value > 1), values[0])
