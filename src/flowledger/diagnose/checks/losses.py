"""The loss made again, token by token: ratio, clip, weight in the mini-batch, KL, and how its terms add up.

A token's share of the loss is loss_mat * weight. Where all shares are off by one factor the normaliser is wrong, and the
factor says which one was taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite

from flowledger.diagnose.checks.answers import Breach, answer, apart
from flowledger.diagnose.checks.sequences import TOKENS, Pass, Told, told
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

RATIO = "the ratio is exp(new - old) of the log-probs that the loss was given"
SHARE = "each token's loss is that of its ratio and advantage, clipped as the settings say"
NORMALISER = "each token weighs in the loss as loss_aggregation says, by the totals of its mini-batch"
BOUND = 20.0  # log ratios are clamped to this
SMALL = 1e-7  # losses below this say nothing about a factor


def check(ledger: Ledger) -> list[FindingRow]:
    """`ratio_wrong`, `loss_wrong` and `normaliser_wrong`."""
    data = told(ledger)
    name = data.setting("algorithm.policy_loss", "vanilla")
    checks = (("ratio_wrong", RATIO), ("loss_wrong", SHARE), ("normaliser_wrong", NORMALISER))
    lacks = () if data.passes else (TOKENS,)
    if not data.ours or name not in LOSSES:
        lacks = (f"a loss that can be made again, of flowledger's own loop; this is {name}",)
    if lacks:
        return [answer(one, text, seen=0, needs=lacks) for one, text in checks]
    loss = LOSSES[name]
    ratios = [breach for one in data.passes for breach in _ratios(one, loss)]
    factors = {key: _factors(parts, data, loss) for key, parts in _mini_batches(data.passes).items()}
    wrong = list(_wrong_losses(factors))
    scales = [] if wrong else list(_wrong_scales(factors, data))
    return [
        answer("ratio_wrong", RATIO, seen=len(data.passes), breaches=ratios, cause="old log-probs of other samples, or of the policy itself"),
        answer("loss_wrong", SHARE, seen=len(data.passes), breaches=wrong, cause="clip bounds that were swapped, another sign, or a weight that is not the mini-batch's"),
        answer(
            "normaliser_wrong", NORMALISER, seen=len(data.passes), breaches=scales,
            next_step="compare what divides the loss with the tokens of the mini-batch over all ranks",
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------ policy losses

Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One policy loss: of a token, from (ratio, advantage, new log-prob)."""

    of: Callable[[float, float, float, Settings], float]
    by_sequence: bool = False  # the ratio is one a response
    aggregation: str | None = None  # its own, whatever the settings say
    clips: bool = True


def _clip(ratio: float, s: Settings) -> float:
    return min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])


def _vanilla(ratio: float, a: float, _: float, s: Settings) -> float:
    upper = max(-a * ratio, -a * _clip(ratio, s))
    return min(-a * s["clip_dual"], upper) if a < 0 else upper


def _gspo(ratio: float, a: float, _: float, s: Settings) -> float:
    return max(-a * ratio, -a * _clip(ratio, s))


def _reinforce(_: float, a: float, new: float, __: Settings) -> float:
    return -a * new


def _cispo(ratio: float, a: float, new: float, s: Settings) -> float:
    return -_clip(ratio, s) * a * new


def _sapo(ratio: float, a: float, _: float, s: Settings) -> float:
    tau = s["sapo_tau_positive"] if a > 0 else s["sapo_tau_negative"]
    return -4.0 / tau / (1 + exp(-tau * (ratio - 1))) * a


LOSSES: Mapping[str, Loss] = {
    "vanilla": Loss(of=_vanilla),
    "gspo": Loss(of=_gspo, by_sequence=True),
    "gpg": Loss(of=_reinforce),
    "cispo": Loss(of=_cispo),
    "sapo": Loss(of=_sapo, aggregation="seq-mean-token-mean"),
}
DEFAULTS = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0, "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}


def _own(one: Pass) -> list[int]:
    needed = ("new_log_prob", "old_log_prob", "advantage", "ratio", "loss_share")
    return [
        at
        for at, on in enumerate(one["loss_mask"])
        if on and all(one[name][at] is not None and isfinite(one[name][at]) for name in needed)
    ]


def _ratios(one: Pass, loss: Loss) -> Iterator[Breach]:
    own = _own(one)
    logs = {at: one["new_log_prob"][at] - one["old_log_prob"][at] for at in own}
    mean = sum(logs.values()) / max(1, len(logs))
    for at in own:
        due = exp(min(mean, 10.0)) if loss.by_sequence else exp(max(-BOUND, min(BOUND, logs[at])))
        if apart(due, one["ratio"][at], absolute=1e-4, relative=1e-3):
            yield Breach(
                step=one.step, stage="update_actor",
                text=f"sample {one.sample_id} position {one.positions[at]}: ratio {one['ratio'][at]:.5f}, its log-probs give {due:.5f}",
            )  # fmt: skip
            return


# ------------------------------------------------------------------ weights

Key = tuple[int, int, int]  # step, epoch, mini-batch


def _mini_batches(passes: Sequence[Pass]) -> dict[Key, list[Pass]]:
    found: dict[Key, list[Pass]] = {}
    for one in passes:
        found.setdefault((one.step, one.epoch, one.mini_batch), []).append(one)
    return found


@dataclass(frozen=True, slots=True)
class Factor:
    """How many times too large a token's share of the loss is, and where it stands."""

    value: float
    place: str
    micro_batch: int


def _factors(parts: Sequence[Pass], data: Told, loss: Loss) -> list[Factor]:
    """Of each token whose share says something; empty where the totals of the mini-batch are not known."""
    totals = _totals(parts[0], data)
    if totals is None:
        return []
    settings = {name: float(data.setting(f"algorithm.{name}", value)) for name, value in DEFAULTS.items()}
    mode = loss.aggregation or data.setting("algorithm.loss_aggregation", "token-mean")
    found = []
    for one in parts:
        own = _own(one)
        each = weight(mode, len(own), totals, data)
        for at in own:
            made = loss.of(one["ratio"][at], one["advantage"][at], one["new_log_prob"][at], settings)
            made *= 1.0 if one["weight"][at] is None else one["weight"][at]
            due = made * each
            if abs(due) > SMALL:
                place = f"sample {one.sample_id} position {one.positions[at]}"
                found.append(Factor(one["loss_share"][at] / due, place, one.micro_batch))
    return found


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one mini-batch, over all ranks; and of the micro-batch that each of its samples is in."""

    tokens: int
    sequences: int
    by_micro_batch: Mapping[int, int]


def weight(mode: str, length: int, totals: Totals, data: Told) -> float:
    """What a token of a response of `length` tokens weighs, by loss_aggregation (docs/algorithms.md)."""
    horizon = int(data.setting("algorithm.loss_scale_factor") or data.setting("rollout.max_response_tokens", 1))
    match mode:
        case "token-mean":
            return 1 / max(totals.tokens, 1)
        case "token-sum":
            return 1.0
        case "seq-mean-token-sum":
            return 1 / max(totals.sequences, 1)
        case "seq-mean-token-sum-norm":
            return 1 / max(totals.sequences * horizon, 1)
    return 1 / max(totals.sequences, 1) / max(length, 1)


def _totals(one: Pass, data: Told) -> Totals | None:
    """What the mini-batch holds; None where some of its lengths are not known (environments, rejected tokens)."""
    if data.setting("algorithm.rollout_correction.rejections"):
        return None
    single = data.setting("rollout.environment") is None
    tokens, sequences, by_micro = 0, 0, dict[int, int]()
    for sample in data.of_step.get(one.step, ()):
        times = [t for t in sample.trained if t["epoch"] == one.epoch and t["mini_batch"] == one.mini_batch]
        if not times or sample.dropped_reason is not None:
            continue
        length = data.lengths.get((one.step, sample.sample_id), sample.response_length if single else None)
        if length is None:
            return None
        tokens, sequences = tokens + length, sequences + 1
        by_micro[times[0]["micro_batch"]] = by_micro.get(times[0]["micro_batch"], 0) + length
    return Totals(tokens, sequences, by_micro) if sequences else None


def _wrong_losses(factors: Mapping[Key, Sequence[Factor]]) -> Iterator[Breach]:
    """Where tokens of one micro-batch are off by different factors: no normaliser does that."""
    for (step, _, mini_batch), found in factors.items():
        by_micro: dict[int, list[Factor]] = {}
        for one in found:
            by_micro.setdefault(one.micro_batch, []).append(one)
        for micro, parts in by_micro.items():
            middle = sorted(parts, key=lambda one: one.value)[len(parts) // 2]
            odd = next((one for one in parts if apart(one.value, middle.value, absolute=5e-3, relative=5e-3)), None)
            if middle.value < 0:
                yield Breach(
                    step=step, stage="update_actor",
                    text=f"mini-batch {mini_batch} micro-batch {micro}: the loss of {middle.place} has the other sign",
                )  # fmt: skip
                break
            if odd is not None:
                yield Breach(
                    step=step, stage="update_actor",
                    text=f"mini-batch {mini_batch} micro-batch {micro}: the loss of {odd.place} is {odd.value:.4f} of what it "
                    f"must be, that of {middle.place} {middle.value:.4f}",
                )  # fmt: skip
                break


def _wrong_scales(factors: Mapping[Key, Sequence[Factor]], data: Told) -> Iterator[Breach]:
    for (step, epoch, mini_batch), found in factors.items():
        odd = next((one for one in found if apart(one.value, 1.0, absolute=5e-3, relative=5e-3)), None)
        if odd is None:
            continue
        pass_ = next(one for one in data.passes if (one.step, one.epoch, one.mini_batch) == (step, epoch, mini_batch))
        yield Breach(
            step=step, stage="update_actor",
            text=f"mini-batch {mini_batch}: the loss of {odd.place} is {odd.value:.4f} times what it must be"
            + _meaning(odd, _totals(pass_, data), data),
        )  # fmt: skip


def _meaning(odd: Factor, totals: Totals | None, data: Told) -> str:
    """Which other normaliser gives this factor."""
    if totals is None:
        return ""
    mesh, by_token = data.setting("mesh", {}), data.setting("algorithm.loss_aggregation", "token-mean") == "token-mean"
    ratio, own = totals.tokens / totals.sequences, totals.by_micro_batch.get(odd.micro_batch, 1)
    others = (
        {"it was divided by samples, not by tokens": ratio}
        if by_token
        else {"it was divided by tokens, not by samples": 1 / max(1.0, ratio)}
    )
    others |= {
        "its micro-batch was taken for the mini-batch": totals.tokens / max(1, own),
        "nothing was divided by": float(totals.tokens),
    }
    for axis in ("cp", "sp", "dp", "tp"):
        if (degree := mesh.get(axis) or 1) > 1:
            others[f"a divisor of {axis} = {degree} too many"] = 1 / degree
            others[f"a factor of {axis} = {degree} too many"] = float(degree)
    meant = (text for text, factor in others.items() if not apart(factor, odd.value, absolute=1e-2, relative=1e-2))
    return next((f": {text}" for text in meant), "")
