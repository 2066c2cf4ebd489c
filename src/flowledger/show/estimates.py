"""The three rough estimates of memory of one rank beside what was measured on one. An estimate that lacks an input says which."""

from collections.abc import Mapping
from typing import Any

from flowledger.flow.estimates import activation_bytes, kv_bytes, peak_memory
from flowledger.ledger.reader import Ledger

# Tensors of size H that one layer saves per token: all of them (attention, norms, FFN), or its input only.
FACTOR, FACTOR_CHECKPOINTED = 17.0, 2.0
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_STEP = "(?::BIGINT IS NULL OR step = ?)"

Inputs = Mapping[str, Any]


def estimates(ledger: Ledger, highest: Mapping[str, Any], *, step: int | None = None) -> list[dict[str, Any]]:
    """One row an estimate: name, formula, estimate and measured (bytes), deviation (fraction), needs (what lacks).

    Both are one rank's, the fullest, in one step or in all. A peak that was not taken apart (`highest` is a reading of
    the whole process) is nothing to compare with.
    """
    measured, held = _measured(ledger, step), _fullest_cache(ledger, step)
    inputs = _inputs(ledger, step, held)
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
        "needs": list(dict.fromkeys([*activations["needs"], *cache["needs"], *(kind for kind, size in parts.items() if size is None)])),
    }  # fmt: skip
    return [
        _beside(activations, measured.get("activation")),
        _beside(cache, measured.get("kv_cache") or held["bytes"]),
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
    sizes = {"L": "L_cache"} | {name: name for name in ("B_slot", "S_cache", "K", "D")}
    needs = [name for name, size in sizes.items() if inputs.get(size) is None]
    value = None if needs else kv_bytes(
        layers=inputs["L_cache"], batch_local=inputs["B_slot"], seq_local=inputs["S_cache"], kv_heads=inputs["K"],
        head_dim=inputs["D"], bytes_per_element=inputs["bytes"],
    )  # fmt: skip
    formula = "layers × batch_local × seq_local × kv_heads × head_dim × 2 × bytes"
    return {"name": "kv_bytes", "formula": formula, "estimate": value, "needs": needs}


def _beside(row: dict[str, Any], measured: int | None) -> dict[str, Any]:
    both = row["estimate"] is not None and bool(measured)
    return {**row, "measured": measured, "deviation": row["estimate"] / measured - 1 if both and measured else None}


def _inputs(ledger: Ledger, step: int | None, cache: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank has: symbols from the run's bindings, cut on its mesh; largest micro-batch and cache as recorded."""
    manifest = ledger.directory.manifest
    bound, config = manifest.bindings, manifest.config
    checkpointed = bool(config.get("actor", {}).get("activation_checkpointing"))
    return {
        "H": bound.get("H"),
        "L": _share(bound.get("L"), ledger.mesh.get("pp")),
        **_cache_sizes(ledger, bound, cache),
        "local_tokens": _local_tokens(ledger, step),
        "bytes": WIDTH.get(config.get("model", {}).get("dtype", "float32"), 4),
        "factor": FACTOR_CHECKPOINTED if checkpointed else FACTOR,
    }


def _share(whole: int | None, ranks: int | None) -> int | None:
    """A rank's part of what so many ranks cut; of parts that differ the largest."""
    return None if whole is None else -(-whole // (ranks or 1))


def _cache_sizes(ledger: Ledger, bound: Mapping[str, int], cache: Mapping[str, Any]) -> dict[str, int | None]:
    """Layers, slots, heads, positions and head size of the cache: as recorded, for the data decide the longest prompt; else as bound."""
    slots, heads, positions, size = cache["shape"] or (None,) * 4
    return {
        "L_cache": cache["layers"] or bound.get("L"),
        "B_slot": slots or bound.get("B_slot") or _share(bound.get("B"), ledger.mesh.get("dp")),
        "S_cache": positions or bound.get("S_cache", bound.get("S")),
        "K": heads or bound.get("K"),
        "D": size or bound.get("D"),
    }


def _local_tokens(ledger: Ledger, step: int | None) -> int | None:
    (found,) = ledger.rows(
        "SELECT max(tokens_computed) FILTER (micro_batch IS NOT NULL) AS micro, max(tokens_computed) AS whole "
        f"FROM spans_view WHERE stage = 'update_actor' AND source <> 'plan' AND {IN_STEP}",
        [step, step],
    )
    tokens: int | None = found["micro"] or found["whole"]
    return tokens


def _measured(ledger: Ledger, step: int | None) -> dict[str, int]:
    """Kind of memory -> the most that one rank had of it."""
    rows = ledger.rows(
        "SELECT kind, max(allocated)::BIGINT AS bytes FROM memory "
        f"WHERE source <> 'plan' AND allocated IS NOT NULL AND {IN_STEP} GROUP BY kind",
        [step, step],
    )
    return {row["kind"]: row["bytes"] for row in rows}


def _fullest_cache(ledger: Ledger, step: int | None) -> dict[str, Any]:
    """The KV cache by its tensors (keys and values of a layer), of the rank and step that had most of it."""
    found = ledger.rows(
        "WITH layers AS (SELECT process, step, layer, max(bytes) AS bytes, arg_max(local_shape, bytes) AS shape FROM accesses "
        f"WHERE tensor_name = 'kv_cache' AND source <> 'plan' AND {IN_STEP} GROUP BY process, step, layer) "
        "SELECT sum(2 * bytes)::BIGINT AS bytes, count(layer) AS layers, arg_max(shape, bytes) FILTER (len(shape) = 4) AS shape "
        "FROM layers GROUP BY process, step ORDER BY 1 DESC NULLS LAST, process, step LIMIT 1",
        [step, step],
    )
    return found[0] if found else {"bytes": None, "layers": None, "shape": None}
