"""What a run's own configuration says, where its log prints it: a pretty-printed dict, Megatron's list, a Namespace."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowledger.record.importers.speakers import Speaker

QUOTED = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
MOST_LINES = 20_000
MOST_CHARACTERS = 1 << 20
FEWEST_KEYS = 5
MEGATRON_HEAD, MEGATRON_END = "- arguments -", "- end of arguments -"
MEGATRON_LINE = re.compile(r"\s*([A-Za-z_]\w*) \.{2,} ?(.*)$")
NAMESPACE = re.compile(r"\bNamespace\((?=\w+=)")
ENVIRONMENT = r"(?:[A-Z_][A-Z0-9_]*=\S* )*(?:\S*/)?"
COMMAND = re.compile(
    rf"\++ (?P<command>{ENVIRONMENT}(?:python[\d.]*|torchrun|accelerate|ray|trl|deepspeed|srun|nohup)\b .*)"
)
LAUNCHERS = ("torchrun ", "accelerate launch ", "deepspeed ", "-m torch.distributed.")  # what starts several ranks
# The same without the shell's `+`: behind a prompt or a word, and only what starts several ranks, with an option and a script.
ECHOED = re.compile(
    r"\s{0,8}(?:[$#>] |(?:cmd|command|launch(?:ing)?|running|executing)(?: command)?\s?[:=]\s?)?['\"`]?"
    rf"(?P<command>{ENVIRONMENT}(?:torchrun|accelerate launch|deepspeed|python[\d.]* (?:-u )?-m torch\.distributed\.(?:run|launch))"
    r"(?= [^\n]*--?\w)(?= [^\n]*(?:\.py\b| -m )) [^\n]*)",
    re.IGNORECASE,
)
TRAINS = re.compile(r"verl|main_ppo|grpo|ppo|rlhf|slime|areal|nemo|trl|train", re.IGNORECASE)

# A key at the top -> whose configuration it is.
TOP_KEYS = {
    "actor_rollout_ref": "verl", "grpo": "nemo_rl", "gconfig": "areal", "rollout_num_gpus": "slime",
    "rollout_batch_size": "slime", "micro_rollout_batch_size": "openrlhf", "num_generations": "trl",
}  # fmt: skip

# Symbols of the flow -> the keys that fix them, dotted, by framework.
SIZES: Mapping[str, Mapping[str, str]] = {
    "verl": {
        "B_prompt": "data.train_batch_size", "G": "actor_rollout_ref.rollout.n",
        "S_prompt": "data.max_prompt_length", "S_resp": "data.max_response_length",
    },
    "nemo_rl": {
        "B_prompt": "grpo.num_prompts_per_step", "G": "grpo.num_generations_per_prompt",
        "S": "policy.max_total_sequence_length",
    },
    "slime": {"B_prompt": "rollout_batch_size", "G": "n_samples_per_prompt", "S_resp": "rollout_max_response_len"},
    "areal": {"G": "gconfig.n_samples", "S_resp": "gconfig.max_new_tokens", "B_prompt": "train_dataset.batch_size"},
    "trl": {"G": "num_generations", "S_resp": "max_completion_length"},
}  # fmt: skip


@dataclass(slots=True)
class Dump:
    """A printed dict that goes over many lines of one process."""

    speaker: Speaker
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    size: int = 0

    def feed(self, text: str) -> bool:
        """Take a line. False once the dict is whole, or too long to be one."""
        self.lines.append(text)
        self.size += len(text)
        bare = QUOTED.sub("", text)
        self.depth += sum(bare.count(sign) for sign in "{[(") - sum(bare.count(sign) for sign in "}])")
        return self.depth > 0 and len(self.lines) < MOST_LINES and self.size < MOST_CHARACTERS

    @property
    def whole(self) -> bool:
        return self.depth == 0

    def read(self) -> dict[str, Any] | None:
        """The dict; None where it is none, or another process wrote into it."""
        try:
            found = ast.literal_eval("\n".join(self.lines).strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
        return found if isinstance(found, dict) and len(found) >= FEWEST_KEYS else None


def begins(text: str) -> bool:
    """Whether a line may be the first of a printed dict that goes on."""
    if not text.startswith("{'"):
        return False
    bare = QUOTED.sub("", text)
    return bare.count("{") > bare.count("}")


def namespace(text: str) -> dict[str, Any] | None:
    """`Namespace(a=1, b='x')` on one line, as argparse prints it; values that are no literals stay text."""
    found = NAMESPACE.search(text)
    if found is None or len(text) > MOST_CHARACTERS // 4:
        return None
    try:
        call = ast.parse(text[found.start() : text.rindex(")") + 1].strip(), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(call, ast.Call):
        return None
    return {key.arg: _literal(key.value) for key in call.keywords if key.arg}


def argument(text: str) -> tuple[str, Any] | None:
    """A line of Megatron's list, `  hidden_size ..................... 4096`."""
    found = MEGATRON_LINE.match(text)
    return (found[1], _scalar(found[2].strip())) if found is not None else None


def command(text: str) -> str | None:
    """The launch as a shell with `set -x` echoes it, or as a script does."""
    found = COMMAND.match(text[:20_000]) or ECHOED.match(text[:20_000])
    return found["command"].rstrip("'\"`") if found is not None and TRAINS.search(found["command"]) else None


def framework_of(config: Mapping[str, Any]) -> str | None:
    """Whose configuration it is, by its top keys."""
    return next((framework for key, framework in TOP_KEYS.items() if key in config), None)


def bindings(framework: str | None, config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the flow's symbols that a configuration fixes."""
    found = {symbol: value_at(config, key) for symbol, key in SIZES.get(framework or "", {}).items()}
    return {
        symbol: size
        for symbol, size in found.items()
        if isinstance(size, int) and not isinstance(size, bool) and size > 0
    }


def value_at(config: Any, key: str) -> Any:
    """What stands under a dotted key; None where nothing does."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ast.unparse(node)[:200]


def _scalar(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
