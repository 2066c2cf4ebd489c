"""Small worlds that tests share: a tiny model, prompts and rewards of a few tokens, built in a fraction of a second."""

from pathlib import Path
from typing import Any

from flowledger.config.schema import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


def config(**changes: dict[str, Any] | Any) -> RunConfig:
    """A run of two prompts with three responses each; sections given are merged into it."""
    sections: dict[str, Any] = {
        "name": "small", "steps": 1, "threads": 1,
        "model": {"tiny": {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}},
        "data": {"path": str(EXAMPLES / "classes.jsonl"), "prompts_per_step": 2, "max_prompt_tokens": 32, "chat_template": False},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 8},
        "reward": {"components": [{"name": "in_class", "kind": "function", "path": f"{EXAMPLES / 'rewards.py'}:in_class"}]},
        "actor": {"micro_batch": {"samples": 2}},
        "optim": {"lr": 0.001},
    }  # fmt: skip
    for name, value in changes.items():
        sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig(**sections)
