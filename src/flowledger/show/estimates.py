"""The three rough estimates of memory beside what was measured. An estimate that lacks an input says which."""

from collections.abc import Mapping
from typing import Any

from flowledger.flow.estimates import activation_bytes, kv_bytes, peak_memory
from flowledger.ledger.reader import Ledger

# Tensors of size H that one layer saves per token: all of them (attention, norms, FFN), or its input only.
FACTOR, FACTOR_CHECKPOINTED = 17.0, 2.0
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}

Inputs = Mapping[str, Any]


def estimates(ledger: Ledger, highest: Mapping[str, Any], *, step: int | None = None) -> list[dict[str, Any]]:
    """One row an estimate: name, formula, estimate and measured (bytes), deviation (fraction), needs (what lacks).

    What was measured is that of one step, or of all. A peak that was not taken apart (`highest` is a reading of the
    whole process) is nothing to compare with.
    """
    measured = _measured(ledger, step)
    inputs = _inputs(ledger)
    activations = _activations(inputs)
    cache = _cache(inputs)
    parts = {kind: measured.get(kind) for kind in ("param", "grad", "optimizer")}
    known = None not in (activations["estimate"], cache["estimate"], *parts.values())
    peak = {
        "name": "peak",
        "formula": "params + grads + optimizer + activations + kv_cache + buffers",
        "estimate": peak_memory(
            params=parts["param"] or 0, grads=parts["grad"] or 0, optimizer=parts["optimizer"] or 0,
            activations=activations["estimate"], kv_cache=cache["estimate"], buffers=measured.get("comm_buffer") or 0,
        ) if known else None,
        "needs": [*activations["needs"], *cache["needs"], *(kind for kind, size in parts.items() if size is None)],
    }  # fmt: skip
    return [
        _beside(activations, measured.get("activation")),
        _beside(cache, measured.get("kv_cache") or _cache_tensors(ledger)),
        _beside(peak, highest["peak"] if highest["instant"] == "peak" else None),
    ]


def _activations(inputs: Inputs) -> dict[str, Any]:
    needs = [name for name in ("L", "local_tokens", "H") if inputs.get(name) is None]
    value = None if needs else activation_bytes(
        layers=inputs["L"], local_tokens=inputs["local_tokens"], hidden_size=inputs["H"],
        bytes_per_element=inputs["bytes"], factor=inputs["factor"],
    )  # fmt: skip
    formula = f"layers × local_tokens × hidden_size × bytes × factor ({inputs['factor']:g})"
    return {"name": "activation_bytes", "formula": formula, "estimate": value, "needs": needs}


def _cache(inputs: Inputs) -> dict[str, Any]:
    needs = [name for name in ("L", "B_slot", "S_cache", "K", "D") if inputs.get(name) is None]
    value = None if needs else kv_bytes(
        layers=inputs["L"], batch_local=inputs["B_slot"], seq_local=inputs["S_cache"], kv_heads=inputs["K"],
        head_dim=inputs["D"], bytes_per_element=inputs["bytes"],
    )  # fmt: skip
    formula = "layers × batch_local × seq_local × kv_heads × head_dim × 2 × bytes"
    return {"name": "kv_bytes", "formula": formula, "estimate": value, "needs": needs}


def _beside(row: dict[str, Any], measured: int | None) -> dict[str, Any]:
    both = row["estimate"] is not None and bool(measured)
    return {**row, "measured": measured, "deviation": row["estimate"] / measured - 1 if both and measured else None}


def _inputs(ledger: Ledger) -> dict[str, Any]:
    """Symbols from the run's bindings; the tokens of the largest micro-batch from what was recorded."""
    manifest = ledger.directory.manifest
    bound = manifest.bindings
    config = manifest.config
    checkpointed = bool(config.get("actor", {}).get("activation_checkpointing"))
    return {
        **{symbol: bound.get(symbol) for symbol in ("L", "H", "K", "D")},
        **_cache_sizes(ledger, bound),
        "local_tokens": _local_tokens(ledger),
        "bytes": WIDTH.get(config.get("model", {}).get("dtype", "float32"), 4),
        "factor": FACTOR_CHECKPOINTED if checkpointed else FACTOR,
    }


def _cache_sizes(ledger: Ledger, bound: Mapping[str, int]) -> dict[str, int | None]:
    """Slots and positions of the KV cache: as recorded, for the data decide the longest prompt; else as bound."""
    (seen,) = ledger.rows(
        "SELECT max(local_shape[1]) AS slots, max(local_shape[3]) AS positions FROM accesses "
        "WHERE tensor_name = 'kv_cache' AND len(local_shape) = 4 AND source <> 'plan'"
    )
    return {
        "B_slot": seen["slots"] or bound.get("B_slot", bound.get("B")),
        "S_cache": seen["positions"] or bound.get("S_cache", bound.get("S")),
    }


def _local_tokens(ledger: Ledger) -> int | None:
    (found,) = ledger.rows(
        "SELECT max(tokens_computed) FILTER (micro_batch IS NOT NULL) AS micro, max(tokens_computed) AS whole "
        "FROM spans_view WHERE stage = 'update_actor' AND source <> 'plan'"
    )
    tokens: int | None = found["micro"] or found["whole"]
    return tokens


def _measured(ledger: Ledger, step: int | None) -> dict[str, int]:
    rows = ledger.rows(
        "SELECT kind, max(allocated)::BIGINT AS bytes FROM memory "
        "WHERE source <> 'plan' AND allocated IS NOT NULL AND (?::BIGINT IS NULL OR step = ?) GROUP BY kind",
        [step, step],
    )
    return {row["kind"]: row["bytes"] for row in rows}


def _cache_tensors(ledger: Ledger) -> int | None:
    """The KV cache by its tensors (keys and values of a layer), where no reading took memory apart while it lived."""
    (found,) = ledger.rows(
        "SELECT sum(2 * bytes)::BIGINT AS bytes FROM (SELECT layer, max(bytes) AS bytes FROM accesses "
        "WHERE tensor_name = 'kv_cache' AND source <> 'plan' GROUP BY process, layer)"
    )
    size: int | None = found["bytes"]
    return size
