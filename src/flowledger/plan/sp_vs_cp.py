"""Sequence parallelism beside context parallelism for one configuration, as one plain document.

Keys: `rows` (operators), `shapes`, `schemes` (one a way to cut a sequence), `hiding` (the criterion for each message),
`chunks` (the inequality at other sizes), `sizes`, `hardware`, `notes`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from flowledger.plan.exchanges import hiding_rows, operator_rows, sweep, totals
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware
from flowledger.plan.plan import Plan
from flowledger.plan.sequence import Cut, cuts, degrees_here, held, names, shapes
from flowledger.tables.constants import constant
from flowledger.tables.operators import ASPECTS

STAGE = "update_actor"


def compare(plan: Plan) -> dict[str, Any]:
    """The answer for the actor's update on the first pipeline stage. Times need a device."""
    _, job = plan.jobs[(STAGE, plan.classes[0].name)]
    layers = len(plan.classes[0].layers)
    hardware = Hardware(plan.gpu, job.gpus_per_node) if plan.gpu else None
    made = cuts(job)
    running = [cut for cut in made if cut.runs]
    return {
        "run": plan.config.name, "model": plan.architecture.name, "stage": STAGE,
        "sizes": _sizes(job, layers), "hardware": _hardware(hardware), "shapes": shapes(job, made),
        "schemes": [_scheme(job, cut, hardware, layers) for cut in made],
        "rows": [row for cut in running for row in operator_rows(job, cut, hardware)],
        "hiding": _each(running, lambda cut: hiding_rows(job, cut, hardware)),
        "chunks": _each(running, lambda cut: sweep(job, cut, hardware)) if hardware else [],
        "notes": notes(plan, job),
    }  # fmt: skip


def _each(running: Sequence[Cut], rows_of: Callable[[Cut], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of each scheme, and once those that any scheme has: as the configuration has them."""
    lead = next((cut for cut in running if cut.used), running[0])
    own = [row for cut in running for row in rows_of(cut) if row["scheme"] == cut.scheme.name]
    return own + [row for row in rows_of(lead) if row["scheme"] == "any"]


def _sizes(job: Job, layers: int) -> dict[str, Any]:
    """What the numbers are of: the micro-batch, the model, the degrees."""
    wanted = ("B", "S", "n", "s", "t", "x", "e", "H", "A", "K", "D", "F", "V", "E", "topk")
    bound, degrees = names(job, degrees_here(job)), degrees_here(job)
    degrees_of = {axis: degrees[axis] for axis in ("tp", "sp", "cp", "ep")}
    return {
        **{name: bound[name] for name in wanted}, **degrees_of, "pp": job.mesh.pp, "dp": job.dp, "layers": layers,
        "sequence_parallel": degrees["msp"] > 1, "cp_kind": job.mesh.cp_kind, "packed": job.engine.packed,
    }  # fmt: skip


def _hardware(hardware: Hardware | None) -> dict[str, Any] | None:
    """The rates that the times are reckoned with."""
    if hardware is None:
        return None
    node, network = hardware.link(1, 1), hardware.link(hardware.gpus_per_node, 2)
    return {
        "gpu": hardware.gpu.name, "gpus_per_node": hardware.gpus_per_node, "matmul_flops": hardware.rate("matmul"),
        "attention_flops": hardware.rate("attention"), "memory_bytes_per_s": hardware.rate("memory"),
        "node": asdict(node), "network": asdict(network), "of_peak": {
            name: constant(name) for name in ("matmul_share", "attention_share", "memory_share", "link_share")
        },
    }  # fmt: skip


def _scheme(job: Job, cut: Cut, hardware: Hardware | None, layers: int) -> dict[str, Any]:
    scheme = cut.scheme
    texts = {
        f"{aspect}{suffix}": scheme.texts[aspect][at] for aspect in ASPECTS for at, suffix in ((0, ""), (1, "_zh"))
    }
    row = {"scheme": scheme.name, "title": scheme.title, "axis": scheme.axis, "degree": cut.degree, "used": cut.used}
    numbers = {**held(job, cut), **totals(job, cut, hardware, layers)} if cut.runs else {}
    return {**row, **numbers, **texts}


def notes(plan: Plan, job: Job) -> list[str]:
    """What the numbers leave out."""
    model, found = plan.architecture, []
    if plan.gpu is None:
        found.append(
            "no device is named: --gpu gives the times, the break-even chunks and the verdicts that hang on them"
        )
    kinds = {kind for kind in model.kinds if kind != "full"}
    if kinds:
        found.append(f"attention is reckoned for a full layer; this model has {', '.join(sorted(kinds))} layers too")
    if model.moe and model.moe.dense:
        found.append(
            f"layers are reckoned as mixtures of experts; {len(model.moe.dense)} layers of this model are dense"
        )
    if job.mesh.tp > 1 and not job.engine.sequence_parallel:
        found.append(
            "tp without sequence parallelism: each block ends in an all-reduce of the same bytes, and the residual is whole on each tp rank"
        )
    if job.engine.recompute.granularity != "none":
        found.append("recomputation sends what forward sent once more in backward: not counted here")
    return found
