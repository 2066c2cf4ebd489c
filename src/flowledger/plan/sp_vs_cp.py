"""Sequence parallelism beside context parallelism for one configuration, as one plain document.

Keys: `rows` (operators), `shapes`, `here` (all axes of the configuration together), `schemes` (one a way to cut a sequence),
`hiding` (the criterion for each message), `engine`, `chunks` (the inequality at other sizes), `sizes`, `hardware`, `refused`, `notes`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from flowledger.plan.checks import check
from flowledger.plan.exchanges import exchanges, hardware_of, hiding_rows, operator_rows, sweep, totals
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware
from flowledger.plan.plan import Plan
from flowledger.plan.sequence import Cut, cuts, degrees_here, held, maker, names, shapes
from flowledger.tables.constants import constant
from flowledger.tables.operators import ASPECTS

STAGE = "update_actor"

# (framework, whose code trains there) -> schemes that can be configured; Megatron has no Ulysses over an axis of its own.
MEGATRON = frozenset({"megatron_sp", "cp_ring", "cp_all_to_all", "tp"})
ALL = MEGATRON | {"ulysses"}
HAS: dict[tuple[str, str], frozenset[str]] = {
    ("verl", "torch"): frozenset({"ulysses"}), ("verl", "megatron"): MEGATRON, ("slime", "megatron"): MEGATRON,
    ("flowledger", "flowledger"): ALL,
}  # fmt: skip


def compare(plan: Plan) -> dict[str, Any]:
    """The answer for the actor's update on the first pipeline stage. Times need a device."""
    _, job = plan.jobs[(STAGE, plan.classes[0].name)]
    layers = len(plan.classes[0].layers)
    hardware = hardware_of(job, plan.gpu) if plan.gpu else None
    made = cuts(job)
    running = [cut for cut in made if cut.runs]
    here = replace(running[0], degrees=degrees_here(job), used=True)
    has = {cut.scheme.name: available(plan, job, cut) for cut in made}
    hiding = [
        {**row, "available": has.get(row["scheme"], True)}
        for row in _each(running, here, lambda cut: hiding_rows(job, cut, hardware))
    ]
    return {
        "run": plan.config.name, "model": plan.architecture.name, "stage": STAGE, "refused": refused(plan),
        "sizes": _sizes(job, layers), "hardware": _hardware(hardware), "shapes": shapes(job, made),
        "here": {**held(job, here.degrees), **_together(job, running, here, hardware, layers), **_exposed(hiding, layers)},
        "engine": engine_name(plan, job),
        "schemes": [{**_scheme(job, cut, hardware, layers), "available": has[cut.scheme.name]} for cut in made],
        "rows": [row for cut in running for row in operator_rows(job, cut, hardware)],
        "hiding": hiding,
        "chunks": _each(running, here, lambda cut: sweep(job, cut, hardware)) if hardware else [],
        "notes": [english for english, _ in notes(plan, job)], "notes_zh": [chinese for _, chinese in notes(plan, job)],
    }  # fmt: skip


def available(plan: Plan, job: Job, cut: Cut) -> bool | None:
    """Whether a scheme can be configured in this framework's engine; None where that is not known here."""
    found = HAS.get((plan.config.framework, maker(job)))
    return True if cut.used else None if found is None else cut.scheme.name in found


def engine_name(plan: Plan, job: Job) -> str:
    """`verl's FSDP engine`, `verl's Megatron engine`."""
    engine = {"torch": "FSDP engine", "megatron": "Megatron engine", "flowledger": "own loop"}[maker(job)]
    return f"{plan.config.framework}'s {engine}"


def refused(plan: Plan) -> list[dict[str, str]]:
    """Rules that this configuration breaks: it does not run, and numbers that do not divide are rounded up."""
    english, chinese = (
        check(plan.config, plan.architecture, plan.lengths, language=language) for language in ("en", "zh")
    )
    zh = {row.id: row.message for row in chinese}
    return [
        {"id": row.id, "message": row.message, "message_zh": zh[row.id]} for row in english if row.verdict == "fail"
    ]


def _each(
    running: Sequence[Cut], here: Cut, rows_of: Callable[[Cut], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The rows of each scheme, and once those that any scheme has: as the configuration has them."""
    own = [row for cut in running for row in rows_of(cut) if row["scheme"] == cut.scheme.name]
    return own + [row for row in rows_of(here) if row["scheme"] == "any"]


def _together(job: Job, running: Sequence[Cut], here: Cut, hardware: Hardware | None, layers: int) -> dict[str, Any]:
    """What a layer computes and sends with all axes of the configuration, experts included."""
    experts = [one for one in exchanges(job, here, hardware) if one.row.scheme == "any" and one.operator.per == "layer"]
    schemes = sum(totals(job, cut, None, layers)["layer_bytes"] for cut in running if cut.used)
    return {
        "layer_bytes": schemes + sum(one.total_bytes for one in experts),
        "layer_compute_s": totals(job, here, hardware, layers)["layer_compute_s"],
    }


def _exposed(hiding: Sequence[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Seconds that the messages of all schemes in use leave uncovered: of a layer, outside of layers, of a micro-batch."""
    used = [row for row in hiding if row["used"]]
    found: dict[str, Any] = {}
    for key in ("exposed", "exposed_here"):
        known = all(row[f"{key}_s"] is not None for row in used)
        layer, outside = (
            sum(row["passes"] * row[f"{key}_s"] for row in used if row["per"] == per) if known else None
            for per in ("layer", "model")
        )
        whole = None if layer is None or outside is None else layer * layers + outside
        found |= {f"layer_{key}_s": layer, f"outside_{key}_s": outside, f"micro_batch_{key}_s": whole}
    return found


def _sizes(job: Job, layers: int) -> dict[str, Any]:
    """What the numbers are of: the micro-batch, the model, the degrees."""
    wanted = ("B", "S", "n", "s", "t", "x", "e", "H", "A", "K", "D", "F", "V", "E", "topk")
    bound, degrees = names(job, degrees_here(job)), degrees_here(job)
    degrees_of = {axis: degrees[axis] for axis in ("tp", "sp", "cp", "ep")}
    return {
        **{name: bound[name] for name in wanted}, **degrees_of, "pp": job.mesh.pp, "dp": job.dp, "world": job.world, "layers": layers,
        "sequence_parallel": degrees["msp"] > 1, "cp_kind": job.mesh.cp_kind, "packed": job.engine.packed,
        "shared_prompts": job.beside_tokens > 0,
    }  # fmt: skip


def _hardware(hardware: Hardware | None) -> dict[str, Any] | None:
    """The rates that the times are reckoned with."""
    if hardware is None:
        return None
    node, network = hardware.node, hardware.network
    return {
        "gpu": hardware.gpu.name, "dtype": hardware.dtype, "gpus_per_node": hardware.gpus_per_node, "matmul_flops": hardware.rate("matmul"),
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
    numbers = {**held(job, cut.alone), **totals(job, cut, hardware, layers)} if cut.runs else {}
    return {**row, **numbers, **texts}


def notes(plan: Plan, job: Job) -> list[tuple[str, str]]:
    """What the numbers leave out, in English and Chinese."""
    model, mesh = plan.architecture, job.mesh
    kinds = ", ".join(sorted({kind for kind in model.kinds if kind != "full"}))
    dense = len(model.moe.dense) if model.moe else 0
    said = (
        (plan.gpu is None, "no device is named: --gpu gives the times, the break-even chunks and the verdicts that hang on them",
         "没有指定设备：--gpu 给出时间、平衡块长以及取决于它们的结论"),
        (plan.gpu is not None and job.own_loop and job.world > job.gpus_per_node == 1, "hardware.gpus_per_node = 1: every message is taken to go over the network",
         "hardware.gpus_per_node = 1：所有消息都按走节点间网络计"),
        (mesh.pp > 1, f"of {mesh.pp} pipeline stages the first: the head and the loss are on the last",
         f"{mesh.pp} 级流水线中的第一级：输出头与 loss 在最后一级"),
        (job.beside_tokens > 0, "samples share a prompt in the row; under cp each has its prompt to itself, and the row is longer",
         "样本在行内共用 prompt；cp 下各自带 prompt，行更长"),
        (bool(kinds), f"attention is reckoned for a full layer; this model has {kinds} layers too", f"attention 按全注意力层计；该模型还有 {kinds} 层"),
        (dense > 0, f"layers are reckoned as mixtures of experts; {dense} layers of this model are dense", f"各层按混合专家层计；该模型有 {dense} 层是稠密的"),
        (job.engine.recompute.granularity != "none", "activations are recomputed: of a layer, what is computed and sent again counts twice; rows of operators and messages are of once",
         "激活会重算：一层的合计中，重算与重发的部分计两次；各算子与消息的行只计一次"),
        (True, "what dp and pp send (parameters, gradients, hidden states) is not here: plan --json has it under communication",
         "dp 与 pp 的通信（参数、梯度、hidden states）不在此列：见 plan --json 的 communication"),
    )  # fmt: skip
    return [(english, chinese) for true, english, chinese in said if true]
