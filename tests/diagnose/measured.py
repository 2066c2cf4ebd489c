"""Ledgers written by hand, for metrics that are recomputed from them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import Row, SpanRow
from flowledger.ledger.writer import Writer

CLIPS = {"policy_loss": "vanilla", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0, "kl_form": "k3"}


def book(
    path: Path,
    *ranks: Sequence[Row],
    config: dict[str, Any] | None = None,
    bindings: dict[str, int] | None = None,
    device: str = "cpu",
    framework: str = "flowledger",
) -> Ledger:
    """A run of one part a rank."""
    manifest = Manifest(
        run="hand", level="tokens", config=config or {}, bindings=bindings or {}, framework=framework,
        mesh={"dp": len(ranks)},
    )  # fmt: skip
    made = create(path, manifest)
    for rank, rows in enumerate(ranks):
        ink = Writer(made.part("actor", rank, device=device, coordinates={"dp": rank}))
        for row in rows:
            ink.put(row)
        ink.close()
    made.close()
    return Ledger(path)


def step_span(step: int, *, seconds: float, id: int = 1, ended: bool = True) -> SpanRow:
    """A step that began at `step` seconds."""
    start = step * 10**9
    end = start + int(seconds * 1e9) if ended else None
    return SpanRow(
        step=step, id=id, event="whole" if ended else "begin", name="step", span_kind="stage", start_ns=start,
        end_ns=end, t_ns=start,
    )  # fmt: skip


def stage_span(step: int, stage: str, start: float, end: float, *, id: int, **more: Any) -> SpanRow:
    """A stage, between seconds of the process's clock."""
    return SpanRow(
        step=step, stage=stage, id=id, event="whole", name=stage, span_kind=more.pop("span_kind", "stage"),
        start_ns=int(start * 1e9), end_ns=int(end * 1e9), t_ns=int(start * 1e9), **more,
    )  # fmt: skip


def close(found: dict[int, float], expected: Iterable[float], tolerance: float = 1e-9) -> bool:
    """Whether the numbers of the steps are these, in their order."""
    wanted = list(expected)
    return len(found) == len(wanted) and all(
        abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(found.values(), wanted, strict=True)
    )
