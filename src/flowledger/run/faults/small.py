"""The run that faults are put into: a tiny model, two prompts of four responses each, on the CPU, in a fraction of a second.

Half of the responses end early, rewards differ within a group, and two optimizer steps a step let the policy move, so
that what a fault spoils has something to be wrong in.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowledger.config.complaints import complaints
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.flow.seams import Function
from flowledger.run.reward_process import Verdict
from flowledger.run.reward_worker import answer, build

PROMPTS = (
    "count:",
    "spell it:",
    "list the digits:",
    "say something:",
    "go on",
    "in short:",
    "letters, please:",
    "a b c",
)
SETTINGS: dict[str, Any] = {
    "name": "selftest", "threads": 1, "device": "cpu",
    "model": {"tiny": {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}},
    "data": {"prompts_per_step": 2, "max_prompt_tokens": 32, "chat_template": False},
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12, "stop_token_ids": list(range(32))},
    "reward": {
        "components": [
            {"name": "letters", "kind": "function", "path": "flowledger.run.faults.small:letters", "weight": 1.0},
            {"name": "variety", "kind": "function", "path": "flowledger.run.faults.small:variety", "weight": 0.5},
        ]
    },
    "actor": {"micro_batch": {"samples": 2}, "mini_batch_prompts": 1},
    "optim": {"lr": 1e-3},
    "record": {"level": "tokens", "groups": 2, "ops_every": 0},
}  # fmt: skip


def letters(response: str, answer: str) -> float:
    """The share of the response that is letters."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


def variety(response: str, answer: str) -> float:
    """The share of its characters that differ."""
    return len(set(response)) / max(1, len(response))


def settings(folder: Path, steps: int, seed: int, changes: Mapping[str, Any]) -> RunConfig:
    """The small run with these changes, of dotted keys or nested sections; its prompts are written into `folder`.

    Raises BadInput where the changes are no configuration, a line for each fault.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in PROMPTS), "utf-8")
    wanted = merged(merged(SETTINGS | {"seed": seed}, changes), {"steps": steps, "data.path": str(prompts)})
    try:
        return RunConfig.model_validate(wanted)
    except ValidationError as error:
        raise BadInput("\n".join(complaints(error, {}, None))) from None


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections merged into each other; a dotted key means the sections that it names."""
    made = dict(base)
    for key, value in changes.items():
        first, dot, rest = key.partition(".")
        value = {rest: value} if dot else value
        under = made.get(first)
        if isinstance(value, Mapping):
            made[first] = merged(under if isinstance(under, Mapping) else {}, value)
        else:
            made[first] = value
    return made


class RewardsHere:
    """Rules called in this process: one of its own for each of many short runs takes longer than the run."""

    def __init__(self, setup: Mapping[str, Any], *, timeout_s: float) -> None:
        self._rules = build(setup)

    def wait_ready(self) -> None:
        """It is."""

    def close(self) -> None:
        """There is nothing to end."""

    def ask(self, jobs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict a job, in order."""
        told = [answer(self._rules[job["component"]], job) for job in jobs]
        return [Verdict(one.get("value"), "reward_error" if "error" in one else None, one.get("error")) for one in told]


def rewards_here(original: Function) -> Function:
    """In the place of the class RewardProcess."""
    return RewardsHere


def sharp(original: Function) -> Function:
    """A tiny model whose attention looks at some tokens more than at others: as drawn it would not notice where they stand."""

    def causal_lm(*args: Any, **words: Any) -> Any:
        model = original(*args, **words)
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data *= SHARPER
        return model

    return causal_lm


SHARPER = 8.0
HERE = (("flowledger.run.rewards:RewardProcess", rewards_here), ("flowledger.run.tiny:causal_lm", sharp))


def drops_some(sample_id: int, response: list[int]) -> bool:
    """Aborts one sample in five after its first token."""
    return sample_id % 5 == 2 and len(response) > 0


def nods(messages: list[dict[str, str]]) -> str:
    """An environment that says one word to each turn."""
    return "yes"
