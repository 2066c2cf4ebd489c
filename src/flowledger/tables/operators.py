"""Operators of a decoder layer under sequence and context parallelism: the rows of `operators.toml`, checked.

Which point of a layer holds what, which operator runs on what its rank has, which communicates, how much, and whether that
can hide behind work. Expressions are text here; a plan evaluates them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Context = Literal["token", "blocks", "whole"]  # what the result for a token needs, see the table
Way = Literal["forward", "backward"]
WAYS: tuple[Way, ...] = ("forward", "backward")

# Aspect of a scheme -> (English, Chinese): the columns in which the schemes are set side by side.
ASPECTS: dict[str, tuple[str, str]] = {
    "purpose": ("what it is for", "目的"),
    "cuts": ("what it cuts", "切什么"),
    "communicates": ("where it communicates", "在哪里通信"),
    "mask": ("mask", "mask"),
    "positions": ("positions", "位置"),
    "kv": ("keys and values", "KV"),
    "weights": ("weights and gradients", "权重与梯度"),
    "limits": ("limits", "限制"),
}


# What keeps communication from hiding -> the same in Chinese; it takes the absence of all four.
FAILURES: dict[str, str] = {
    "does not split by chunk": "不能按分块切",
    "needs global context at once": "需一次拿到全局上下文",
    "cannot be pipelined": "不能流水化",
    "T_compute(chunk) < T_comm(chunk)": "T_compute(chunk) < T_comm(chunk)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to cut a layer's tokens, or its widths alone, over ranks."""

    name: str
    axis: str  # of the mesh
    title: str
    texts: Mapping[str, tuple[str, str]]  # aspect -> (English, Chinese)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place in a layer: the whole tensor there, and the piece of one rank."""

    name: str
    zh: str
    logical: str  # dims, separated by commas
    local: str
    needs: str = ""  # dense, moe: only where the model's layers are such; last: only on the last pipeline stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A step of the computation, and what it costs one rank in forward."""

    name: str
    zh: str
    rate: str  # matmul, attention: `work` is FLOP; memory: bytes read and written
    work: str
    per: str = "layer"  # or model
    backward: float = 2.0  # work in backward, in units of forward's
    chunks: bool = True  # a chunk of tokens can be computed without the others
    context: Context = "token"
    needs: str = ""  # dense, moe, and of a pipeline the stage: first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Collectives of one kind that an operator calls for in one direction."""

    kind: str  # comm_type
    bytes: str  # of all of them, as collectives are measured
    count: str = "1"
    piece: str = ""  # bytes that a rank sends for one piece of c tokens; empty: it is not cut
    waits: int = 0  # pieces that nothing hides


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What an operator sends under one scheme, and how it could be cut into pieces that hide behind work."""

    operator: str
    scheme: str  # or `any`
    when: str  # before, after, within
    why: str
    why_zh: str
    by: tuple[str, ...] = ()  # whose code sends it: megatron, torch, flowledger; empty: all
    group: str = ""  # an axis, or `heads`, `tokens`; empty: the scheme's axis
    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    chunks: bool = True
    context: Context = "token"
    pipelined: bool = True
    chunk: str = ""  # tokens of a piece; empty: it is not cut
    steps: str = "0"  # pieces that travel while another is worked on
    share: str = ""  # of the work that hides it: what a piece of c tokens has
    hidden_by: tuple[str, ...] = ()  # empty: the operator itself
    crossed: bool = False  # the work of another micro-batch, which goes the other way
    backward_work: float | None = None  # work that hides in backward, in units of forward's; None: the operator's
    done_by: str = ""  # implementations that cut it so
    always: tuple[str, ...] = ()  # directions in which that needs no setting
    always_by: tuple[str, ...] = ()  # for whose code; empty: all of `by`
    asked_of: tuple[str, ...] = ()  # whose code does so with a setting
    again: tuple[str, ...] = ()  # whose recomputation sends forward's messages once more; empty: all of `by`


def schemes() -> tuple[Scheme, ...]:
    """The ways to cut a sequence, Megatron's first; last plain tp, which cuts none."""
    return tuple(_scheme(raw) for raw in _table()["scheme"])


def points() -> tuple[Point, ...]:
    """The points of a layer, from its input to the log-probs."""
    return tuple(Point(**raw) for raw in _table()["point"])


def operators() -> tuple[Operator, ...]:
    """The operators in the order in which they run."""
    return tuple(Operator(**raw) for raw in _table()["operator"])


@cache
def communications() -> tuple[Communication, ...]:
    """Every message of the table. Its context and whether it splits are the operator's where the row does not say."""
    by_name = {one.name: one for one in operators()}
    rows = []
    for raw in _table()["communication"]:
        own = by_name[raw["operator"]]
        lists = {key: tuple(value) for key, value in raw.items() if isinstance(value, list)}
        messages = {way: tuple(Message(**one) for one in raw.get(way, ())) for way in WAYS}
        rows.append(Communication(**{"chunks": own.chunks, "context": own.context, **raw, **lists, **messages}))
    return tuple(rows)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.tables").joinpath("operators.toml").read_text(encoding="utf-8"))


def _scheme(raw: Mapping[str, str]) -> Scheme:
    texts = {aspect: (raw[aspect], raw[f"{aspect}_zh"]) for aspect in ASPECTS}
    return Scheme(name=raw["name"], axis=raw["axis"], title=raw["title"], texts=texts)
