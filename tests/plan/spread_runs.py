"""One step on two or four forked ranks for each axis, as it was recorded: made once, for all tests of the planned shards."""

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flowledger.config.schema import RunConfig
from flowledger.ledger.rows import Row
from tests.run import worlds

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
SMALL = {"hidden_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 20}
TWO_PROMPTS = {"data": {"prompts_per_step": 2}}

# name -> (mesh, what else is set). Three prompts for two ranks, so that some pieces are uneven.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {"actor": {"mini_batch_prompts": 1, "epochs": 2}}),
    "tp2": ({"tp": 2}, {"actor": {"log_prob_chunk_tokens": 7, "engine": {"sequence_parallel": True}}}),
    "pp2": ({"pp": 2}, {}),
    "sp2": ({"sp": 2}, {"actor": {"activation_checkpointing": True}}),
    "cp2": ({"cp": 2}, {"critic": {"path": "start"}, "algorithm": {"advantage": "gae"}}),
    "dp2 passes": (  # two mini-batches and passes that are not cut by them: 3 + 3 of 6 samples, and 4 + 2
        {"dp": 2},
        {
            "ref": {"path": "start", "micro_batch": {"samples": 4}},
            "algorithm": {"kl_coef": 0.1},
            "actor": {"mini_batch_prompts": 1, "log_prob_micro_batch": {"samples": 3}},
        },
    ),
    "tp2 padded": (  # and a KL without a weight, which is measured all the same
        {"tp": 2},
        {**TWO_PROMPTS, "actor": {"packed": False, "mini_batch_prompts": 2}, "ref": {"path": "start"}},
    ),
    "ep2 padded": (
        {"dp": 2, "ep": 2},
        {
            "model": {"tiny": {**SMALL, "experts": 4}},
            "ref": {"path": "start"},
            "algorithm": {"kl_in": "reward"},
            "actor": {"packed": False},
        },
    ),
    "dp2 pp2 critic": (  # chunks in the interleaved order; the critic has other stages, and two mini-batches to the policy's one
        {"dp": 2, "pp": 2, "vpp": 2},
        {
            "model": {"tiny": {**SMALL, "layers": 4}},
            **TWO_PROMPTS,
            "algorithm": {"advantage": "gae"},
            "actor": {"mini_batch_prompts": 2, "engine": {"pipeline": "interleaved"}},
            "critic": {
                "path": "start",
                "mini_batch_prompts": 1,
                "engine": {"pipeline": "interleaved", "layers_in_stages": [0, 2, 1, 1]},
            },
        },
    ),
    "tp2 critic": (  # it alone cuts norms along the tokens, in micro-batches of its own
        {"tp": 2},
        {
            **TWO_PROMPTS,
            "algorithm": {"advantage": "gae"},
            "actor": {"mini_batch_prompts": 2},
            "critic": {"path": "start", "micro_batch": {"samples": 5}, "engine": {"sequence_parallel": True}},
        },
    ),
    "ep2": ({"dp": 2, "ep": 2}, {"model": {"tiny": {**SMALL, "experts": 4}}}),
    "sp2 lora": (
        {"sp": 2},
        {
            "model": {"tiny": SMALL, "lora": {"rank": 3, "target_modules": ["q_proj", "up_proj"]}},
            "ref": {"path": "start"},
            "algorithm": {"kl_coef": 0.1},
        },
    ),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {"ref": {"path": "start"}, "algorithm": {"kl_coef": 0.1}}),
}


def config(name: str) -> RunConfig:
    """The configuration of a case."""
    mesh, changes = CASES[name]
    sections: dict[str, Any] = {
        "model": {"tiny": SMALL}, "data": {"prompts_per_step": 3}, "rollout": {"samples_per_prompt": 4},
        "actor": {"mini_batch_prompts": 3, "micro_batch": {"samples": 4}},
    }  # fmt: skip
    for key, value in changes.items():
        sections[key] = {**sections.get(key, {}), **value}
    return worlds.config(**sections, mesh=mesh)


def module(name: str) -> ModuleType:
    """A module of the benchmarks."""
    if BENCHMARKS not in sys.path:
        sys.path.insert(0, BENCHMARKS)
    return importlib.import_module(name)


@cache
def recorded(name: str) -> Sequence[Sequence[Row]]:
    """What every rank recorded of the first step."""
    mesh = CASES[name][0]
    size = 1
    for axis in ("dp", "tp", "pp", "sp", "cp"):
        size *= mesh.get(axis, 1)
    rows: list[list[Row]] = module("forked").ranks(size, module("shapes_agree").rows_of_step, config(name))
    return rows
