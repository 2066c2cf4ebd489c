"""The meshes that the equality matrix goes through: one row a combination, by number of processes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowledger.config.schema import RunConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A mesh, and what else it takes: sections of a configuration that replace the plain ones key by key."""

    name: str
    mesh: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        size = 1
        for axis in ("dp", "tp", "pp", "cp", "sp"):
            size *= self.mesh.get(axis, 1)
        return size


def _engine(**settings: Any) -> dict[str, dict[str, Any]]:
    return {"actor": {"engine": settings}}


SP = _engine(sequence_parallel=True)  # Megatron's, on tp
MOE = {"model": {"tiny": {"experts": 4, "experts_per_token": 2}}}
CRITIC = {"critic": {"path": "start"}, "algorithm": {"advantage": "gae"}}

COMBINATIONS: tuple[Combination, ...] = tuple(
    Combination(name=name, mesh=mesh, changes=changes[0] if changes else {})
    for name, mesh, *changes in (
        ("dp2", {"dp": 2}),
        ("dp2 critic", {"dp": 2}, CRITIC),
        ("tp2", {"tp": 2}),
        ("tp2 + sequence parallel", {"tp": 2}, SP),
        ("tp2 critic", {"tp": 2}, CRITIC),
        ("pp2 gpipe", {"pp": 2}, _engine(pipeline="gpipe")),
        ("pp2 1f1b", {"pp": 2}, _engine(pipeline="1f1b")),
        ("pp2 interleaved", {"pp": 2, "vpp": 2}, _engine(pipeline="interleaved")),
        ("pp2 critic", {"pp": 2}, CRITIC),
        ("sp2", {"sp": 2}),
        ("sp2 critic", {"sp": 2}, CRITIC),
        ("cp2 ring", {"cp": 2}),
        ("cp2 all-to-all", {"cp": 2, "cp_kind": "all_to_all"}),
        ("cp2 critic", {"cp": 2}, CRITIC),
        ("dp2 ep2", {"dp": 2, "ep": 2}, MOE),
        ("dp4", {"dp": 4}),
        ("tp4", {"tp": 4}),
        ("tp4 + sequence parallel", {"tp": 4}, SP),
        ("pp4 1f1b", {"pp": 4}),
        ("sp4", {"sp": 4}),
        ("cp4 ring", {"cp": 4}),
        ("cp4 all-to-all", {"cp": 4, "cp_kind": "all_to_all"}),
        ("dp2 tp2", {"dp": 2, "tp": 2}),
        ("dp2 tp2 + sequence parallel", {"dp": 2, "tp": 2}, SP),
        ("dp2 pp2", {"dp": 2, "pp": 2}),
        ("dp2 sp2", {"dp": 2, "sp": 2}),
        ("dp2 cp2", {"dp": 2, "cp": 2}),
        ("tp2 pp2", {"tp": 2, "pp": 2}),
        ("tp2 sp2", {"tp": 2, "sp": 2}),
        ("tp2 cp2", {"tp": 2, "cp": 2}),
        ("sp2 cp2", {"sp": 2, "cp": 2}),
        ("sp2 cp2 all-to-all", {"sp": 2, "cp": 2, "cp_kind": "all_to_all"}),
        ("pp2 sp2", {"pp": 2, "sp": 2}),
        ("pp2 cp2", {"pp": 2, "cp": 2}),
        ("dp4 ep2", {"dp": 4, "ep": 2}, MOE),
        ("dp4 ep4", {"dp": 4, "ep": 4}, MOE),
        ("dp2 ep2 tp2", {"dp": 2, "ep": 2, "tp": 2}, MOE),
        ("dp2 ep2 pp2", {"dp": 2, "ep": 2, "pp": 2}, MOE),
        ("dp2 tp2 pp2", {"dp": 2, "tp": 2, "pp": 2}, SP),
        ("dp2 sp2 cp2", {"dp": 2, "sp": 2, "cp": 2}),
        ("tp2 pp2 cp2", {"tp": 2, "pp": 2, "cp": 2}),
        ("dp4 ep2 tp2", {"dp": 4, "ep": 2, "tp": 2}, MOE),
    )
)


def config(changes: Mapping[str, Mapping[str, Any]], mesh: Mapping[str, Any] | None = None) -> RunConfig:
    """One step of a tiny model, with a reference and old log-probs, two optimizer steps, samples of unequal length.

    The learning rate is small: Adam turns rounding in a gradient that is nearly 0 into a step of the size of the
    learning rate, and the second optimizer step would start from other weights.
    """
    sections: dict[str, Any] = {
        "name": "parallel", "steps": 1, "threads": 1,
        "model": {"tiny": {"hidden_size": 64, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_size": 96}},
        "data": {
            "path": str(EXAMPLES / "classes.jsonl"), "prompts_per_step": 8, "max_prompt_tokens": 32, "chat_template": False,
        },
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12},
        "reward": {"components": [
            {"name": "in_class", "kind": "function", "path": f"{EXAMPLES / 'rewards.py'}:in_class"},
        ]},
        "algorithm": {"advantage": "remax", "kl_coef": 0.05, "entropy_coef": 0.01},
        "actor": {"mini_batch_prompts": 4, "micro_batch": {"samples": 4}, "old_log_prob": True},
        "ref": {"path": "start"},
        "optim": {"lr": LR, "eps": 1e-7},
        "mesh": dict(mesh or {}),
    }  # fmt: skip
    for section, values in changes.items():
        sections[section] = _merged(sections.get(section, {}), values)
    return RunConfig(**sections)


LR = 5e-5


def of_equal_lengths(changes: Mapping[str, Mapping[str, Any]], mesh: Mapping[str, Any], folder: Path) -> RunConfig:
    """The same with a larger model and prompts of one length: peaks are planned for samples of full length.

    Every expert is asked for every token: how many tokens a router gives to each is then what is planned, an equal share.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": letter * PROMPT, "answer": "digits"}) + "\n" for letter in "abcdefgh")
    )
    larger = {"hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_size": 704}
    fixed = {
        "model": {"tiny": larger},
        "data": {"path": str(prompts), "max_prompt_tokens": PROMPT},
        "algorithm": {"advantage": "grpo", "entropy_coef": 0.0},
        "actor": {"mini_batch_prompts": 8},
    }
    sections = _merged(fixed, changes)
    if experts := sections["model"]["tiny"].get("experts"):
        sections = _merged(sections, {"model": {"tiny": {"experts_per_token": experts}}})
    return config(sections, mesh)


PROMPT = 32


def _merged(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(plain[name], value)
        for name, value in changes.items()
        if isinstance(value, Mapping) and isinstance(plain.get(name), Mapping)
    }
    return {**plain, **changes, **inner}
