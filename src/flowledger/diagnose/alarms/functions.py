"""The functions that an alarm may call: a closed table. Those that look back keep what they need of earlier steps themselves.

A number that is not there, nan or inf enters no history; a function that lacks steps or ranks gives None, unknown.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from flowledger.diagnose.alarms.moments import Evaluated, Moment, Value

WINDOW = 24  # numbers that a run's own history has
WARM_UP = 1  # first numbers of a run that do not count: compilation, allocation, the first readings
LEAST = 3  # numbers from which on there is a history
EARLY = 5  # numbers that a run begins with
TO_SIGMA = 1.4826  # times the MAD of a normal distribution is its standard deviation
SHARE = 0.1  # of the median: a spread is never less, so that a number that was constant may move a little

# Noise floor of mean |rollout_log_prob - old_log_prob| by the dtype that a model computes in, in nats: float32 by measurement of
# the loop (1e-7), doubled ten times; half precision between two engines stays below 0.03 (miles' own test) on healthy runs.
NOISE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}


@dataclass(frozen=True, slots=True)
class Function:
    """One function. kinds of arguments: x an expression, k a number of steps, key a text, name a metric that ranks have."""

    usage: str
    takes: tuple[str, ...]
    make: Callable[..., Evaluated]
    means: str = ""
    means_zh: str = ""
    optional: int = 0  # how many of the last arguments may be left out
    many: bool = False  # the last argument may stand several times
    over: str | None = None  # a hidden function that keeps what several share
    looks: str = "now"  # now, back (earlier steps), ranks, facts

    @property
    def arguments(self) -> tuple[int, int]:
        """The least and the most."""
        return len(self.takes) - self.optional, 20 if self.many else len(self.takes)

    def kinds(self, count: int) -> list[str]:
        """The kind of each of so many arguments."""
        return [self.takes[min(at, len(self.takes) - 1)] for at in range(count)]


def number(value: Value) -> float | None:
    """A finite number, else None."""
    if value is None or isinstance(value, str) or not math.isfinite(value):
        return None
    return value


# ------------------------------------------------------------------------------------------------------------- now


def _of_one(apply: Callable[[float], Value]) -> Callable[[int], Evaluated]:
    def make(x: int) -> Evaluated:
        def run(values: list[Value], at: Moment) -> Value:
            value = values[x]
            return None if value is None or isinstance(value, str) else apply(value)

        return run

    return make


def _log(value: float) -> float | None:
    return math.log(value) if value > 0 else None


def _of_all(apply: Callable[[Sequence[Any]], Value]) -> Callable[..., Evaluated]:
    """Unknown where one argument is."""

    def make(*inner: int) -> Evaluated:
        def run(values: list[Value], at: Moment) -> Value:
            found = [values[one] for one in inner]
            for one in found:
                if one is None or isinstance(one, str):
                    return None
            return apply(found)

        return run

    return make


def _first(*inner: int) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        for one in inner:
            if values[one] is not None:
                return values[one]
        return None

    return run


def _count(*inner: int) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        found = [values[one] for one in inner]
        return None if all(one is None for one in found) else sum(1 for one in found if one)

    return run


# ------------------------------------------------------------------------------------------------------------ back


def _prev(x: int, k: int = 1) -> Evaluated:
    kept: deque[float] = deque(maxlen=k)

    def run(values: list[Value], at: Moment) -> Value:
        found = kept[0] if len(kept) == k else None
        if (value := number(values[x])) is not None:
            kept.append(value)
        return found

    return run


def _window(apply: Callable[[Sequence[float]], Value], more: int = 0) -> Callable[[int, int], Evaluated]:
    """Over the last k numbers (k + more), this step's with them; unknown before there are so many, and where this step has none."""

    def make(x: int, k: int) -> Evaluated:
        kept: deque[float] = deque(maxlen=k + more)

        def run(values: list[Value], at: Moment) -> Value:
            value = number(values[x])
            if value is None:
                return None
            kept.append(value)
            return apply(kept) if len(kept) == kept.maxlen else None

        return run

    return make


def _mad(kept: Sequence[float]) -> float:
    middle = median(kept)
    return median([abs(one - middle) for one in kept])


def slope(kept: Sequence[float]) -> float:
    """Least squares, per step: Σ (i - ī)(x - x̄) / Σ (i - ī)²."""
    if len(kept) < 2:
        return 0.0
    middle, mean = (len(kept) - 1) / 2, sum(kept) / len(kept)
    above = sum((at - middle) * (one - mean) for at, one in enumerate(kept))
    return above / sum((at - middle) ** 2 for at in range(len(kept)))


def _rises(kept: Sequence[float]) -> bool:
    return all(later > before for before, later in pairwise(kept))


def _falls(kept: Sequence[float]) -> bool:
    return all(later < before for before, later in pairwise(kept))


def _past(x: int) -> Evaluated:
    """The run's own history before this step, in order of size: the last WINDOW numbers after WARM_UP. For `usual` and `spread`."""
    order: deque[float] = deque()
    ranked: list[float] = []
    left, latest = [WARM_UP], [math.nan]

    def run(values: list[Value], at: Moment) -> Any:
        if latest[0] == latest[0]:  # of the step before
            order.append(latest[0])
            insort(ranked, latest[0])
            if len(order) > WINDOW:
                del ranked[bisect_left(ranked, order.popleft())]
        value = number(values[x])
        latest[0] = math.nan if value is None or left[0] else value
        if value is not None and left[0]:
            left[0] -= 1
        return ranked if len(ranked) >= LEAST else None

    return run


def _middle(ranked: Sequence[float]) -> float:
    half, odd = divmod(len(ranked), 2)
    return ranked[half] if odd else (ranked[half - 1] + ranked[half]) / 2


def _usual(past: int) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        ranked: Any = values[past]
        return None if ranked is None else _middle(ranked)

    return run


def _spread(past: int) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        ranked: Any = values[past]
        if ranked is None:
            return None
        half, middle = len(ranked) // 2, _middle(ranked)
        off = [middle - one for one in ranked[:half]] + [one - middle for one in ranked[half:]]
        off.sort()
        return max(TO_SIGMA * _middle(off), SHARE * abs(middle))

    return run


def _early(x: int) -> Evaluated:
    kept: list[float] = []
    left = [WARM_UP]

    def run(values: list[Value], at: Moment) -> Value:
        found = median(kept) if len(kept) == EARLY else None
        value = number(values[x])
        if value is not None and left[0]:
            left[0] -= 1
        elif value is not None and len(kept) < EARLY:
            kept.append(value)
        return found

    return run


# ----------------------------------------------------------------------------------------------------------- ranks


def _of_ranks(apply: Callable[[Sequence[float]], Value]) -> Callable[[str], Evaluated]:
    def make(name: str) -> Evaluated:
        def run(values: list[Value], at: Moment) -> Value:
            ranks = at.ranks.get(name)
            if not ranks or len(ranks) < 2:
                return None
            found = list(_finite(ranks).values())
            return apply(found) if len(found) > 1 else None

        return run

    return make


def _worst(name: str) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        ranks = _finite(at.ranks.get(name, {}))
        return max(ranks, key=ranks.__getitem__) if ranks else None

    return run


def _finite(ranks: Mapping[int, float]) -> Mapping[int, float]:
    """Those that are numbers; mostly all are, which their sum tells at once."""
    if math.isfinite(sum(ranks.values())):
        return ranks
    return {rank: one for rank, one in ranks.items() if math.isfinite(one)}


# ----------------------------------------------------------------------------------------------------------- facts


def _config(key: str, default: int | None = None) -> Evaluated:
    def run(values: list[Value], at: Moment) -> Value:
        found = at.facts.setting(key)
        return found if found is not None or default is None else values[default]

    return run


def _size(key: str) -> Evaluated:
    return lambda values, at: at.facts.sizes.get(key)


def _planned(key: str) -> Evaluated:
    return lambda values, at: at.facts.planned.get(key)


def _noise_floor() -> Evaluated:
    return lambda values, at: NOISE.get(str(at.facts.setting("model.dtype")))


FUNCTIONS: dict[str, Function] = {
    "abs": Function("abs(x)", ("x",), _of_one(abs), "|x|", "绝对值"),
    "log": Function("log(x)", ("x",), _of_one(_log), "natural logarithm", "自然对数"),
    "isnan": Function("isnan(x)", ("x",), _of_one(lambda value: not math.isfinite(value)), "x is nan or infinite", "x 为 nan 或无穷"),
    "min": Function("min(x, y, …)", ("x", "x"), _of_all(min), "the smallest", "最小者", many=True),
    "max": Function("max(x, y, …)", ("x", "x"), _of_all(max), "the largest", "最大者", many=True),
    "first": Function("first(x, y, …)", ("x", "x"), _first, "the first that is known", "第一个已知的", many=True),
    "count": Function("count(c, d, …)", ("x", "x"), _count, "how many conditions are true; unknown ones are not", "为真的条件数，未知的不计", many=True),
    "prev": Function("prev(x, k)", ("x", "k"), _prev, "x as it was k steps before (1)", "k 步之前的 x（默认 1）", optional=1, looks="back"),
    "mean": Function("mean(x, k)", ("x", "k"), _window(lambda kept: sum(kept) / len(kept)), "mean over the last k steps", "最近 k 步的均值", looks="back"),
    "median": Function("median(x, k)", ("x", "k"), _window(median), "median over the last k steps", "最近 k 步的中位数", looks="back"),
    "mad": Function("mad(x, k)", ("x", "k"), _window(_mad), "median absolute deviation over the last k steps", "最近 k 步的中位绝对偏差", looks="back"),
    "low": Function("low(x, k)", ("x", "k"), _window(min), "least of the last k steps", "最近 k 步的最小值", looks="back"),
    "high": Function("high(x, k)", ("x", "k"), _window(max), "most of the last k steps", "最近 k 步的最大值", looks="back"),
    "slope": Function("slope(x, k)", ("x", "k"), _window(slope), "change per step over the last k steps (least squares)", "最近 k 步每步的变化（最小二乘）", looks="back"),
    "rising": Function("rising(x, k)", ("x", "k"), _window(_rises, 1), "x has risen k times in a row", "x 连续上升 k 次", looks="back"),
    "falling": Function("falling(x, k)", ("x", "k"), _window(_falls, 1), "x has fallen k times in a row", "x 连续下降 k 次", looks="back"),
    "steady": Function("steady(x, k)", ("x", "k"), _window(lambda kept: len(set(kept)) == 1), "x was the same in the last k steps", "x 在最近 k 步不变", looks="back"),
    "fraction": Function("fraction(c, k)", ("x", "k"), _window(lambda kept: sum(map(bool, kept)) / len(kept)), "share of the last k steps in which c was true", "最近 k 步中 c 为真的比例", looks="back"),
    "usual": Function("usual(x)", ("x",), _usual, f"median of the run's own history: the last {WINDOW} steps before this one, the first of the run left out; unknown before there are {LEAST}", f"运行自身历史的中位数：本步之前的最近 {WINDOW} 步，不含运行的第一步；少于 {LEAST} 步时未知", over="past", looks="back"),
    "spread": Function("spread(x)", ("x",), _spread, f"of the same history, {TO_SIGMA} · MAD (σ of a normal distribution), at least a tenth of |usual(x)|", f"同一历史的 {TO_SIGMA} · MAD（正态分布的 σ），不小于 |usual(x)| 的十分之一", over="past", looks="back"),
    "early": Function("early(x)", ("x",), _early, f"median of steps 2 to {EARLY + 1} of the run", f"运行第 2 到 {EARLY + 1} 步的中位数", looks="back"),
    "ranks_max": Function("ranks_max(m)", ("name",), _of_ranks(max), "largest of the ranks; all ranks_… need two ranks", "各 rank 的最大值；ranks_… 都需要至少两个 rank", looks="ranks"),
    "ranks_min": Function("ranks_min(m)", ("name",), _of_ranks(min), "smallest of the ranks", "各 rank 的最小值", looks="ranks"),
    "ranks_mean": Function("ranks_mean(m)", ("name",), _of_ranks(lambda found: sum(found) / len(found)), "mean over the ranks", "各 rank 的均值", looks="ranks"),
    "ranks_median": Function("ranks_median(m)", ("name",), _of_ranks(median), "median over the ranks", "各 rank 的中位数", looks="ranks"),
    "ranks_others": Function("ranks_others(m)", ("name",), _of_ranks(lambda found: median(sorted(found)[:-1])), "median of all ranks but the largest", "除最大者外各 rank 的中位数", looks="ranks"),
    "ranks_spread": Function("ranks_spread(m)", ("name",), _of_ranks(lambda found: max(found) - min(found)), "largest minus smallest", "最大减最小", looks="ranks"),
    "worst": Function("worst(m)", ("name",), _worst, "the rank that has most", "最大值所在的 rank", looks="ranks"),
    "config": Function('config("key", x)', ("key", "x"), _config, "a setting of the run by its dotted key, else x", "运行的设置（点分键），没有时取 x", optional=1, looks="facts"),
    "size": Function('size("V")', ("key",), _size, "the size of a symbol", "符号的大小", looks="facts"),
    "planned": Function('planned("name")', ("key",), _planned, "the same number by the plan, where the run has one", "计划中的同一数值（若有计划）", looks="facts"),
    "noise_floor": Function("noise_floor()", (), _noise_floor, "nats that two computations of one log-prob may differ by, by model.dtype: " + ", ".join(f"{dtype} {nats:g}" for dtype, nats in NOISE.items()), "同一 log-prob 两次计算允许的差（nats），按 model.dtype", looks="facts"),
}  # fmt: skip
HIDDEN: dict[str, Function] = {"past": Function("past(x)", ("x",), _past, looks="back")}
