"""AReaL's strings of parallel degrees: `fsdp:d4t2c2`, `megatron:(attn:d1p12t4|ffn:d1p12e4)`, `sglang:d4t1p1`, and the older
`allocation_mode` of several parts (`sglang.d4p1t1+d4p1t1`, `sglang[rollout]:d4+fsdp[actor]:d4|fsdp[critic]:d4`).

Rules: areal 1.0.4, api/alloc_mode.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowledger.flow.errors import BadInput, nearest

SERVING, TRAINING = ("sglang", "vllm"), ("fsdp", "megatron", "archon")
PART = re.compile(r"(?P<backend>[a-z_]+)?(?:\[(?P<name>\w+)\]|\((?P<old>\w+)\))?[:.]?(?P<dims>(?:[a-z]\d+)+)")
MIXED = re.compile(r"(?P<backend>[a-z_]+)?[:.]?\(?attn:(?P<attn>(?:[a-z]\d+)+)\|ffn:(?P<ffn>(?:[a-z]\d+)+)\)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One model's backend and degrees. `beside`: the names it shares its devices with (`|`)."""

    backend: str
    name: str | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    beside: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """dp*tp*pp*cp; experts ride on the others."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def serves(self) -> bool:
        return self.backend in SERVING


def component(text: str, where: str) -> Allocation:
    """One part. A part without a backend is an older file's: FSDP, or Megatron where it has stages or experts.

    Raises BadInput, opened by `where`.
    """
    text = re.sub(r"\s", "", text)
    mixed = MIXED.fullmatch(text)
    if mixed:
        return _mixed(mixed["backend"] or "megatron", mixed["attn"], mixed["ffn"], where)
    match = PART.fullmatch(text)
    if not match:
        raise BadInput(f"{where}: {text!r} names no degrees; write backend:d4t2, such as fsdp:d4 or sglang:d4t1")
    degrees = _degrees(match["dims"], "dtpce", where)
    backend = match["backend"] or ("megatron" if degrees.get("p", 1) * degrees.get("e", 1) > 1 else "fsdp")
    if backend not in (*SERVING, *TRAINING):
        raise BadInput(f"{where}: no backend {backend!r}{nearest(backend, (*SERVING, *TRAINING))}")
    wrong = set(degrees) & set({"fsdp": "pe", "sglang": "ce", "vllm": "ce"}.get(backend, ""))
    if any(degrees[letter] > 1 for letter in wrong):
        raise BadInput(f"{where}: {backend} has no degree {', '.join(sorted(wrong))}; leave it out")
    return _checked(
        Allocation(
            backend=backend,
            name=match["name"] or match["old"],
            dp=degrees.get("d", 1),
            tp=degrees.get("t", 1),
            pp=degrees.get("p", 1),
            cp=degrees.get("c", 1),
            ep=degrees.get("e", 1),
        ),
        where,
    )


def parts(text: str, where: str) -> list[Allocation]:
    """All parts of an allocation_mode: `+` puts models on devices of their own, `|` on the same ones."""
    found: list[Allocation] = []
    for group in _split(text, "+"):
        shared = [component(one, where) for one in _split(group, "|")]
        names = [one.name or one.backend for one in shared]
        found += [
            replace(one, beside=tuple(name for name in names if name != (one.name or one.backend))) for one in shared
        ]
    return found


def _mixed(backend: str, attention: str, experts: str, where: str) -> Allocation:
    """Degrees of attention and of experts apart; both have the same stages and the same number of ranks."""
    attn, ffn = _degrees(attention, "dtpc", where), _degrees(experts, "dtpe", where)
    pp, ranks = attn.get("p", 1), 1
    for size in attn.values():
        ranks *= size
    if ffn.get("p", pp) != pp:
        raise BadInput(f"{where}: attention has {pp} stages, experts {ffn['p']}; give both p{pp}")
    ep, etp = ffn.get("e", 1), ffn.get("t", 1)
    if ranks % (ep * etp * pp):
        raise BadInput(f"{where}: {ranks} ranks of attention are not divisible by experts' e{ep}*t{etp}*p{pp}")
    dp = ffn.get("d", ranks // (ep * etp * pp))
    if dp * ep * etp * pp != ranks:
        raise BadInput(
            f"{where}: attention takes {ranks} ranks, experts {dp * ep * etp * pp}; use d{ranks // (ep * etp * pp)}"
        )
    return Allocation(
        backend=backend, dp=attn.get("d", 1), tp=attn.get("t", 1), pp=pp, cp=attn.get("c", 1), ep=ep, etp=etp
    )


def _checked(one: Allocation, where: str) -> Allocation:
    if one.ep > 1 and one.world % (one.pp * one.ep * one.etp):
        raise BadInput(f"{where}: {one.world} ranks are not divisible by p{one.pp}*e{one.ep}; use e1")
    return one


def _degrees(text: str, letters: str, where: str) -> dict[str, int]:
    found = {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", text)}
    wrong = [letter for letter, size in found.items() if letter not in letters or size < 1]
    if wrong:
        raise BadInput(f"{where}: {text!r}: a degree is one of {', '.join(letters)} and a number from 1")
    return found


def _split(text: str, mark: str) -> Iterator[str]:
    """At the marks that are not inside a pair of parentheses, nor between `attn` and `ffn`."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == mark and depth == 0 and not text[at + 1 :].startswith("ffn:"):
            yield text[start:at]
            start = at + 1
    yield text[start:]
