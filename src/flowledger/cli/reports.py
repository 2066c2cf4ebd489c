"""From what somebody reports (a file or a text) to findings: read it, ask the causes, and run a plan's checks beside them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowledger.diagnose.reports.report import Report
    from flowledger.ledger.rows import FindingRow

LEAST_SETTINGS = 3  # fewer say too little of a run for a plan of it
UNSURE = 0.5  # a check that fails where most settings are defaults: the report was silent on them
ASKED_OF_PLAN = ("model_name", "gpu_name", "world", "max_response")  # without these a plan would be one of defaults
GIB, GPUS_A_NODE = 2**30, 8
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
# A fact of a report -> the settings of the plan that it is.
PLANNED = {
    "prompts": ("data.train_batch_size",), "max_prompt": ("data.max_prompt_length",), "max_response": ("data.max_response_length",),
    "group": (f"{ROLLOUT}.n",), "rollout_tp": (f"{ROLLOUT}.tensor_model_parallel_size",), "util": (f"{ROLLOUT}.gpu_memory_utilization",),
    "mini": (f"{ACTOR}.ppo_mini_batch_size",), "micro": (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    "logprob_micro": (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size_per_gpu"),
    "dynamic_bsz": (f"{ACTOR}.use_dynamic_bsz",), "token_cap": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "sp": (f"{ACTOR}.ulysses_sequence_parallel_size",), "param_offload": (f"{ACTOR}.fsdp_config.param_offload",),
    "optimizer_offload": (f"{ACTOR}.fsdp_config.optimizer_offload",), "estimator": ("algorithm.adv_estimator",),
    "recompute": ("actor_rollout_ref.model.enable_gradient_checkpointing",), "packing": ("actor_rollout_ref.model.use_remove_padding",),
    "fused_kernels": ("actor_rollout_ref.model.use_fused_kernels",), "nodes": ("trainer.nnodes",), "gpus_per_node": ("trainer.n_gpus_per_node",),
}  # fmt: skip
CALL = re.compile(
    r"\b([a-z]\w{1,80})\(|\bin ([a-z]\w{1,80})\b"
)  # a function as a sentence names it, where it has an underscore
NEEDED = {"actor_rollout_ref.rollout.name": "vllm"}  # verl refuses to start without it


def reported(path_or_text: str) -> "list[FindingRow]":
    """The findings for one report, the surest first: a JSON, JSONL or YAML file, a text file, or the text itself.

    Raises BadInput for a file that cannot be read or holds nothing.
    """
    from flowledger.diagnose.reports.answers import answer
    from flowledger.diagnose.reports.read import read

    report = with_plan(read(path_or_text))
    return answer(report, planned(report))


def with_plan(report: "Report") -> "Report":
    """The report and what a plan of it comes to, where it tells of memory and states model, GPU, ranks and lengths; else the report."""
    from flowledger.diagnose.reports.answers import names_of

    report = _with_stage(report)
    names = names_of(report)
    unlike = "verl" not in report.framework.casefold() or names["lora"] or names["megatron_anywhere"] or names["vlm"]
    if not names["oom"] or names["host"] or unlike or any(name not in names for name in ASKED_OF_PLAN):
        return report
    return replace(report, planned=_plan_of(report, names))


def _with_stage(report: "Report") -> "Report":
    """The report with the stage that its traceback, or the functions it names, lie in, as the reader of crashes knows it."""
    from flowledger.record.importers.crashes import stage_of
    from flowledger.record.importers.tracebacks import FRAME, Frame

    text = report.said()
    frames = [Frame(one["file"], int(one["line"]), one["function"] or "") for one in FRAME.finditer(text)]
    named = (called or within for called, within in CALL.findall(text))
    frames = frames or [Frame("", 0, name) for name in named if "_" in name]
    stage = stage_of(frames)
    return replace(report, stage=stage) if stage else report


def _plan_of(report: "Report", names: Mapping[str, Any]) -> dict[str, Any]:
    """The fullest stage of a plan with the report's facts, as verl with FSDP would hold it."""
    from flowledger.config.detect import Asked, read
    from flowledger.flow.errors import BadInput
    from flowledger.plan.ask import Question, make

    machines = max(1, names["world"] // GPUS_A_NODE)
    facts = {**names, "nodes": machines, "gpus_per_node": names["world"] // machines}
    settings = [f"{key}={facts[name]}" for name, keys in PLANNED.items() if name in facts for key in keys]
    try:
        made = make(
            read("verl", Asked(overrides=settings, assume=NEEDED)),
            Question(gpu=names["gpu_name"], model=names["model_name"]),
        )
        worst = made.worst
    except (BadInput, ValueError, TypeError, KeyError, ArithmeticError):
        return {}  # not all that is said makes a configuration
    kinds = sorted(worst.kinds.items(), key=lambda one: -one[1])
    tensors = Counter[str]()
    for live in worst.peak.lives:
        tensors[live.name] += live.total * (live.kind == kinds[0][0])
    (tensor, size), *_ = tensors.most_common(1)
    return {
        "plan_gib": worst.peak.bytes / GIB, "plan_limit_gib": (worst.limit or 0) / GIB, "plan_stage": worst.stage,
        "plan_kind": kinds[0][0], "plan_kind_gib": kinds[0][1] / GIB, "plan_tensor": tensor, "plan_tensor_gib": size / GIB, "plan_kinds": ", ".join(f"{kind} {size / GIB:.1f} GiB" for kind, size in kinds[:5]),
    }  # fmt: skip


def planned(report: "Report") -> "list[FindingRow]":
    """Checks of a plan that fail for the report's configuration, told as unsure; none where no plan can be made of it."""
    from flowledger.ledger.rows import FindingRow

    framework = _framework(report.framework)
    settings = list(_settings(report, framework))
    if framework is None or len(settings) < LEAST_SETTINGS:
        return []
    rows = [row for row in _failing(framework, settings) if "= None" not in row["message"]]
    silent = (
        {row["id"] for row in _failing(framework, [])} if rows else set()
    )  # what fails without any setting says nothing of these
    names = set(FindingRow.__struct_fields__) - {"seq", "t_ns"}
    rows = [row for row in rows if row["id"] not in silent]
    found = [FindingRow(**{key: value for key, value in row.items() if key in names}) for row in rows]
    for row in found:
        row.confidence = min(row.confidence or 1.0, UNSURE)
        row.evidence = [*(row.evidence or ()), "by the settings of the report, and defaults where it is silent"]
    return found


def _failing(framework: str, settings: list[str]) -> list[dict[str, Any]]:
    from flowledger.config.detect import Asked, read
    from flowledger.flow.errors import BadInput
    from flowledger.plan.ask import Question, checks, make

    assume = NEEDED if framework == "verl" else None
    try:
        made = make(
            read(framework, Asked(overrides=settings, assume=assume)), Question(gpu=None, model=None, lengths=None)
        )
        return [row for row in checks(made) if row["verdict"] == "fail"]
    except (BadInput, ValueError, TypeError, KeyError, ArithmeticError):
        return []  # a fragment of a configuration need not be one


def _framework(words: str) -> str | None:
    """The reader that a framework's name calls for; a fork is read as what it is a fork of."""
    from flowledger.config.detect import READERS

    plain = words.casefold().replace("-", "_")
    return next((name for name in READERS if name in plain), None)


def _settings(report: "Report", framework: str | None) -> Iterator[str]:
    """`key=value` words; verl's keys are completed from their ends where only one key ends so."""
    from flowledger.diagnose.reports.report import leaves

    full = _full_keys() if framework == "verl" else {}
    for key, value in leaves(report.config):
        plain = key.strip().lstrip("-+")
        if not isinstance(value, str | int | float) or " " in f"{plain}{value}":
            continue
        name = full.get(plain) if framework == "verl" else plain.replace("-", "_")
        if name:
            yield f"{name}={value}"


@cache
def _full_keys() -> Mapping[str, str]:
    """Each ending of a key of verl's configuration -> the key, where the actor's or the only one has it."""
    from flowledger.config.dotted import flat
    from flowledger.tables import verl

    tree: dict[str, Any] = flat(verl.defaults(verl.HEAD, "ppo_trainer"))
    found: dict[str, list[str]] = {}
    for key in tree:
        parts = key.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(key)
    unique = {ending: keys[0] for ending, keys in found.items() if len(keys) == 1}
    actor = {
        ending: key
        for ending, keys in found.items()
        for key in keys
        if key.endswith(f"actor_rollout_ref.actor.{ending}")
    }
    return {**actor, **unique}
