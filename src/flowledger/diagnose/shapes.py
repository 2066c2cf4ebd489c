"""What shapes say against each other: a mask against its tensor, and what was observed against what was configured."""

from flowledger.flow.dims import parse_shape
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow


def check(ledger: Ledger) -> list[FindingRow]:
    """One finding for each tensor and place where a shape is not what it must be; none when all are."""
    return [*broken_masks(ledger), *differing_from_configuration(ledger)]


def broken_masks(ledger: Ledger) -> list[FindingRow]:
    """Tensors whose recorded mask does not broadcast to them."""
    rows = ledger.rows(
        "SELECT stage, phase, tensor_name, local_shape, mask, mask_shape FROM shapes WHERE source <> 'plan' AND mask_fits = false"
    )
    return [
        FindingRow(
            id="mask_does_not_broadcast", verdict="fail", severity="error", stage=row["stage"], phase=row["phase"],
            message=f"{row['mask']} {row['mask_shape']} does not broadcast to {row['tensor_name']} {row['local_shape']}",
            next_step="compare the logical shapes of both where they are written",
        )
        for row in rows
    ]  # fmt: skip


def differing_from_configuration(ledger: Ledger) -> list[FindingRow]:
    """Tensors with a dimension that the configuration binds to another size than the one observed.

    Observed shapes come from tensors, bound sizes from configuration keys: only so can a dead setting show. Workers beside
    the ranks (agent loops, reward workers, engines) take samples as they come, and never a batch.
    """
    bindings = ledger.directory.manifest.bindings
    rows = ledger.rows(
        "SELECT DISTINCT stage, phase, tensor_name, dims, logical_shape FROM accesses "
        "WHERE source <> 'plan' AND dims IS NOT NULL AND logical_shape IS NOT NULL AND process NOT IN "
        "(SELECT process FROM processes WHERE rank IS NULL AND role <> 'driver') ORDER BY ALL"
    )
    found: dict[tuple[str, str | None, str, str], tuple[int, int]] = {}
    for row in rows:
        for dim, size in zip(parse_shape(row["dims"]), row["logical_shape"], strict=False):
            bound = dim.resolve(bindings) if dim.symbols <= bindings.keys() else size
            if bound != size:
                found.setdefault((row["stage"], row["phase"], row["tensor_name"], dim.text), (bound, size))
    return [
        FindingRow(
            id="observed_differs_from_configuration", verdict="fail", severity="error", stage=stage, phase=phase,
            message=f"{name}: {dim} is {bound} by the configuration, and {size} was observed",
            next_step=f"find where {name} is made, and which key sets {dim}",
        )
        for (stage, phase, name, dim), (bound, size) in found.items()
    ]  # fmt: skip
