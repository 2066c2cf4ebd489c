"""The ranks of a job: where each stands on every axis, and what it has of layers, heads, experts and the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.axes import DENSE
from flowledger.flow.errors import BadInput
from flowledger.flow.layout import Layout
from flowledger.flow.mesh import Mesh
from flowledger.flow.rank_classes import spans
from flowledger.show import layout as ledger_layout
from flowledger.show.mesh import classes_of
from flowledger.show.page.book import Book

MOST_CELLS = 64  # ranks that are drawn one by one; more are drawn as classes
MOST_SQUARES = 4096  # ranks that are drawn at all, as small squares below their classes
AXES = ("pp", "dp", "cp", "sp", "tp", "edp", "ep", "etp")


def only_planned(book: Book) -> bool:
    """Whether this is a plan alone, and not a run of which nothing has been recorded yet."""
    return book.ledger.directory.manifest.level == "plan" or book.sources() == {"plan"}


def ranks(book: Book, step: int | None) -> tuple[dict[str, Any], dict[int, Sequence[int]]]:
    """(what is shown of the ranks, first rank of each cell -> its ranks).

    `size`; `axes`: (axis, degree, steps); `cells`: a rank each, or the ranks of a class in one block of the mesh.

    `known`: whether anything is said of ranks here. `steps` of an axis: how far apart its neighbours are, and how many.
    """
    made = _layout(book, step)
    on = made.on
    hosts = _hosts(book)
    groups = _groups(made)
    shown = {
        "known": on.size > 1 or bool(hosts) or only_planned(book),
        "size": on.size,
        "axes": [
            {"axis": axis, "degree": on.degree(axis), "steps": [list(step) for step in on.steps(axis)]}
            for axis in axes_of(on)
        ],
        "folded": on.etp is not None,
        "cells": [_cell(made, group, name, hosts) for name, group in groups],
        "classes": on.size > MOST_CELLS,
        "squares": on.size <= MOST_SQUARES,
    }
    return shown, {group[0]: group for _, group in groups}


def axes_of(on: Mesh) -> list[str]:
    """The axes that divide something; the way experts see the ranks only where experts are dealt."""
    dealt = on.degree("ep") > 1
    return [axis for axis in AXES if on.degree(axis) > 1 and (axis in DENSE or dealt)]


def _layout(book: Book, step: int | None) -> Layout:
    """What the manifest and the recording say; a model that does not fit its mesh leaves the mesh alone."""
    try:
        return ledger_layout.layout(book.ledger, ledger_layout.trained(book.ledger, step))
    except BadInput:
        return Layout(on=ledger_layout.mesh_of(book.ledger))


def _groups(made: Layout) -> list[tuple[str | None, Sequence[int]]]:
    """(class, ranks) of each cell, in the order of the first ranks. Many ranks: classes, cut along all axes but the longest."""
    on = made.on
    if on.size <= MOST_CELLS:
        return [(None, (rank,)) for rank in range(on.size)]
    classes = classes_of(made)
    axes = _apart(on, len(classes))
    found: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(classes):
        for rank in one.ranks(on):
            found.setdefault((number, *(on.at(rank, axis) for axis in axes)), []).append(rank)
    return sorted(((classes[key[0]].name, ranks) for key, ranks in found.items()), key=lambda cell: cell[1][0])


def _apart(on: Mesh, classes: int) -> list[str]:
    """The axes along which classes are cut: the short ones, as long as the cells stay few."""
    kept, cells = list[str](), classes
    for axis in sorted(DENSE, key=on.degree):
        if on.degree(axis) > 1 and cells * on.degree(axis) <= MOST_CELLS:
            kept.append(axis)
            cells *= on.degree(axis)
    return kept


def _cell(made: Layout, group: Sequence[int], name: str | None, hosts: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    """What these ranks have; `each`: every one of them has so many, but others than its neighbour."""
    on, first = made.on, group[0]
    at = {axis: sorted({on.at(rank, axis) for rank in group}) for axis in axes_of(on)}
    samples = made.samples_of(first)
    total = len(made.dealt) or made.samples

    def part(numbers: Sequence[int], axis: str) -> dict[str, Any] | None:
        alone = len(at.get(axis, (0,))) == 1
        return {"count": len(numbers), "which": spans(numbers) if alone else None} if numbers else None

    return {
        "first": first, "count": len(group), "ranks": spans(group), "name": name,
        "at": {axis: [places[0], spans(places)] for axis, places in at.items()},
        "layers": part(made.layers_of(first), "pp"), "heads": part(made.heads_of(first), "tp"),
        "kv_heads": part(made.kv_heads_of(first), "tp"), "experts": part(made.experts_of(first), "ep"),
        "samples": part(samples, "dp"), "share": len(samples) / total if total else None,
        "host": hosts[first][0] if first in hosts else None, "device": hosts[first][1] if first in hosts else None,
    }  # fmt: skip


def _hosts(book: Book) -> dict[int, tuple[str, str]]:
    """Rank -> (host, device) of the processes that recorded."""
    rows = book.seen("SELECT source, rank, host, device FROM processes WHERE rank IS NOT NULL ORDER BY process")
    return {row["rank"]: (row["host"], row["device"]) for row in rows}
