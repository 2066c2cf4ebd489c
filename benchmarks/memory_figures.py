"""What a row of published measurements asks for: its figures, how each is scored, and the family it belongs to."""

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
GIB = 2**30
GB = 10**9  # Megatron-Bridge logs `mem-max-allocated-gigabytes` in these: training/utils/train_utils.py report_memory
QUANTITY = {
    "allocated_peak": "peak", "active_peak": "peak", "profile_peak": "peak", "reserved_peak": "reserved",
    "allocated_steady": "steady", "weights": "steady", "kv_pool": "exact", "allocation": "exact",
}  # fmt: skip


def targets(row: Row) -> dict[str, tuple[str, float]]:
    """The figures of a row: name -> (what it is scored as, bytes)."""
    if "model_args" in row:
        names = {"steady": "steady_bytes", "first": "first_step_peak_bytes", "peak": "peak_bytes"}
        return {
            name: ("steady" if name == "steady" else "peak", float(row[key]))
            for name, key in names.items()
            if row.get(key)
        }
    main = QUANTITY.get(row.get("quantity") or "")
    found: dict[str, tuple[str, float]] = {}
    if main:
        name = "exact" if is_single(row) and main == "peak" else main
        found[name] = (name, _bytes(row, "value"))
    for prefix, name, kind in (
        ("steady", "steady", "steady"),
        ("first_step_peak", "first", "peak"),
        ("reserved", "reserved", "reserved"),
    ):
        size = _bytes(row, prefix)
        if size and name not in found:
            if name == "first" and main == "reserved":
                name, kind = "first_reserved", "reserved"
            found[name] = (kind, size)
    if main == "reserved" and _bytes(row, "reserved") and row.get("reserved_bytes") != row.get("value_bytes"):
        found = {**found, "peak": ("peak", _bytes(row, "value")), "reserved": ("reserved", _bytes(row, "reserved"))}
    return found


def _bytes(row: Row, prefix: str) -> float:
    exact = row.get(f"{prefix}_bytes")
    if not exact and row.get("framework") == "Megatron-Bridge" and row.get("unit_as_published") == "GB as published":
        return (row.get(f"{prefix}_GiB") or 0) * GB
    return float(exact if exact else (row.get(f"{prefix}_GiB") or 0) * GIB)


def is_megatron(row: Row) -> bool:
    """Rows of Megatron-LM and what is built on it."""
    name = str(row.get("framework") or "")
    return "model_args" in row or (name.startswith(("Megatron-LM", "Megatron-Bridge", "SkyRL")))


def is_single(row: Row) -> bool:
    """One operator or one tensor, not a whole run."""
    return "op" in row or "tensor" in row


def is_engine(row: Row) -> bool:
    """Inference engines, single tensors and operators."""
    name = str(row.get("framework") or "")
    return (
        is_single(row)
        or name.startswith(("vLLM", "SGLang", "DeepSpeed AutoTP", "litgpt generate", "Liger"))
        or not name
    )


def family(row: Row) -> str:
    """Rows that were measured in one and the same way."""
    if "model_args" in row:
        return (
            "megatron golden " + str(row["id"]).split("/")[1].split("@")[0]
            if "/" in str(row["id"])
            else "megatron golden"
        )
    return str(row.get("framework") or row["id"].split("/")[0])
