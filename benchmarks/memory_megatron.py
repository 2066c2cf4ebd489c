"""Predicted against measured memory of Megatron-LM's golden runs and of published Megatron measurements.

    python benchmarks/memory_megatron.py --cases FILE [--json] [--all]

FILE: one JSON object a line, with `model_args` and `steady_bytes`, `first_step_peak_bytes`, `peak_bytes` of the last rank.
The two halves are a split by the hash of the id. Figures that had to be fitted (a handful, each a row with its reason) were
read off rows of both halves, so the halves show that the model is the same for both, not how it does on unseen runs.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from megatron_rows import arguments, environment

from flowledger.config.megatron_args import architecture_of, engine_of, number, plain
from flowledger.flow.errors import BadInput
from flowledger.plan.job import Job
from flowledger.plan.megatron import timeline as megatron
from flowledger.plan.megatron.flags import MegatronFlags, flags_of
from flowledger.plan.timeline import BLOCK

FIGURES = ("steady", "first", "peak")
MEASURED = {"steady": "steady_bytes", "first": "first_step_peak_bytes", "peak": "peak_bytes"}
DEVICES = {
    "a100": "A100-SXM4-80GB",
    "h100": "H100-SXM5-80GB",
    "h800": "H800-SXM5-80GB",
    "gb200": "GB200-186GB",
    "b200": "B200-180GB",
}


# What the arguments leave to the training script or to the data. The vocabulary file of the BERT and T5 runs is that of
# uncased BERT (30,522 words; T5 adds 100): only it fits steady memory at tp 1, 2 and 4 alike.
SCRIPTS: Mapping[str, Mapping[str, object]] = {
    "bert": {"--bert": True, "--tokenizer-type": "BertWordPieceLowerCase"},
    "t5": {"--tokenizer-type": "BertWordPieceLowerCase"},
}


# Why a row is missed: part of an id -> what no argument states. `suspected` where it was not shown.
EXPLAINED = {
    "fine_grained_offloading": "copies on their way, and what stays from the second step on, are not planned",
    "cudagraph": "suspected: private pools of CUDA graphs, which are not planned",
    "ep8": "experts are filled unevenly (repeated runs differ as much); planned evenly",
    "top2router": "experts are filled unevenly; planned evenly",
    "cross_entropy_loss_fusion": "suspected: torch.compile warms up in the first step",
    "hybrid": "kernels of Mamba-2 are timed in the first step; their own temporaries are not planned",
    "lts_dgx_a100": "suspected: fragmentation, 16 to 20 MiB in some runs of this image",
}
WORKSPACES = (-55, -40)  # MiB: two workspaces of 32 instead of 8.1


def explanation(one: Mapping[str, Any]) -> str:
    """Why a row is missed, as far as known."""
    steady = (one["steady_bytes"] - one["steady_measured"]) / 2**20
    if one["default_workspace"] and WORKSPACES[0] < steady < WORKSPACES[1]:
        return "cuBLAS workspaces of 32 MiB, where torch's default of other runs is 8 (its version is not published)"
    return next((text for part, text in EXPLAINED.items() if part in one["id"]), "not explained")


@dataclass(frozen=True)
class Skip:
    """A row that cannot be predicted, and the input that it lacks."""

    reason: str


def predict(row: Mapping[str, Any]) -> dict[str, int] | Skip:
    """Bytes on the last global rank: `steady` after a step, `first` and later `peak` of allocated memory."""
    try:
        made = job_of(row) if "model_args" in row else published_job(row)
    except BadInput as error:
        return Skip(str(error))
    if isinstance(made, Skip):
        return made
    job, flags = made
    resumed = int(row.get("first_step") or 1) > 1
    if "model_args" in row or "last" in str((row.get("measure") or {}).get("rank")):
        figures = of_rank(job, flags, resumed=resumed)
    else:  # the fullest pipeline stage
        ranks = [of_rank(replace(job, pp_rank=index), flags, resumed=resumed) for index in range(job.mesh.pp)]
        figures = {name: max(one[name] for one in ranks) for name in FIGURES}
    if row.get("last_step") is not None and row["last_step"] == row.get("first_step"):
        figures["peak"] = figures["first"]  # a run of one step
    return figures


def of_rank(job: Job, flags: MegatronFlags, *, resumed: bool = False) -> dict[str, int]:
    """Bytes on `job.pp_rank`; peaks are at least what lies there when the step has ended."""
    steady = megatron.timeline(job, flags)
    rest = sum(live.rounded(BLOCK) for live in megatron.resident(job, flags))
    return {
        "steady": rest,
        "first": max(rest, megatron.first_step(steady, resumed=resumed).peak(block=BLOCK).bytes),
        "peak": max(rest, steady.peak(block=BLOCK).bytes),
    }


def published_job(row: Mapping[str, Any]) -> tuple[Job, MegatronFlags] | Skip:
    """A row of the table of published measurements as a Job."""
    lacking = [name for name in ("world_size", "micro_batch", "seq_len") if not row.get(name)]
    if not (row.get("model") or {}).get("vocab"):
        lacking.append("vocab")
    if lacking:
        return Skip(f"not published: {', '.join(lacking)}")
    if "model" not in row or "parallel" not in row:
        return Skip("not published: model or degrees")
    if "ybrid" in str(row["model"].get("name")) and "--hybrid-layer-pattern" not in (row.get("flags") or {}):
        return Skip("hybrid layers")
    if "lora" in row["id"] or "lite" in row["framework"] or "RL loop" in row["framework"]:
        return Skip(f"{row['framework']}: what runs beside training is not described")
    args = {key: value for key, value in arguments(row).items() if value is not None}
    name = str(row.get("hardware") or "").lower()
    device = next((full for key, full in DEVICES.items() if key in name), "H100-SXM5-80GB")
    return of_arguments(args, int(row["world_size"]), 8, device, environment(row))


def job_of(row: Mapping[str, Any]) -> tuple[Job, MegatronFlags] | Skip:
    """A golden row as a Job of the last rank."""
    args = {**row["model_args"], **SCRIPTS.get(family(row), {})}
    given = plain(args)
    missing = unmodelled(given, row)
    if missing:
        return Skip(missing)
    platform = str(row["platform"] or row["id"].rsplit("/", 1)[-1])
    device = next((name for key, name in DEVICES.items() if key in platform), None)
    variables = tuple((key, str(value)) for key, value in row["env_vars"].items())
    return of_arguments(args, world_of(given, row), 8, device, variables)


def of_arguments(
    args: Mapping[str, object],
    world: int,
    gpus_per_node: int,
    device: str | None,
    environment: tuple[tuple[str, str], ...],
) -> tuple[Job, MegatronFlags] | Skip:
    """A Megatron command line on a machine as the Job of the last pipeline rank."""
    given = plain(args)
    if "flextron" in given:
        return Skip("flextron: masks and routers of elastic training are not described by the arguments")
    engine = engine_of(args, world)
    mesh = engine.mesh
    assert mesh is not None
    micro = number(given, "micro-batch-size", 1)
    length = number(given, "decoder-seq-length" if "decoder-seq-length" in given else "seq-length")
    job = Job(
        architecture=architecture_of(args), engine=engine, world=world, gpus_per_node=gpus_per_node, device=device,
        sequences=micro, tokens=micro * length, longest=length,
        micro_batches=max(1, number(given, "global-batch-size", micro) // (micro * mesh.dp)), pp_rank=mesh.pp - 1,
        environment=environment,
    )  # fmt: skip
    return job, flags_of(args, job)


def world_of(given: Mapping[str, object], row: Mapping[str, Any]) -> int:
    """Ranks of the run: nodes * GPUs, fewer where the global batch is too small for that many replicas."""
    one = 1
    for axis in ("tensor", "pipeline", "context"):
        key = f"{axis}-parallel-size" if axis == "context" else f"{axis}-model-parallel-size"
        one *= number(given, key, 1)
    micro = number(given, "micro-batch-size", 1)
    published = str(row["nodes"]) != "None"  # without a sharded optimizer one replica is like another
    replicas = int(row["nodes"]) * int(row["gpus_per_node"]) // one if published else 1
    return one * max(1, min(replicas, number(given, "global-batch-size", micro) // micro))


def unmodelled(given: Mapping[str, object], row: Mapping[str, Any]) -> str:
    """The input that a row lacks, or the part of Megatron that has no model here; empty where it can be predicted."""
    sharded = ("use-distributed-optimizer", "use-megatron-fsdp", "num-experts")
    if str(row["nodes"]) == "None" and any(key in given for key in sharded):
        return "world size is not published"
    if row.get("mode") == "rl":
        return "an RL loop: inference engine and its buffers are not described by the arguments"
    if "fp8-format" in given and "bf16" not in given and "fp16" not in given:
        return "the precision beside fp8 is not stated"
    for key, what in (
        ("model-provider", "vision tower: sizes are in code"),
        ("img-h", "vision tower: sizes are in code"),
        ("export-kd-teacher-load", "distillation: a teacher whose sizes are in its checkpoint"),
    ):  # fmt: skip
        if key in given:
            return what
    return ""


def family(row: Mapping[str, Any]) -> str:
    return str(row["id"]).split("/")[1]


def half(row: Mapping[str, Any]) -> str:
    """`develop` or `held`: a split by the hash of the id, so that a figure can be given on rows nothing was fitted to."""
    return "develop" if int(hashlib.sha256(str(row["id"]).encode()).hexdigest(), 16) % 2 else "held"


def errors(rows: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Relative errors of each figure of each row, and how many rows were skipped for which reason."""
    found, skipped = [], dict[str, int]()
    for row in rows:
        guess = predict(row)
        if isinstance(guess, Skip):
            skipped[guess.reason] = skipped.get(guess.reason, 0) + 1
            continue
        found.append(
            {"id": row["id"], "family": family(row), "half": half(row)}
            | {"default_workspace": "gb200" in row["id"] and "CUBLAS_WORKSPACE_CONFIG" not in row["env_vars"]}
            | {name: guess[name] / row[MEASURED[name]] - 1 for name in FIGURES}
            | {f"{name}_bytes": guess[name] for name in FIGURES}
            | {f"{name}_measured": int(row[MEASURED[name]]) for name in FIGURES}
        )
    return found, skipped


def summary(found: list[dict[str, Any]], name: str) -> dict[str, float]:
    sizes = sorted(abs(one[name]) for one in found)
    return {
        "rows": len(found),
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "bias": statistics.mean(one[name] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all", action="store_true", help="also rows whose configuration changed after the run")
    given = parser.parse_args()
    rows = [json.loads(line) for line in Path(given.cases).read_text(encoding="utf-8").splitlines()]
    found, skipped = errors([row for row in rows if given.all or row.get("score")])
    if not found:
        raise SystemExit(f"{given.cases}: no row is marked for scoring (score: true); --all takes every row")
    groups = {"all": found}
    for one in found:
        groups.setdefault(one["family"], []).append(one)
        groups.setdefault(f"half: {one['half']}", []).append(one)
    if given.json:
        table = {group: {name: summary(members, name) for name in FIGURES} for group, members in groups.items()}
        print(json.dumps({"errors": table, "skipped": skipped, "rows": found}))
        return
    for group, members in groups.items():
        for name in FIGURES:
            one = summary(members, name)
            print(
                f"{group:14s} {name:7s} rows {one['rows']:4.0f}  median {100 * one['median']:6.3f} %"
                f"  p95 {100 * one['p95']:6.3f} %  bias {100 * one['bias']:+7.3f} %"
            )
    print("skipped:", skipped)
    for name in FIGURES:
        print(f"worst of {name}:")
        for one in sorted(found, key=lambda item: -abs(item[name]))[:10]:
            missed = (one[f"{name}_bytes"] - one[f"{name}_measured"]) / 2**20
            print(f"  {100 * one[name]:+7.2f} %  {missed:+9.1f} MiB  {one['id']}: {explanation(one)}")


if __name__ == "__main__":
    main()
