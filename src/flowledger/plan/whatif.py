"""What if: one configuration beside another, single changes ranked by what they save, and the largest value that fits.

Changes are made on the RunConfig itself (`changed`), so that they mean the same for every framework; tables/advice.toml
says what each is called there and what it costs.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.config.schema import RunConfig
from flowledger.flow.stages import stages
from flowledger.plan.plan import Plan
from flowledger.plan.roles import longest

MOST_CHANGES = 4  # of a combination: beyond that another parallelism is the better answer
MOST_TOKENS = 2**22  # nobody asks for more in one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One knob: where it stands in a RunConfig, what it becomes, what it costs, and its name in each framework."""

    id: str
    stage: str  # whose work it is a part of
    path: str  # dotted, of RunConfig
    to: Any = None  # the new value; or
    times: float | None = None  # the old one times this
    when: tuple[
        tuple[str, tuple[Any, ...]], ...
    ] = ()  # (path, values): each must hold now for the change to mean something
    costs: str
    costs_zh: str
    keys: tuple[tuple[str, str], ...] = ()  # (framework, its key)


@dataclass(frozen=True, slots=True)
class Advice:
    """A change with what it saves at the peak of the whole step, in bytes of one rank."""

    id: str
    key: str
    before: Any
    after: Any
    saves: int
    peak_stage: str
    fits: bool | None
    costs: str
    costs_zh: str


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of a knob with which every stage fits."""

    what: str
    key: str
    now: int
    largest: int | None
    limited_by: str  # the stage that stops it


def advise(plan: Plan) -> list[Advice]:
    """Single changes that lower the peak, the most saving first; where a stage that trains does not fit, its own before others'."""
    found: list[tuple[bool, Advice]] = []
    for change in changes():
        config = applied(change, plan.config)
        if config is None:
            continue
        other = with_config(plan, config)
        saved = _need(plan) - _need(other)
        if saved > 0:
            before, after = value_at(plan.config, change.path), value_at(config, change.path)
            one = Advice(
                change.id, key_of(change, plan.config), before, after, saved, other.worst.stage, other.fits, change.costs, change.costs_zh
            )  # fmt: skip
            found.append((_is_elsewhere(change, plan), one))
    return [one for _, one in sorted(found, key=lambda pair: (pair[0], -pair[1].saves))]


def _is_elsewhere(change: Change, plan: Plan) -> bool:
    """Whether a change is part of another stage's work than the training that does not fit."""
    over = (plan.worst.free or 0) < 0 and _trains(plan.worst.stage)
    return over and not _trains(change.stage)


def _trains(stage: str) -> bool:
    return "backward" in stages()[stage].phases


def together(plan: Plan, advice: Sequence[Advice]) -> list[Advice]:
    """Changes one upon another, each time the one that saves most, until the plan fits; empty where one alone is enough.

    What a single change saves is lost where another stage is then the fullest: only together do they help. `advice`: the
    single changes of this plan.
    """
    taken: list[Advice] = []
    while len(taken) < MOST_CHANGES and not plan.fits:
        left = (one for one in advice if one.id not in {before.id for before in taken})
        best = max(left, key=lambda one: one.saves, default=None)
        if best is None:
            break
        change = next(one for one in changes() if one.id == best.id)
        config = applied(change, plan.config)
        if config is None:
            break
        taken.append(best)
        plan = with_config(plan, config)
        advice = [] if plan.fits else advise(plan)
    return taken if len(taken) > 1 else []


def largest(plan: Plan) -> list[Largest]:
    """Token budget or micro-batch, and response length: the largest with which the plan still fits its device."""
    micro = plan.config.actor.micro_batch
    knobs = (
        [("token budget", "actor.micro_batch.max_tokens")]
        if micro.dynamic
        else [("micro-batch", "actor.micro_batch.samples")]
    )
    return [_largest(plan, what, path) for what, path in [*knobs, ("response length", "rollout.max_response_tokens")]]


def _largest(plan: Plan, what: str, path: str) -> Largest:
    now = int(value_at(plan.config, path))

    def fits(value: int) -> bool:
        return bool(with_config(plan, changed(plan.config, path, value)).fits)

    most, why = _most(plan, path)
    key = plan.config.source_of(path).partition("@")[0] or path
    best = bisect(fits, min(now, most))
    if best is not None and best >= most:
        return Largest(what, key, now, most, why)
    beyond = with_config(plan, changed(plan.config, path, (best or 0) + 1))
    return Largest(what, key, now, best, beyond.worst.stage)


def _most(plan: Plan, path: str) -> tuple[int, str]:
    """Beyond this a larger value means nothing or breaks a rule, and what says so."""
    config = plan.config
    work = next(one for one in plan.works if one.stage == "update_actor")
    samples = max(1, -(-config.mini_batch_samples // plan.dp(work)))
    if path.endswith("micro_batch.samples") and config.framework != "trl":  # there it makes the mini-batch
        return samples, "all samples of a rank's mini-batch"
    if path.endswith("micro_batch.max_tokens"):
        return samples * longest(config), "all tokens of a rank's mini-batch"
    limits = [(MOST_TOKENS, "nothing here")]
    if plan.architecture.max_positions:
        limits.append((plan.architecture.max_positions - config.data.max_prompt_tokens, "the model's positions"))
    if work.micro.dynamic and work.micro.max_tokens:
        limits.append(
            (work.micro.max_tokens - config.data.max_prompt_tokens, "the token budget, which must hold a sample")
        )
    return max(1, min(limits)[0]), min(limits)[1]


def bisect(fits: Callable[[int], bool], start: int) -> int | None:
    """The largest value that fits, where everything below one that fits does too; None where not even 1 does."""
    low, high = 0, max(1, start)
    while high <= MOST_TOKENS and fits(high):
        low, high = high, high * 2
    if high > MOST_TOKENS:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def compare(before: Plan, after: Plan) -> list[dict[str, Any]]:
    """Old and new side by side: each stage's peak on its worst rank class, on later steps."""
    old, new = _peaks(before), _peaks(after)
    return [
        {
            "stage": stage,
            "before": old.get(stage),
            "after": new.get(stage),
            "change": (new.get(stage) or 0) - (old.get(stage) or 0),
        }
        for stage in dict.fromkeys([*old, *new])
    ]


def _peaks(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in plan.memory:
        found[one.stage] = max(found.get(one.stage, 0), one.reserved, one.peak.bytes)
    return found


def _need(plan: Plan) -> int:
    return max(plan.worst.reserved, plan.worst.peak.bytes)


def with_config(plan: Plan, config: RunConfig) -> Plan:
    """The same plan of a changed configuration."""
    return replace(plan, reading=replace(plan.reading, config=config))


def applied(change: Change, config: RunConfig) -> RunConfig | None:
    """The configuration with a change made; None where it does not apply or changes nothing."""
    try:
        now = value_at(config, change.path)
        holds = all(value_at(config, path) in values for path, values in change.when)
    except AttributeError:
        return None
    if not holds or (change.times is not None and not isinstance(now, int | float)):
        return None
    to = type(now)(round(now * change.times, 9)) if change.times is not None else change.to  # 0.8 * 0.8 is 0.64
    return None if to == now or (change.times is not None and to == 0) else changed(config, change.path, to)


def value_at(section: Any, path: str) -> Any:
    """The value at a dotted path. Raises AttributeError where a section on the way is null."""
    for part in path.split("."):
        section = getattr(section, part)
    return section


def changed(config: RunConfig, path: str, value: Any) -> RunConfig:
    """A copy with one value replaced; sources stay."""

    def put(section: Any, parts: Sequence[str]) -> Any:
        inner = value if len(parts) == 1 else put(getattr(section, parts[0]), parts[1:])
        return section.model_copy(update={parts[0]: inner})

    copy: RunConfig = put(config, path.split("."))
    return copy


def key_of(change: Change, config: RunConfig) -> str:
    """What the knob is called in this framework."""
    return dict(change.keys).get(
        config.framework, f"({change.path}; no key of {config.framework} for it is known here)"
    )


@cache
def changes() -> tuple[Change, ...]:
    """Every row of tables/advice.toml."""
    text = files("flowledger.tables").joinpath("advice.toml").read_text(encoding="utf-8")
    return tuple(
        Change(
            **{
                **raw,
                "keys": tuple(raw.get("keys", {}).items()),
                "when": tuple((path, tuple(values)) for path, values in raw.get("when", {}).items()),
            }
        )
        for raw in tomllib.loads(text)["change"]
    )
