"""How long samples are: the statistics that a plan of dynamic batching stands on.

A distribution is a monotone, piecewise-linear quantile function, so that `p50=512,p99=4096,max=8192` and a file of ten
thousand lengths are the same thing to its users. Lengths are tokens.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from flowledger.flow.errors import BadInput, nearest

MOST_POINTS = 2049  # of one quantile function; more data are thinned to these ranks
NAMED = {"min": 0.0, "median": 0.5, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """(share, tokens) in order, from share 0 to share 1; both rise."""

    points: tuple[tuple[float, float], ...]

    def at(self, shares: Sequence[float]) -> list[float]:
        """For each share, the tokens that this part of the samples does not exceed."""
        known = [point[0] for point in self.points]
        found = []
        for share in shares:
            right = min(max(bisect_right(known, share), 1), len(known) - 1)
            (left_share, left), (right_share, value) = self.points[right - 1], self.points[right]
            part = (min(share, right_share) - left_share) / (right_share - left_share)
            found.append(left + (value - left) * part)
        return found

    @property
    def mean(self) -> float:
        """The integral of the quantile function: tokens of the average sample."""
        return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(self.points))

    @property
    def shortest(self) -> int:
        return int(self.points[0][1])

    @property
    def longest(self) -> int:
        return int(-(-self.points[-1][1] // 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of responses and, where known, of prompts. Without prompts every prompt counts as long as it may be."""

    response: Quantiles
    prompt: Quantiles | None = None
    source: str  # the specification, file or run it came from
    rows: int | None = None  # samples it was made of; null: none, quantiles were given

    def longest(self, prompt_tokens: int) -> int:
        """The longest sample, prompt and response; `prompt_tokens` is the most that a prompt may have."""
        return self.response.longest + (min(self.prompt.longest, prompt_tokens) if self.prompt else prompt_tokens)

    def shortest(self, prompt_tokens: int) -> int:
        return max(1, self.response.shortest + (self.prompt.shortest if self.prompt else prompt_tokens))

    def mean(self, prompt_tokens: int) -> float:
        return self.response.mean + (min(self.prompt.mean, prompt_tokens) if self.prompt else prompt_tokens)

    def sample(self, count: int, *, prompt_tokens: int, limit: int, random: Random) -> list[int]:
        """`count` samples' tokens, each at least 1 and at most `limit`; prompt and response are drawn independently."""
        prompts = [float(prompt_tokens)] * count
        if self.prompt:
            prompts = [min(p, prompt_tokens) for p in self.prompt.at([random.random() for _ in range(count)])]
        responses = self.response.at([random.random() for _ in range(count)])
        return [max(1, min(limit, round(p + r))) for p, r in zip(prompts, responses, strict=True)]


def parse(text: str) -> Lengths:
    """`p50=512,p99=4096,max=8192`, with `prompt_p50=…` for prompts. Where no minimum is given it is 1 token.

    Raises BadInput for an unknown name, a number that is none, quantiles that fall, or no maximum.
    """
    given: dict[str, dict[float, float]] = {"": {}, "prompt_": {}}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign:
            raise BadInput(f"--lengths {text!r}: {part.strip()!r} is no NAME=TOKENS; use p50=512,p99=4096,max=8192")
        of = "prompt_" if name.startswith("prompt_") else ""
        share = _share(name.removeprefix("prompt_"), text)
        given[of][share] = _tokens(name, value, text)
    if not given[""]:
        raise BadInput(f"--lengths {text!r}: no response length; use p50=512,p99=4096,max=8192")
    prompt = _checked(given["prompt_"], text, "prompt_") if given["prompt_"] else None
    return Lengths(response=_checked(given[""], text, ""), prompt=prompt, source=text)


def of_samples(responses: Sequence[float], prompts: Sequence[float] | None, source: str) -> Lengths:
    """Lengths that were measured. Raises BadInput where there are none, or one is negative."""
    if not responses:
        raise BadInput(f"{source}: no response lengths")
    if min(responses) < 0 or (prompts and min(prompts) < 0):
        raise BadInput(f"{source}: a length is negative")
    return Lengths(
        response=_of_data(responses),
        prompt=_of_data(prompts) if prompts else None,
        source=source,
        rows=len(responses),
    )


def _of_data(values: Sequence[float]) -> Quantiles:
    ordered = sorted(values)
    last = len(ordered) - 1
    if last == 0:
        return Quantiles(((0.0, float(ordered[0])), (1.0, float(ordered[0]))))
    step = max(1.0, last / (MOST_POINTS - 1))
    ranks = sorted({min(last, round(n * step)) for n in range(min(last + 1, MOST_POINTS))} | {0, last})
    return Quantiles(tuple((rank / last, float(ordered[rank])) for rank in ranks))


def _share(name: str, text: str) -> float:
    if name in NAMED:
        return NAMED[name]
    try:
        share = float(name.removeprefix("p")) / 100 if name.startswith("p") else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        hint = nearest(name, [*NAMED, "p50", "p90", "p95", "p99"])
        raise BadInput(f"--lengths {text!r}: {name!r} is no quantile; use min, p50, p99 or max{hint}")
    return share


def _tokens(name: str, value: str, text: str) -> float:
    try:
        tokens = float(value)
    except ValueError:
        tokens = -1.0
    if not 0 <= tokens < 10**9:
        raise BadInput(f"--lengths {text!r}: {name} = {value!r} is no number of tokens")
    return tokens


def _checked(points: Mapping[float, float], text: str, of: str) -> Quantiles:
    if 1.0 not in points:
        raise BadInput(f"--lengths {text!r}: {of}max is missing; add {of}max=TOKENS")
    low = min(1.0, min(points.values()))
    ordered = sorted({0.0: low, **points}.items())
    for (left, low), (right, high) in pairwise(ordered):
        if high < low:
            raise BadInput(
                f"--lengths {text!r}: {of}p{100 * right:g} = {high:g} is less than {of}p{100 * left:g} = {low:g}; "
                "quantiles rise"
            )
    return Quantiles(tuple(ordered))
