"""What alarms ask of earlier steps, in PromQL: ranges of so many times a step, looked at once a step.

A step in Prometheus is the median step of the run. Where steps take unequally long a window holds a step more or less, which a
median, an extreme or a mean over it hardly notices; what rises is asked of the changes themselves.
"""

from collections.abc import Callable, Mapping

from flowledger.diagnose.alarms.functions import LEAST, SHARE, TO_SIGMA, WARM_UP, WINDOW

STEP_S = 60.0  # where the run does not say how long a step takes
Said = Callable[[str, int, float], str]  # (a number in PromQL, how many steps, seconds of a step) -> PromQL


class Untold(Exception):  # noqa: N818  (it is an answer: why an alarm is not exported)
    """Why an expression cannot be said in PromQL."""


def during(steps: float, step_s: float) -> str:
    """So many steps as a duration of Prometheus."""
    seconds = steps * step_s
    return f"{seconds:.0f}s" if seconds >= 10 else f"{max(seconds * 1000, 1):.0f}ms"


def _range(x: str, steps: int, step_s: float, ago: int = 0) -> str:
    """The numbers of so many steps, one a step; `ago`: up to so many steps before now."""
    offset = f" offset {during(ago, step_s)}" if ago else ""
    return f"({x})[{during(steps, step_s)}:{during(1, step_s)}]{offset}"


def _over(function: str) -> Said:
    return lambda x, steps, step_s: f"{function}_over_time({_range(x, steps, step_s)})"


def _median(x: str, steps: int, step_s: float, ago: int = 0) -> str:
    return f"quantile_over_time(0.5, {_range(x, steps, step_s, ago)})"


def _mad(x: str, steps: int, step_s: float, ago: int = 0) -> str:
    """The distances are those to the median at each step, which moves little."""
    return _median(f"abs({x} - on(run) {_median(x, steps, step_s)})", steps, step_s, ago)


def _prev(x: str, steps: int, step_s: float) -> str:
    return f"last_over_time({_range(x, 1, step_s, steps)})"


def _slope(x: str, steps: int, step_s: float) -> str:
    return f"(deriv({_range(x, steps, step_s)}) * {step_s:.10g})"


def _usual(x: str, _: int, step_s: float) -> str:
    """Unknown before there are as many numbers as a history needs."""
    there = f"count_over_time({_range(x, WINDOW, step_s, 1)}) >= {LEAST + WARM_UP}"
    return f"({_median(x, WINDOW, step_s, 1)} and {there})"


def _spread(x: str, _: int, step_s: float) -> str:
    """σ by the MAD, at least a tenth of the median."""
    sigma, least = f"({TO_SIGMA} * {_mad(x, WINDOW, step_s, 1)})", f"({SHARE} * abs({_median(x, WINDOW, step_s, 1)}))"
    return f"({sigma} >= on(run) {least} or on(run) {least})"


def _rising(x: str, steps: int, step_s: float) -> str:
    """Never less than before and so many changes: steps need not be equally long."""
    window = f"({x})[{during(steps + 1, step_s)}:]"
    return f"(resets({window}) == 0 and changes({window}) >= {steps})"


def _falling(x: str, steps: int, step_s: float) -> str:
    return _rising(f"-({x})", steps, step_s)


def _steady(x: str, steps: int, step_s: float) -> str:
    return f"changes({_range(x, steps, step_s)}) == 0"


HISTORY: Mapping[str, Said] = {
    "prev": _prev, "mean": _over("avg"), "median": _median, "mad": _mad, "low": _over("min"), "high": _over("max"), "slope": _slope,
    "usual": _usual, "spread": _spread,
}  # fmt: skip
RISES: Mapping[str, Said] = {"rising": _rising, "falling": _falling, "steady": _steady}  # conditions
