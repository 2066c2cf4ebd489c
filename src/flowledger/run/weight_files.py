"""Weights read from disk: a directory in Hugging Face form, or a GGUF file, dequantised once and kept in that form.

Dequantising takes tens of seconds, so the result is kept under the user's cache directory; a file that has changed is
another key. Where nothing can be written there, the model is made anew each time.
"""

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from flowledger.flow.errors import BadInput

# Of the file's contents its head (the metadata), its tail and its size tell it apart; its date would not: each
# installation of a package has another.
SAMPLED_BYTES = 1 << 20


def load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file. Raises BadInput when it cannot be read."""
    kept = _place(file)
    if not (kept / "config.json").is_file():
        made = _dequantise(file)
        with contextlib.suppress(OSError):
            _keep(kept, *made)
        if not (kept / "config.json").is_file():
            return made[0].to(dtype), made[1]
    return from_directory(kept, dtype)


def from_directory(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a directory in Hugging Face form. Raises BadInput when it cannot be read."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        # By class where there is a tokenizer.json: what `Auto` picks by model type may split text differently.
        fast = (folder / "tokenizer.json").is_file()
        kind = transformers.PreTrainedTokenizerFast if fast else transformers.AutoTokenizer
        return model, kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"model.path: {folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


def _place(file: Path) -> Path:
    told = hashlib.sha256(f"{file.name}|{transformers.__version__}|".encode())
    with file.open("rb") as weights:
        told.update(weights.read(SAMPLED_BYTES))
        told.update(str(weights.seek(0, os.SEEK_END)).encode())
        weights.seek(-min(weights.tell(), SAMPLED_BYTES), os.SEEK_END)
        told.update(weights.read())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "flowledger" / "models" / told.hexdigest()[:24]


def _dequantise(file: Path) -> tuple[Any, Any]:
    place = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, **place)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting switches off
            model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    except (OSError, ValueError, KeyError, RuntimeError, IndexError) as error:
        raise BadInput(f"model.path: {file} cannot be read as GGUF: {' '.join(str(error).split())[:300]}") from None
    model.hf_quantizer = None  # the weights are plain floats from here on
    model.config.__dict__.pop("quantization_config", None)
    return model, tokenizer


def _keep(place: Path, model: Any, tokenizer: Any) -> None:
    """Write aside, then rename: another process sees a whole model or none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
