"""Logical shapes of tensors that are cut over ranks, put together from what every rank recorded of its own part.

One rank cannot know the whole. The n-th access of one rank at a place belongs to the n-th of every other there; along
each dimension the parts of the ranks that differ in the cutting axes alone are added up.
"""

from collections.abc import Mapping, Sequence
from math import prod

import duckdb

from flowledger.flow.axes import DEGREES, DENSE
from flowledger.flow.mesh import Mesh, mesh
from flowledger.flow.stages import mesh_of, stages
from flowledger.flow.tensors import tensors

# What says that two accesses are the same one, seen by two ranks.
SAME = (
    "source", "step", "role", "stage", "phase", "tensor_name", "layer", "dims", "access", "epoch", "mini_batch",
    "micro_batch",
)  # fmt: skip


def meshes_of(degrees: Mapping[str, int]) -> dict[str, Mesh]:
    """The meshes of a job with these degrees: `train`, and `rollout`, where every rank samples a part of the prompts.

    Empty for a job of one process.
    """
    known = {axis: degree for axis, degree in degrees.items() if axis in DEGREES}
    size = prod(degree for axis, degree in known.items() if axis in DENSE)
    return {} if size == 1 else {"train": mesh(**known), "rollout": mesh(dp=size)}


def assemble(connection: duckdb.DuckDBPyConnection, degrees: Mapping[str, int]) -> None:
    """Fill `tensors.logical_shape` where it was left open. Does nothing for a job of one process."""
    meshes = meshes_of(degrees)
    if not meshes:
        return
    _load_lines(connection, meshes)
    same = ", ".join(SAME)
    connection.execute(f"""
        CREATE TEMP TABLE parts AS
        SELECT process, seq, rank, local_shape, coalesce(array_to_string(placement, ';'), '') AS cut, lies_on,
            concat_ws('|', {", ".join(f"coalesce({name}::VARCHAR, '')" for name in SAME)},
                row_number() OVER (PARTITION BY process, {same} ORDER BY seq)) AS access_key
        FROM tensors LEFT JOIN lies USING (tensor_name, stage, access)
        WHERE logical_shape IS NULL AND local_shape IS NOT NULL AND rank IS NOT NULL AND source <> 'plan';
        CREATE TEMP TABLE wholes AS
        WITH dims AS (SELECT access_key, rank, cut, lies_on, local_shape, unnest(range(1, len(local_shape) + 1)) AS dim FROM parts),
        sizes AS (
            SELECT access_key, dims.dim, local_shape[dims.dim] AS size, beside, parts_of_dim,
                first_value(beside) OVER (PARTITION BY access_key, dims.dim ORDER BY dims.rank) AS first_beside
            FROM dims JOIN lines ON lines.cut = dims.cut AND lines.lies_on = dims.lies_on AND lines.dim = dims.dim AND lines.rank = dims.rank),
        totals AS (
            SELECT access_key, dim, (CASE WHEN max(parts_of_dim) = 1 THEN max(size)  -- each rank may pad to its own longest
                ELSE sum(size) FILTER (beside = first_beside) END)::BIGINT AS total
            FROM sizes GROUP BY access_key, dim HAVING count(*) FILTER (beside = first_beside) = any_value(parts_of_dim))
        SELECT access_key, list(total ORDER BY dim) AS logical_shape FROM totals GROUP BY access_key
        HAVING count(*) = (SELECT any_value(len(local_shape)) FROM parts WHERE parts.access_key = totals.access_key);
        UPDATE tensors SET logical_shape = wholes.logical_shape
        FROM parts JOIN wholes USING (access_key)
        WHERE tensors.process = parts.process AND tensors.seq = parts.seq AND tensors.logical_shape IS NULL;
        DROP TABLE parts; DROP TABLE wholes; DROP TABLE lines; DROP TABLE lies;
    """)


def _load_lines(connection: duckdb.DuckDBPyConnection, meshes: Mapping[str, Mesh]) -> None:
    """`lies`: the mesh of each tensor in each stage. `lines`: for a placement, dimension and rank, where else it stands."""
    lies = [
        (name, stage, access, mesh_of(name, stage, access))
        for name in tensors()
        for stage in stages()
        for access in ("read", "write")
    ]
    _table(connection, "lies", dict.fromkeys(("tensor_name", "stage", "access", "lies_on"), "VARCHAR"), lies)
    found = connection.execute(
        "SELECT DISTINCT coalesce(array_to_string(placement, ';'), ''), lies_on, len(local_shape) FROM tensors "
        "JOIN lies USING (tensor_name, stage, access) WHERE logical_shape IS NULL AND local_shape IS NOT NULL"
    ).fetchall()
    lines = {
        (cut, name, dim + 1, rank, *_beside(cut, dim, meshes[name], rank))
        for cut, name, dims in found
        for dim in range(dims)
        for rank in range(meshes[name].size)
    }
    types = {
        "cut": "VARCHAR", "lies_on": "VARCHAR", "dim": "BIGINT", "rank": "BIGINT", "beside": "VARCHAR",
        "parts_of_dim": "BIGINT",
    }  # fmt: skip
    _table(connection, "lines", types, sorted(lines))


def _table(
    connection: duckdb.DuckDBPyConnection, name: str, types: Mapping[str, str], rows: Sequence[tuple[object, ...]]
) -> None:
    """A table of these rows, column by column: row by row takes a hundred times as long."""
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in types]
    listed = ", ".join(f"unnest(?::{kind}[]) AS {column}" for column, kind in types.items())
    connection.execute(f"CREATE TEMP TABLE {name} AS SELECT {listed}", columns)


def _beside(cut: str, dim: int, on: Mesh, rank: int) -> tuple[str, int]:
    """The first of the ranks that differ along the axes alone that cut this dimension, and how many they are."""
    cutting = {axis for axis, _, text in (one.partition(": ") for one in cut.split(";")) if text == f"Shard({dim})"}
    return str(on.beside(rank, cutting)), prod(on.degree(axis) for axis in cutting)
