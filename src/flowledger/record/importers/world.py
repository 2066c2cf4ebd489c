"""How many ranks a job had, and along which axes: by its configuration, by its launch command, else by those that were heard of."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from flowledger.record.importers.configs import value_at
from flowledger.record.importers.speakers import MOST_RANKS

MOST = 1 << 20  # ranks; who says more says something else

# Framework -> keys of which the product is the number of ranks that train; the first row of which all are there counts.
WORLD: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "verl": (("trainer.nnodes", "trainer.n_gpus_per_node"),),
    "nemo_rl": (("cluster.num_nodes", "cluster.gpus_per_node"),),
    "slime": (("actor_num_nodes", "actor_num_gpus_per_node"), ("world_size",)),
    "areal": (("cluster.n_nodes", "cluster.n_gpus_per_node"),),
    "openrlhf": (("actor_num_nodes", "actor_num_gpus_per_node"), ("world_size",)),
    "trl": (("world_size",),),
}
# Framework -> axis -> its key; what none of them cuts is `dp`. `megatron.` holds where that is the strategy, else it is a sp.
AXES: Mapping[str, Mapping[str, str]] = {
    "verl": {"sp": "actor_rollout_ref.actor.ulysses_sequence_parallel_size"},
    "verl/megatron": {
        "tp": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "pp": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "cp": "actor_rollout_ref.actor.megatron.context_parallel_size",
    },
    "slime": {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"},
    "nemo_rl": {"tp": "policy.dtensor_cfg.tensor_parallel_size", "cp": "policy.dtensor_cfg.context_parallel_size"},
}
PER_NODE = re.compile(
    r"--?n(?:proc[-_]per[-_]node|-?gpus[-_]per[-_]node)[ =][\"']?(\d{1,5})\b|\btrainer\.n_gpus_per_node=(\d{1,5})\b"
)
# `--nnodes=1:4`: as many as come, of these.
NODES = re.compile(
    r"(?:--?(?:nnodes|num[-_]machines)[ =]|\btrainer\.nnodes=)[\"']?(?:(\d{1,6})(?::(\d{1,6}))?(?![\w:]))?"
)
DEVICE = re.compile(r"\bGPU (\d{1,4}) has a total capacity")  # torch's own number of it
PROCESSES = re.compile(r"--num[-_]processes[ =](\d{1,7})\b")  # accelerate: of all machines


def ranks(framework: str | None, config: Mapping[str, Any], command: str | None, world: int | None) -> int:
    """How many there were, as the sources say; 0 where none does. world: what a trace says."""
    told = next((size for keys in WORLD.get(framework or "", ()) if (size := _product(config, keys))), 0)
    least, most = _launched(command or "")
    return told or world or (least if least == most else 0)


def heard_of(ranks: Iterable[int], workers: int, crashes: Iterable[str], command: str | None = None) -> int:
    """How many there were at least: ranks that anything was told of, processes that train, devices that ends speak of, the fewest of a launch."""
    devices = (int(found[1]) for text in crashes if (found := DEVICE.search(text)) is not None)
    return max([_launched(command or "")[0], workers, *(at + 1 for at in (*ranks, *devices) if at < MOST_RANKS)])


def mesh(framework: str | None, config: Mapping[str, Any], many: int) -> dict[str, int]:
    """Axis -> degree of so many ranks; empty where the configuration does not say how they are cut."""
    megatron = value_at(config, "actor_rollout_ref.actor.strategy") == "megatron"
    axes = AXES.get(f"{framework}/megatron" if framework == "verl" and megatron else framework or "", {})
    found = {axis: size for axis, key in axes.items() if (size := _size(value_at(config, key)))}
    if not found or many < 1 or many % prod(found.values()):
        return {}
    return {"dp": many // prod(found.values()), **found}


def _product(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    sizes = [_size(value_at(config, key)) for key in keys]
    return prod(sizes) if prod(sizes) <= MOST else 0


def _size(value: Any) -> int:
    """A number of ranks; 0 where it is none."""
    return value if type(value) is int and 0 < value <= MOST else 0


def _launched(command: str) -> tuple[int, int]:
    """(fewest, most) ranks that a command starts; (0, 0) where it does not say, or says what no job has."""
    if (all_of_them := PROCESSES.search(command)) is not None:
        fewest = most = int(all_of_them[1])
    elif (each := PER_NODE.search(command)) is None:
        return 0, 0
    else:
        fewest, most = (int(each[1] or each[2]) * nodes for nodes in _nodes(command))
        most = min(most, MOST)
    return (fewest, most) if 0 < fewest <= most <= MOST else (0, 0)


def _nodes(command: str) -> tuple[int, int]:
    """(fewest, most) machines of a launch: one where it names none, any number where it names one that cannot be read (`$NNODES`)."""
    if (found := NODES.search(command)) is None:
        return 1, 1
    if found[1] is None:
        return 1, MOST
    least = int(found[1])
    return least, int(found[2]) if found[2] else least
