"""Whose configuration is this? Finds the framework of a file or a launch script and hands it to that framework's reader."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from flowledger.config import read as own
from flowledger.config.foreign import Reading
from flowledger.config.near_key import near
from flowledger.config.shell.launches import Launched, launches
from flowledger.config.shell.word import NO_GAP, Word, gap_of
from flowledger.config.shown import shown_setting
from flowledger.config.yaml_text import document, text_of
from flowledger.flow.errors import BadInput, nearest

READERS = ("verl", "trl", "openrlhf", "slime", "areal", "nemo_rl")  # each has config/<name>/read.py
FRAMEWORKS = ("flowledger", *READERS)

# A word of a command line -> the framework that it starts. The first that is found anywhere in it wins.
COMMANDS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)verl(\.|$)|main_ppo|fully_async_main", "verl"),
    (r"openrlhf\.|train_ppo_ray", "openrlhf"),
    (r"(^|/)areal(/|\.|$)", "areal"),
    (r"nemo_rl", "nemo_rl"),
    (r"^trl$", "trl"),
)
# A flag that only one framework knows -> that framework: what a program takes says more than what its file is called.
FLAGS: dict[str, tuple[str, ...]] = {
    "trl": (
        "num_generations", "max_completion_length", "reward_funcs", "vllm_mode", "num_iterations", "steps_per_generation",
        "scale_rewards", "mask_truncated_completions", "generation_batch_size",
    ),
    "slime": (
        "hf_checkpoint", "rollout_num_gpus", "rollout_num_gpus_per_engine", "num_rollout", "rollout_max_response_len",
        "over_sampling_batch_size", "sglang_mem_fraction_static", "num_steps_per_rollout", "max_tokens_per_gpu",
    ),
    "openrlhf": (
        "vllm_num_engines", "vllm.num_engines", "actor.num_nodes", "micro_rollout_batch_size", "rollout.micro_batch_size",
        "colocate_all_models", "train.colocate_all",
    ),
}  # fmt: skip
# A program's name that several might have -> the framework that it most likely is, where nothing else tells.
PROGRAMS: tuple[tuple[str, str], ...] = (
    (r"(^|/)run_grpo\w*\.py$", "nemo_rl"),
    (r"(^|/)train(_async)?\.py$", "slime"),
    (r"grpo|GRPO", "trl"),
)
LAUNCHERS = {"accelerate": ("trl",)}  # launcher -> frameworks of PROGRAMS that it may start
# A key of a YAML file -> its framework, in this order: the first key that is there decides.
KEYS: tuple[tuple[str, str], ...] = (
    ("actor_rollout_ref", "verl"),
    ("grpo", "nemo_rl"),
    ("policy", "nemo_rl"),
    ("defaults", "nemo_rl"),
    ("gconfig", "areal"),
    ("allocation_mode", "areal"),
    ("train_dataset", "areal"),
    ("num_generations", "trl"),
    ("per_device_train_batch_size", "trl"),
    ("rollout", "flowledger"),
    ("data", "flowledger"),
    ("model", "flowledger"),
)


def reader(framework: str) -> Callable[..., Reading]:
    """The `read` of one framework; only that framework's tables and code are loaded."""
    found: Callable[..., Reading] = import_module(f"flowledger.config.{framework}.read").read
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user gave beside the file."""

    overrides: Sequence[str] = ()
    framework: str | None = None
    version: str | None = None
    assume: Mapping[str, str] | None = None
    script_arguments: Sequence[str] = ()
    launch: int | None = None  # which command line of a script, from 1


def read(source: str, asked: Asked) -> Reading:
    """The Reading of a configuration file, launch script, or of overrides alone (`verl key=value …`).

    Raises BadInput for a file that no reader takes, with what each would look for.
    """
    reading = _read(source, asked)
    used = {one.partition("=")[0] for one in reading.assumed}
    idle = [name for name in asked.assume or {} if name not in used]
    return replace(reading, notes=(*reading.notes, *(_idle(name, asked, reading) for name in idle)))


def _idle(name: str, asked: Asked, reading: Reading) -> str:
    """Why an assumption changed nothing."""
    given = f"--assume {shown_setting(f'{name}={(asked.assume or {})[name]}')} was not needed"
    if name in reading.config.raw:
        return f"{given}: the launch sets {name} itself, and its own value counts"
    return f"{given}: nothing asked for it{near(name, reading.config.raw)}"


def _read(source: str, asked: Asked) -> Reading:
    if asked.framework is not None and asked.framework not in FRAMEWORKS:
        raise BadInput(
            f"--framework {asked.framework!r} is none of {', '.join(FRAMEWORKS)}{nearest(asked.framework, FRAMEWORKS)}"
        )
    path = Path(source)
    if path.suffix == ".py":
        raise BadInput(
            f"{source} is Python, which is never executed: give the script that launches it (`accelerate launch …`, `trl grpo …`, "
            "`python -m verl.trainer.main_ppo …`), or a YAML file of its settings, such as the fields of GRPOConfig"
        )
    if source in READERS and not path.exists():
        return reader(source)(None, asked.overrides, assume=asked.assume or {}, version=asked.version)
    if _is_script(path):
        return _script(path, asked)
    framework = asked.framework or _framework_of(path)
    if framework == "flowledger":
        return Reading(config=own.read(path, asked.overrides))
    return reader(framework)(path, asked.overrides, assume=asked.assume or {}, version=asked.version)


def _is_script(path: Path) -> bool:
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba|z|da)?sh\b", file.readline(200)))


def _script(path: Path, asked: Asked) -> Reading:
    there = launches(path, asked.script_arguments, os.environ, asked.assume)  # `MODEL_PATH=… flowledger plan run.sh`
    found = [(framework_of(one.argv), one) for one in there]
    known = [(asked.framework or framework, one) for framework, one in found if asked.framework or framework]
    if not known:
        started = "; ".join(" ".join(one.argv[:4]) for _, one in found[:3]) or "nothing that trains"
        raise BadInput(
            f"{path}: starts no training that is known ({started}); name it with --framework {'|'.join(READERS)}"
        )
    framework, launched = _chosen(known, asked.launch, path)
    if framework not in READERS:
        raise BadInput(f"{path}:{launched.line}: a script cannot start framework {framework!r}")
    try:
        if framework in ("areal", "nemo_rl"):
            reading = _from_yaml_flag(path, launched, framework, asked)
        else:
            reading = reader(framework)(launched, asked.overrides, assume=asked.assume or {}, version=asked.version)
    except BadInput as error:
        name = None if asked.framework else _guessed(launched.argv)[1]
        raise BadInput(f"{error}{_otherwise(framework, name)}") from None
    used = (f"{name}={(asked.assume or {})[name]}" for name in launched.assumed)
    return replace(reading, assumed=tuple(dict.fromkeys((*reading.assumed, *used))))


def _chosen(known: Sequence[tuple[Any, Launched]], launch: int | None, path: Path) -> tuple[str, Launched]:
    """The launch asked for, else the last: a script that prepares first, trains last."""
    if launch is None:
        return known[-1]
    if not 1 <= launch <= len(known):
        raise BadInput(f"{path} starts {len(known)} trainings; --launch {launch} is none of them")
    return known[launch - 1]


def framework_of(argv: Sequence[str]) -> str | None:
    """The framework a command line starts, or None: by what is started, by its flags, at last by a program's name."""
    heads = _heads(argv)
    found = next((one for pattern, one in COMMANDS if any(re.search(pattern, word) for word in heads)), None)
    return found or _by_flags(argv) or _guessed(argv)[0]


def _heads(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if not word.startswith("-") and "=" not in word]


def _by_flags(argv: Sequence[str]) -> str | None:
    """The framework that knows most of the flags which only one knows."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    counts = {framework: len(given & set(names)) for framework, names in FLAGS.items()}
    best = max(counts, key=lambda framework: counts[framework])
    return best if counts[best] else None


def _guessed(argv: Sequence[str]) -> tuple[str | None, str | None]:
    """(framework, the program's name that it rests on) where nothing but that name tells, else (None, None)."""
    heads = _heads(argv)
    surely = any(re.search(pattern, word) for pattern, _ in COMMANDS for word in heads)
    if surely or _by_flags(argv):
        return None, None
    may = next((LAUNCHERS[word] for word in heads if word in LAUNCHERS), READERS)
    for pattern, framework in PROGRAMS:
        named = next((word for word in heads if re.search(pattern, word)), None)
        if named is not None and framework in may:
            return framework, Path(named).name
    return None, None


def _otherwise(framework: str, name: str | None) -> str:
    """What a refusal adds where the framework was guessed by the name of a program."""
    return f"; taken for {framework} because of {name}: --framework says otherwise" if name else ""


def _from_yaml_flag(path: Path, launched: Launched, framework: str, asked: Asked) -> Reading:
    """`python run.py --config x.yaml a.b=c`: the YAML file, with the command line's overrides before the user's."""
    words = list(launched.argv)
    at = next((index for index, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None:
        raise BadInput(f"{path}:{launched.line}: {framework} is started without --config; name the YAML file instead")
    named = words[at].partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
    placed = list(zip(words, launched.places, strict=True))[at + 1 :]
    overrides = [
        Word(word, gap_of(word) or NO_GAP, place) for word, place in placed if "=" in word and not word.startswith("--")
    ]
    for file in (path.parent / named, Path(named)):
        if file.is_file():
            return reader(framework)(
                file, [*overrides, *asked.overrides], assume=asked.assume or {}, version=asked.version
            )
    raise BadInput(f"{path}:{launched.line}: --config {named}: no such file beside the script or here")


def _framework_of(path: Path) -> str:
    """By the keys at the top of a YAML or JSON file. Raises BadInput where none is known."""
    value, _, line = document(text_of(path), str(path))
    keys = {str(key).partition(".")[0] for key in value} if isinstance(value, dict) else set()
    for key, framework in KEYS:
        if key in keys:
            return framework
    if line is None:
        return "flowledger"  # its own reader says what an empty file lacks
    raise BadInput(
        f"{path}: no framework is recognised by its keys ({', '.join(sorted(keys)[:6]) or 'none'}); "
        f"name it with --framework {'|'.join(FRAMEWORKS)}"
    )
