"""What the flow says, as tables beside the rows, so that a view can join the two."""

from collections.abc import Mapping
from typing import Any

import duckdb

from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors

TABLES = {
    "flow_stages": (
        "stage VARCHAR, position BIGINT, stage_role VARCHAR, stage_mesh VARCHAR, purpose VARCHAR, purpose_zh VARCHAR"
    ),
    "flow_tensors": (
        "tensor_name VARCHAR, position BIGINT, flow_kind VARCHAR, flow_mask VARCHAR, producer VARCHAR, "
        "readers VARCHAR[], freed_by VARCHAR, also_freed_by VARCHAR[], flow_lifetime VARCHAR, flow_owner VARCHAR, "
        "common_bug VARCHAR, common_bug_zh VARCHAR"
    ),
    "flow_forms": (
        "tensor_name VARCHAR, dims VARCHAR, form VARCHAR, flow_padding VARCHAR, flow_broadcast VARCHAR, "
        "made_from VARCHAR"
    ),
    "flow_kinds": "kind VARCHAR, position BIGINT",
    "bindings": "symbol VARCHAR, size BIGINT",
}


def load(connection: duckdb.DuckDBPyConnection, bindings: Mapping[str, int]) -> None:
    """Create and fill the tables above."""
    content: dict[str, list[tuple[Any, ...]]] = {
        "flow_stages": [
            (row.name, place, row.role, row.reads_on or row.mesh, row.purpose, row.purpose_zh)  # what it counts, it reads
            for place, row in enumerate(stages().values())
        ],
        "flow_tensors": [
            (row.name, place, row.kind, row.mask, row.producer, list(row.readers), row.freed_by,
             list(row.also_freed_by), row.lifetime,
             row.owner, row.common_bug, row.common_bug_zh)
            for place, row in enumerate(tensors().values())
        ],
        "flow_forms": [
            (row.name, form.shape.strip("[]"), form.name, form.padding, form.broadcast, form.source)
            for row in tensors().values()
            for form in (*row.forms, *row.foreign)
        ],
        "flow_kinds": [(kind, place) for place, kind in enumerate(KINDS)],
        "bindings": list(bindings.items()),
    }  # fmt: skip
    for table, types in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({types})")
        if rows := content[table]:
            marks = ", ".join("?" * len(rows[0]))
            values = ", ".join([f"({marks})"] * len(rows))
            connection.execute(f"INSERT INTO {table} VALUES {values}", [value for row in rows for value in row])
