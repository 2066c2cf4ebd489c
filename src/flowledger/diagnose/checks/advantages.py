"""Advantages made again from the rewards, groups and values that were recorded, by the estimator that the manifest names.

Estimators that whiten over all tokens of a step can be made again up to that: advantages must lie on one rising line over
what they whiten. Formulas: docs/algorithms.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from flowledger.diagnose.checks.answers import Breach, answer, apart
from flowledger.diagnose.checks.sequences import Told, Trace, told
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SENTENCE = "advantages are those that the estimator makes of the recorded rewards"
EPSILON = 1e-6
FLAT = 1e-5  # rewards of a group that differ by less are equal but for rounding, which a division would blow up

Rewards = Sequence[float]


def check(ledger: Ledger) -> list[FindingRow]:
    """`advantages_wrong`."""
    data = told(ledger)
    estimator = data.setting("algorithm.advantage", "grpo")
    if not data.ours or estimator not in (*OF_GROUPS, *OF_TOKENS):
        needs = (f"an estimator that can be made again, of flowledger's own loop; this is {estimator}",)
        return [answer("advantages_wrong", SENTENCE, seen=0, needs=needs)]
    having = [one for one in data.samples.values() if one.advantage is not None]
    if not having:
        return [answer("advantages_wrong", SENTENCE, seen=0, needs=("advantages of samples: record.level = tensors",))]
    breaches = [*_of_groups(data, estimator), *_of_tokens(data, estimator)]
    return [
        answer(
            "advantages_wrong", f"{SENTENCE} ({estimator})", seen=len(having), breaches=breaches,
            cause="rewards of other samples, groups that are mixed, or advantages of another step or axis look like this",
            next_step="print reward, group_id and advantage of one step, and work one group out by hand",
        )
    ]  # fmt: skip


# ------------------------------------------------------------------ one number a sample


def _grpo(r: Rewards, *, norm: bool) -> Rewards:
    mean = fmean(r)
    std = (sum((x - mean) ** 2 for x in r) / (len(r) - 1)) ** 0.5
    return [(x - mean) / (std + EPSILON if norm else 1.0) for x in r]


def _rloo(r: Rewards, **_: bool) -> Rewards:
    return [(x - fmean(r)) * len(r) / (len(r) - 1) for x in r]


def _passk(r: Rewards, *, norm: bool) -> Rewards:
    best, second = sorted(r, reverse=True)[:2]
    std = (sum((x - fmean(r)) ** 2 for x in r) / (len(r) - 1)) ** 0.5
    first = max(range(len(r)), key=r.__getitem__)
    return [(best - second) / (std + EPSILON if norm else 1.0) if at == first else 0.0 for at in range(len(r))]


def _centred(r: Rewards, **_: bool) -> Rewards:
    return _grpo(r, norm=False)


# Estimator -> the advantages of a group; and whether they are whitened (or scaled) over the step afterwards.
OF_GROUPS: Mapping[str, tuple[Callable[..., Rewards], bool]] = {
    "grpo": (_grpo, False),
    "grpo_vectorized": (_grpo, False),
    "dr_grpo": (_centred, False),
    "rloo": (_rloo, False),
    "rloo_vectorized": (_rloo, False),
    "grpo_passk": (_passk, False),
    "reinforce_plus_plus_baseline": (_centred, True),
    "gpg": (_centred, True),
}


def _of_groups(data: Told, estimator: str) -> Iterator[Breach]:
    if estimator not in OF_GROUPS:
        return
    formula, scaled = OF_GROUPS[estimator]
    norm = bool(data.setting("algorithm.norm_by_std", True))
    by_step: dict[int, list[tuple[str, float, float]]] = {}
    for (step, group), members in _groups(data).items():
        rewards = [reward for _, reward, _ in members]
        if len(rewards) < 2 or max(rewards) - min(rewards) < FLAT * max(1.0, *map(abs, rewards)):
            continue
        due = formula(rewards, norm=norm)
        for (sample, _, advantage), expected in zip(members, due, strict=True):
            by_step.setdefault(step, []).append((f"sample {sample} of group {group}", expected, advantage))
    for step, found in sorted(by_step.items()):
        if scaled:
            yield from _on_a_line(step, found)
            continue
        for what, expected, advantage in found:
            if apart(expected, advantage, absolute=2e-3, relative=2e-3):
                yield Breach(
                    step=step,
                    stage="advantage",
                    text=f"{what} has advantage {advantage:.4f}, its rewards give {expected:.4f}",
                )
                break


def _groups(data: Told) -> dict[tuple[int, str], list[tuple[str, float, float]]]:
    """(sample, reward, advantage) of each group that is known whole; samples that were dropped are in no statistics."""
    penalised = data.setting("algorithm.kl_in", "loss") == "reward" and data.setting("ref") is not None
    on_tokens = {
        (one.step, one.sample_id): sum(v or 0.0 for v in one["reward"]) for one in data.sequences if one.has("reward")
    }
    found: dict[tuple[int, str], list[tuple[str, float, float]]] = {}
    partly: set[tuple[int, str]] = set()
    for key, one in data.samples.items():
        if one.group_id is None or one.dropped_reason not in (None, "rejected"):
            continue
        reward = on_tokens.get(key) if penalised else on_tokens.get(key, one.reward)
        if reward is None or one.advantage is None or one.dropped_reason == "rejected":
            partly.add((one.step, one.group_id))
            continue
        found.setdefault((one.step, one.group_id), []).append((one.sample_id, reward, one.advantage))
    return {key: members for key, members in found.items() if key not in partly}


# ------------------------------------------------------------------ one number a token

OF_TOKENS = (
    *OF_GROUPS, "gdpo", "opo", "gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
PER_SAMPLE = (*OF_GROUPS, "gdpo", "opo")


def _of_tokens(data: Told, estimator: str) -> Iterator[Breach]:
    sequences = [one for one in data.sequences if one.has("advantage") and one.has("loss_mask")]
    if estimator in PER_SAMPLE:
        for one in sequences:
            yield from _spread(one, data)
    if estimator == "remax":
        yield from _constant_in_groups(sequences, data)
    if estimator in ("gae", "reinforce_plus_plus"):
        by_step: dict[int, list[tuple[str, float, float]]] = {}
        for one in sequences:
            due = _gae(one, data) if estimator == "gae" else _to_go(one, float(data.setting("algorithm.gamma", 1.0)))
            for at, expected in due.items():
                by_step.setdefault(one.step, []).append(
                    (f"sample {one.sample_id} position {one.positions[at]}", expected, one["advantage"][at])
                )
        for step, found in sorted(by_step.items()):
            yield from _on_a_line(step, found)
    yield from _returns(sequences, data, estimator)


def _spread(one: Trace, data: Told) -> Iterator[Breach]:
    """A sample's advantage stands on each of its tokens."""
    sample = data.samples.get((one.step, one.sample_id))
    if sample is None or sample.advantage is None:
        return
    for position, on, value in zip(one.positions, one["loss_mask"], one["advantage"], strict=True):
        if on and value is not None and apart(value, sample.advantage):
            yield Breach(
                step=one.step,
                stage="advantage",
                text=f"sample {one.sample_id} has advantage {sample.advantage:.4f}, its token at position {position} {value:.4f}",
            )
            return


def _own(one: Trace) -> list[int]:
    return [at for at, on in enumerate(one["loss_mask"]) if on]


def _to_go(one: Trace, gamma: float) -> dict[int, float]:
    """Place -> discounted reward from there on, over the tokens of the loss mask."""
    found, ahead = {}, 0.0
    for at in reversed(_own(one)):
        ahead = (one["reward"][at] or 0.0) + gamma * ahead
        found[at] = ahead
    return found


def _gae(one: Trace, data: Told) -> dict[int, float]:
    """Place -> A_t = δ_t + γλ A_t+1, δ_t = r_t + γ V_t+1 - V_t (arXiv 1506.02438); the next token is the next unmasked one."""
    gamma, lam = (float(data.setting(f"algorithm.{name}", 1.0)) for name in ("gamma", "lam"))
    found, ahead, value_ahead = {}, 0.0, 0.0
    for at in reversed(_own(one)):
        value = one["value"][at]
        if value is None:
            return {}
        ahead = (one["reward"][at] or 0.0) + gamma * value_ahead - value + gamma * lam * ahead
        value_ahead, found[at] = value, ahead
    return found


def _returns(sequences: Sequence[Trace], data: Told, estimator: str) -> Iterator[Breach]:
    """What the critic, or whoever looks, is told that a token is worth."""
    gamma = float(data.setting("algorithm.gamma", 1.0)) if estimator == "reinforce_plus_plus" else 1.0
    for one in sequences:
        if estimator == "gae":
            due = {at: value + one["value"][at] for at, value in _gae(one, data).items()}
        elif estimator in ("reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"):
            due = _to_go(one, gamma)
        else:
            due = {at: one["advantage"][at] for at in _own(one) if one["advantage"][at] is not None}
        for at, expected in sorted(due.items()):
            got = one["return"][at]
            if got is not None and apart(got, expected, absolute=1e-3, relative=1e-3):
                yield Breach(
                    step=one.step,
                    stage="advantage",
                    text=f"sample {one.sample_id} position {one.positions[at]} has return {got:.4f}, its rewards give {expected:.4f}",
                )
                break


def _constant_in_groups(sequences: Sequence[Trace], data: Told) -> Iterator[Breach]:
    """remax: return - advantage is the reward of the greedy response, one number a group."""
    baselines: dict[tuple[int, str], tuple[str, float]] = {}
    for one in sequences:
        sample = data.samples.get((one.step, one.sample_id))
        for at in _own(one):
            if sample is None or sample.group_id is None or one["return"][at] is None or one["advantage"][at] is None:
                continue
            baseline = one["return"][at] - one["advantage"][at]
            first, known = baselines.setdefault((one.step, sample.group_id), (one.sample_id, baseline))
            if apart(known, baseline):
                yield Breach(
                    step=one.step,
                    stage="advantage",
                    text=f"group {sample.group_id} has the baseline {known:.4f} in sample {first} and {baseline:.4f} in sample {one.sample_id}",
                )
                return


def _on_a_line(step: int, found: Sequence[tuple[str, float, float]]) -> Iterator[Breach]:
    """Whether got = slope * due + shift with a rising slope, by least squares: whitening leaves nothing else free."""
    due, got = [one[1] for one in found], [one[2] for one in found]
    x, y = fmean(due), fmean(got)
    spread = sum((one - x) ** 2 for one in due)
    if len(found) < 3 or spread < len(found) * FLAT**2:
        return
    slope = sum((a - x) * (b - y) for a, b in zip(due, got, strict=True)) / spread
    size = max(abs(one) for one in got)
    worst = max(found, key=lambda one: abs(one[2] - y - slope * (one[1] - x)))
    miss = abs(worst[2] - y - slope * (worst[1] - x))
    if slope <= 0 or miss > 2e-3 * (1 + size):
        expected = y + slope * (worst[1] - x)
        yield Breach(
            step=step,
            stage="advantage",
            text=f"{worst[0]} has advantage {worst[2]:.4f}; of what its rewards give, whitened as the others are, it would be {expected:.4f}"
            if slope > 0
            else f"advantages fall where the rewards that they are made of rise ({worst[0]})",
        )
