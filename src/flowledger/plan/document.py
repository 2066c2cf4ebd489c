"""A plan as one plain document: what `--json` prints, and what a terminal draws. Bytes are integers, shapes are lists.

Keys: `rows` (the memory ledger), `rank_classes`, `chain`, `checks`, `shapes`, `lifetimes`, `estimates`, `engine`,
`communication`, `summary`, `reading`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from flowledger.config.agreement import OWN
from flowledger.flow.estimates import activation_bytes, kv_bytes, peak_memory
from flowledger.flow.kinds import KINDS, MEMORY_KINDS
from flowledger.flow.rank_classes import spans
from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import Row
from flowledger.plan import kv_cache
from flowledger.plan.communication import summed
from flowledger.plan.engines import replicas
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.lifetimes import surviving
from flowledger.plan.memory import LATER, StageMemory
from flowledger.plan.plan import Plan
from flowledger.plan.weights import count

SCHEMA = 1
FACTOR = {"none": 34.0, "selective": 34.0, "full": 2.0}  # tensors of size H a layer saves per token: rough form only

SCALARS = (str, int, float, type(None))  # already plain

Document = dict[str, Any]


def document(plan: Plan, *, shapes: bool = True) -> Document:
    """Everything a plan says. Without `shapes` the two long tables are left out, and the work of making them too."""
    found: Document = {
        "schema": SCHEMA,
        "verb": "plan",
        "run": plan.config.name,
        "summary": summary(plan),
        "chain": [plain(row) for row in plan.chain.rows],
        "checks": [plain(row) for row in plan.findings],
        "rows": [stage_row(one) for one in plan.memory],
        "rank_classes": {name: spans(ranks) for name, ranks in plan.rank_classes.items()},
        "engine": engine(plan),
        "communication": talks(plan),
        "estimates": estimates(plan),
        "reading": reading(plan),
    }
    if shapes:
        found["shapes"] = [plain(row) | _bug(row.tensor_name) for row in plan.shapes]
        found["lifetimes"] = plan.fates
        found["survives"] = surviving(plan.fates, plan.stages)
    return found


def _bug(name: str) -> dict[str, str]:
    known = tensor(name)
    return {"common_bug": known.common_bug, "common_bug_zh": known.common_bug_zh}


def plain(row: Any) -> dict[str, Any]:
    """A row of the ledger, or a frozen dataclass, as a dictionary; fields left None stay null."""
    if isinstance(row, Row):
        values = ((name, getattr(row, name)) for name in row.__struct_fields__ if name not in ("seq", "t_ns"))
        return {name: value if isinstance(value, SCALARS) else msgspec.to_builtins(value) for name, value in values}
    return {name: getattr(row, name) for name in row.__slots__}


def stage_row(one: StageMemory) -> dict[str, Any]:
    """One stage on one rank class: its peak by kind, and what is left at its end."""
    kinds = one.kinds
    return {
        "step": "first" if one.step != LATER else "later",
        "stage": one.stage,
        "role": one.role,
        "ranks": one.ranks.label,
        "rank": one.ranks.first,
        "rank_count": one.ranks.count,
        "instant": one.peak.instant,
        **{kind: kinds.get(kind, 0) for kind in KINDS},
        "allocated": one.peak.bytes,
        "reserved": one.reserved,
        "limit": one.limit,
        "free": one.free,
        "host_used": one.host,
        "after": sum(one.rest.values()),
        "tensors": [
            {
                "name": live.name,
                "kind": live.kind,
                "bytes": live.total,
                "what": live.label,
                "formula": live.formula,
                "source": live.source,
            }
            for live in sorted(one.peak.lives, key=lambda live: -live.total)[:12]
        ],
    }


def summary(plan: Plan) -> dict[str, Any]:
    """The answers in one place: does it start, does it fit, where is the peak."""
    config, worst = plan.config, plan.worst
    verdicts = [finding.verdict for finding in plan.findings]
    return {
        "framework": config.framework,
        "framework_version": config.framework_version,
        "model": plan.architecture.name,
        "parameters": count(plan.architecture),
        "gpu": plan.gpu.name if plan.gpu else None,
        "world": plan.jobs[("update_actor", plan.classes[0].name)][1].world,
        "mesh": _mesh(plan),
        "starts": "fail" not in verdicts,
        "fails": verdicts.count("fail"),
        "warns": verdicts.count("warn"),
        "skipped": verdicts.count("skipped"),
        "fits": plan.fits,
        "peak_stage": worst.stage,
        "peak_ranks": worst.ranks.label,
        "peak_instant": worst.peak.instant,
        "peak_step": "first" if worst.step != LATER else "later",
        "peak_allocated": worst.peak.bytes,
        "peak_reserved": worst.reserved,
        "peak_host": max(one.host for one in plan.memory),
        "limit": plan.limit,
        "free": worst.free,
    }


def _mesh(plan: Plan) -> dict[str, int]:
    """Axis -> degree of the actor's training engine; ep rides on dp and cp."""
    work, job = plan.jobs[("update_actor", plan.classes[0].name)]
    return job.mesh.degrees | {"dp": plan.dp(work)}


def engine(plan: Plan) -> dict[str, Any]:
    """The inference engine on one rank: weights, KV pool, and how many samples it can run at once."""
    served, serving = plan.served, plan.serving
    whole = plan.config.data.max_prompt_tokens + plan.config.rollout.max_response_tokens
    return {
        "engine": serving.engine,
        "colocated": serving.colocated,
        "weights": served.weights,
        "kv_pool": served.kv_pool,
        "kv_blocks": served.kv_blocks,
        "kv_tokens": served.kv_tokens,
        "bytes_per_token": served.bytes_per_token,
        "full_samples": served.kv_blocks  # a slot holds one, less the last token, which is never fed back
        if plan.config.framework == OWN
        else kv_cache.capacity(plan.architecture, serving, served.kv_pool, tokens=whole),
        "fits": served.fits,
        "reason": served.reason,
        "profile_peak": served.profile_peak,
        "graphs": served.graphs,
        "non_torch": served.non_torch,
        "asleep": sum(live.total for live in served.asleep if not live.host),
    }


def talks(plan: Plan) -> list[dict[str, Any]]:
    """Planned collectives of one step of flowledger's own loop, of each kind of rank, by stage, group and comm_type."""
    return [{"ranks": ranks.label, **one} for ranks, talks in plan.talks for one in summed(talks)]


def reading(plan: Plan) -> dict[str, Any]:
    """How the input was read: what nobody used, what was assumed."""
    return {
        "ignored": list(plan.reading.ignored),
        "assumed": list(plan.reading.assumed),
        "notes": [*plan.reading.notes, *plan.notes],
        "sources": dict(plan.config._sources),
    }


def estimates(plan: Plan) -> list[dict[str, Any]]:
    """The three rough forms beside what the ledger says for the same thing: update_actor on the worst rank class."""
    update = max((one for one in plan.memory if one.stage == "update_actor"), key=lambda one: one.peak.bytes)
    kinds = update.peak.by_kind()
    rough = _rough(plan, update)
    ledger = {
        "activation_bytes": kinds.get("activation", 0),
        "kv_bytes": plan.served.kv_pool,
        "peak_memory": update.peak.bytes,
    }
    return [
        {
            "name": name,
            "formula": formula,
            "estimate": value,
            "planned": ledger[name],
            "deviation": value / ledger[name] - 1 if ledger[name] else None,
        }
        for name, (formula, value) in rough.items()
    ]


def _rough(plan: Plan, update: StageMemory) -> Mapping[str, tuple[str, int]]:
    architecture, kinds = plan.architecture, update.peak.by_kind()
    _, job = plan.jobs[("update_actor", update.ranks.name)]
    width = ITEMSIZE[job.engine.compute_dtype or job.engine.param_dtype]
    factor = FACTOR[job.engine.recompute.granularity]
    activations = activation_bytes(
        layers=len(update.ranks.layers), local_tokens=job.local_tokens, hidden_size=architecture.hidden,
        bytes_per_element=width, factor=factor / 2,
    )  # fmt: skip
    bound, own = plan.setting.bindings, plan.config.framework == OWN
    cache = kv_bytes(
        layers=architecture.layers, batch_local=plan.served.kv_blocks if own else -(-bound["B_slot"] // replicas(plan.config)), seq_local=bound["S_cache"],
        kv_heads=max(1, architecture.kv_heads // plan.config.rollout.serving.mesh.tp), head_dim=architecture.head_dim,
        bytes_per_element=ITEMSIZE.get(plan.serving.kv_dtype or plan.serving.dtype or "", 2),
    )  # fmt: skip
    sums = {kind: kinds.get(kind, 0) for kind in MEMORY_KINDS}
    peak = peak_memory(
        params=sums["param"], grads=sums["grad"], optimizer=sums["optimizer"], activations=activations,
        kv_cache=sums["kv_cache"], buffers=sums["comm_buffer"],
    )  # fmt: skip
    return {
        "activation_bytes": (
            f"layers × local_tokens × hidden_size × bytes × factor (factor {factor / 2:g})",
            activations,
        ),
        "kv_bytes": ("layers × batch_local × seq_local × kv_heads × head_dim × 2 × bytes", cache),
        "peak_memory": ("params + grads + optimizer + activations + kv_cache + buffers", peak),
    }
