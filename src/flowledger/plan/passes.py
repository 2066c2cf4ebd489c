"""One pass over samples of a rank, in micro-batches: how many there are, and how full the fullest is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.plan.lengths import Lengths
from flowledger.plan.packing import Expected, expected, worst_of

# plural -> singular, where more than an s is taken off
ONE = {"micro-batches": "micro-batch", "mini-batches": "mini-batch", "processes": "process"}


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes over `samples` of one rank. `micro`: samples of a static micro-batch; `budget`: tokens a GPU of a dynamic one."""

    name: str
    samples: int
    dynamic: bool
    micro: int | None
    budget: int | None
    tokens: int | None = None  # the budget of the whole sequence-parallel group, where it is known already


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One quantity of a pass; `keyed` where a key of the framework sets it."""

    quantity: str
    value: float
    unit: str
    arithmetic: str
    note: str = ""
    keyed: bool = False


def many(number: float, words: str) -> str:
    """`4 micro-batches`, `1 micro-batch`: a number with its word in the plural that is given."""
    return f"{number} {words if number != 1 else ONE.get(words, words.removesuffix('s'))}"


def tally(one: Pass, values: Mapping[str, Any], lengths: Lengths | None) -> Iterator[Tally]:
    """Static: samples and micro-batches. Dynamic: the token budget, micro-batches, and the worst of them."""
    if one.samples < 1:
        return
    if one.dynamic:
        yield from _dynamic(one, values, lengths)
    elif one.micro:
        yield from _static(one, values)


def _static(one: Pass, values: Mapping[str, Any]) -> Iterator[Tally]:
    micro = one.micro or one.samples
    count = -(-one.samples // micro)
    rest = f"{one.samples} is not divisible by {micro}" if one.samples % micro else ""
    yield Tally(
        quantity=f"{one.name}: micro-batch", value=micro, unit="samples", arithmetic="", keyed=True,
        note=f"up to {micro * values['longest']} tokens" if "longest" in values else "",
    )  # fmt: skip
    told = f"{many(one.samples, 'samples')} / {micro} = {many(count, 'micro-batches')}"
    yield Tally(quantity=f"{one.name}: micro-batches", value=count, unit="micro-batches", arithmetic=told, note=rest)


def _dynamic(one: Pass, values: Mapping[str, Any], lengths: Lengths | None) -> Iterator[Tally]:
    parts = values.get("budget_parts") or 1
    tokens = one.tokens or (one.budget * parts if one.budget else None)
    if not tokens or "longest" not in values:
        return
    told = f"{one.budget} tokens * {parts} = {tokens} tokens" if one.budget and parts > 1 else ""
    yield Tally(quantity=f"{one.name}: token budget", value=tokens, unit="tokens", arithmetic=told, keyed=True)
    if lengths is None:
        yield from _equal(one, tokens, values)
    else:
        yield from _drawn(one, tokens, values, lengths)


def _equal(one: Pass, tokens: int, values: Mapping[str, Any]) -> Iterator[Tally]:
    """Every sample as long as it may be: exact, whatever the scheme, but for the rounding of the last micro-batch."""
    longest, group = values["longest"], values.get("group") or 1
    each = tokens // longest
    balanced = values.get("scheme") == "balanced"
    count = -(-one.samples * longest // tokens) if balanced else -(-one.samples // max(1, each))
    count = min(one.samples, -(-count // group) * group)
    worst = -(-one.samples // count) * longest
    if balanced and group == 1:
        worst = worst_of(one.samples, budget=tokens, longest=longest, shortest=longest, mean=longest)
        told = f"ceil({many(one.samples, 'samples')} * {longest} tokens / {tokens}) = {many(count, 'micro-batches')}"
    else:
        told = (
            f"{many(one.samples, 'samples')}, {max(1, each)} of {longest} tokens to a micro-batch: "
            f"{many(count, 'micro-batches')}"
        )
    yield Tally(quantity=f"{one.name}: micro-batches", value=count, unit="micro-batches", arithmetic=told)
    full = min(tokens, one.samples * longest)
    told = f"{many(worst // longest, 'samples')} * {longest} tokens = {worst} tokens"
    if full > worst:  # equally long samples leave a rest; mixed ones fill it
        told = f"filled to the budget by samples of mixed lengths ({told} where all are equally long)"
    yield _worst(one, max(worst, full), tokens, told, "")


def _drawn(one: Pass, tokens: int, values: Mapping[str, Any], lengths: Lengths) -> Iterator[Tally]:
    found = drawn(one.samples, tokens, values, lengths)
    mean = lengths.mean(values.get("P") or 0)
    told = f"{one.samples} samples of {mean:.0f} tokens on average, drawn {found.draws} times: "
    told += f"{found.micro_batches:.1f} on average, {found.most_micro_batches} at most"
    count = round(found.micro_batches)
    yield Tally(quantity=f"{one.name}: micro-batches", value=count, unit="micro-batches", arithmetic=told)
    seen = f"the fullest seen; {found.mean_worst_tokens:.0f} on average"
    yield _worst(one, found.worst_tokens, tokens, seen, f"at most {found.bound_tokens} for the lengths drawn")


def _worst(one: Pass, worst: int, tokens: int, told: str, limit: str) -> Tally:
    over = f"exceeds the budget of {tokens} by {worst - tokens} tokens" if worst > tokens else ""
    note = "; ".join(part for part in (over, limit) if part)
    return Tally(quantity=f"{one.name}: worst micro-batch", value=worst, unit="tokens", arithmetic=told, note=note)


def drawn(samples: int, tokens: int, values: Mapping[str, Any], lengths: Lengths) -> Expected:
    """Packing of `samples` samples a rank with lengths drawn from these statistics, as the framework packs them."""
    prompt, response = values.get("P") or 0, values.get("R") or 0
    return expected(
        lengths,
        scheme=str(values.get("scheme") or "capped"),
        budget=tokens,
        samples=samples,
        ranks=values.get("dp") or 1,
        prompt_tokens=prompt,
        limit=max(1, prompt + response),
        group=values.get("group") or 1,
    )
