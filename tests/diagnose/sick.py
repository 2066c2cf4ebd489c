"""Runs with a known ill, their rows written by hand, and what the orders say of them."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from flowledger.diagnose import balance, laws, shapes, waiting
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.kept import kept
from flowledger.diagnose.orders.walk import Diagnosis, diagnose
from flowledger.ledger.directory import Process, create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import Row, SpanRow, TensorRow
from flowledger.ledger.writer import Writer

S = 1_000_000_000
ORDER = ("pp", "dp", "cp", "sp", "tp")  # slowest first, as ranks are counted
WIDTH = {"float32": 4, "int64": 8, "bfloat16": 2}


def run(
    path: Path, ranks: Sequence[Sequence[Row]], *, mesh: Mapping[str, int] | None = None, device: str = "cpu", state: str = "closed",
    **manifest: Any,
) -> Path:  # fmt: skip
    """A run with a part for each rank, which stands on the mesh where its number says."""
    degrees = dict(mesh or {"dp": len(ranks)})
    made = create(path, Manifest(run=path.name, mesh=degrees, **manifest))
    places = [dict(zip(ORDER, at, strict=True)) for at in product(*(range(degrees.get(axis, 1)) for axis in ORDER))]
    for rank, rows in enumerate(ranks):
        part = made.part("actor", rank, coordinates=places[rank], device=device)
        process = Process(role="actor", rank=rank, host="node", pid=100 + rank, coordinates=places[rank], device=device,
                          monotonic_ns=0, wall_ns=1_700_000_000 * S)  # fmt: skip
        (part / "process.json").write_bytes(msgspec.json.encode(process))
        ink = Writer(part)
        for row in rows:
            row.rank = rank if row.rank is None else row.rank
            ink.put(row)
        ink.close()
    made.close(state)
    return path


DETECTORS = (laws, shapes, balance, waiting)


def told(path: Path, *, order: str | None = None, **more: Any) -> Diagnosis:
    """What the orders say of a run; `more`: what else is known (planned, limit, …). One order alone is walked without detectors,
    save those of shapes: its own tests are meant.
    """
    asked = DETECTORS if order is None else (shapes,) if order == "shape_mismatch" else ()
    with Ledger(path) as ledger:
        fresh = [finding for detector in asked for finding in detector.check(ledger)]
        return diagnose(Evidence(books=(ledger,), findings=(*fresh, *kept(ledger, fresh)), **more), order=order)


def first(met: Diagnosis) -> str | None:
    """`shape_mismatch.local`: the first step that fails."""
    return met.first[0].id if met.first and met.first[1].verdict == "fail" else None


def cause(met: Diagnosis) -> str:
    return met.cause[1].message if met.cause else ""


def verdict(met: Diagnosis, step: str) -> str:
    return next(answer.verdict for one, answer in met.steps if one.id == step)


def tensor(name: str, dims: str, local: Sequence[int], **columns: Any) -> TensorRow:
    """An access whose numbers agree with each other."""
    numel = 1
    for size in local:
        numel *= size
    kind = {"dtype": "int64", "stage": "update_actor", "step": 0, "access": "read", **columns}
    return TensorRow(
        tensor_name=name, dims=dims, local_shape=list(local), numel=numel, bytes=numel * WIDTH[kind["dtype"]], **kind
    )


def span(number: int, name: str, start: float, end: float | None, **columns: Any) -> SpanRow:
    """An interval in seconds; open without an end."""
    return SpanRow(
        id=number, event="begin" if end is None else "whole", name=name, start_ns=int(start * S), t_ns=int((start if end is None else end) * S),
        end_ns=None if end is None else int(end * S), **{"span_kind": "stage", "stage": name, **columns},
    )  # fmt: skip
