"""Checkpoints: where they go, whether they can, and writing one."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run.models import Policy, quiet


def folder_of(config: RunConfig) -> Path | None:
    """Where the checkpoints of a run go; None where it writes none."""
    if config.checkpoint is None or config.checkpoint.every_steps > config.steps:
        return None
    return Path(config.checkpoint.path or f"checkpoints/{config.name}").expanduser()


def due(config: RunConfig, step: int) -> bool:
    """Whether a checkpoint is written after this step."""
    return config.checkpoint is not None and (step + 1) % config.checkpoint.every_steps == 0


def check_room(config: RunConfig) -> None:
    """Refuse, before anything is trained, a place that cannot be written or that holds a checkpoint of this run's name.

    Raises BadInput.
    """
    folder = folder_of(config)
    if folder is None:
        return
    key = f"checkpoint.path = {str(folder)!r} ({config.source_of('checkpoint.path')})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".room-", dir=folder):
            there = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise BadInput(f"{key} cannot be written: {error.strerror or error}; give another directory") from None
    steps = (int(name.removeprefix("step-")) for name in there if name.removeprefix("step-").isdecimal())
    taken = sorted(step for step in steps if step < config.steps and due(config, step))
    if taken:
        raise BadInput(f"{key} already holds step-{taken[0]}; remove it, or give another checkpoint.path or name")


def write(policy: Policy, target: Path) -> None:
    """Write the policy in Hugging Face form, aside first and then renamed, so that a half one never stands there.

    Raises BadInput when it cannot be written.
    """
    aside = target.with_name(f"{target.name}.writing")
    model: Any = policy.model
    try:
        shutil.rmtree(aside, ignore_errors=True)  # what a run that was killed has left
        with quiet():
            model.save_pretrained(aside)
            policy.tokenizer.save_pretrained(aside)
        aside.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"checkpoint.path: cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
