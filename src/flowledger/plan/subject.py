"""What a plan is about: the sizes of its model and the figures of its device, by name or from a file."""

from dataclasses import replace
from pathlib import Path

from flowledger.config.model_file import read_model
from flowledger.config.schema import RunConfig
from flowledger.config.settings import UNKNOWN_MODEL
from flowledger.config.slime import engine as slime_engine
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables.gpus import Gpu, gpu
from flowledger.tables.models import Architecture, Moe, find, models

TINY_VOCAB = 264  # 256 bytes and 8 special tokens: the tokenizer that comes with `model.path: tiny`


def architecture_of(config: RunConfig, model: str | None) -> Architecture:
    """The sizes of the policy: `model` where given (a name of the catalogue, a config.json, a directory), else `model.path`.

    Raises BadInput with the nearest names of the catalogue.
    """
    if model is None and config.model.path == "tiny" and config.framework == "flowledger":
        return _tiny(config)
    own = slime_engine.architecture_of(config.raw) if model is None and config.framework == "slime" else None
    if own is not None:  # Megatron's flags say the sizes; the checkpoint, what the model is called
        known = find(config.model.path)
        return known if known and _same(known, own) else own
    named = model or config.model.path
    if (found := find(named)) is not None:
        return found
    if _is_there(named):
        return read_model(Path(named).expanduser())
    if model is None and named == UNKNOWN_MODEL:
        raise BadInput(f"{config.source_of('model.path')}; or --model NAME")
    source = "--model" if model else f"model.path ({config.source_of('model.path')})"
    last = named.rstrip("/").rpartition("/")[2]
    raise BadInput(
        f"{source} = {named!r}: no such model in the catalogue, and no such file{nearest(last, models())}; "
        "give --model NAME or --model path/to/config.json"
    )


def other_model(path: str, config: RunConfig, policy: Architecture) -> Architecture | None:
    """The sizes of a model beside the policy (critic, reference); None where neither catalogue nor directory says them."""
    if path == "tiny" and config.framework == "flowledger":  # made here, over the policy's tokens
        return replace(_tiny(config), vocab=policy.vocab)
    there = Path(path).expanduser()
    return find(path) or (read_model(there) if _is_there(str(there / "config.json")) else None)


def device_of(name: str | None, config: RunConfig) -> Gpu | None:
    """The device asked for, else the configuration's own; None for a CPU. Raises BadInput with the nearest names."""
    named = name or config.hardware.gpu
    return None if named is None or named == "cpu" else gpu(named)


def _same(known: Architecture, built: Architecture) -> bool:
    """Whether flags build a model of the catalogue: the same sizes, its vocabulary perhaps padded."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
    return all(getattr(known, size) == getattr(built, size) for size in sizes) and built.vocab >= known.vocab


def _is_there(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):
        return False


def _tiny(config: RunConfig) -> Architecture:
    sizes = config.model.tiny
    moe = Moe(experts=sizes.experts, topk=sizes.experts_per_token, ffn=sizes.ffn_size) if sizes.experts else None
    return Architecture(
        name="tiny", layers=sizes.layers, hidden=sizes.hidden_size, heads=sizes.heads, kv_heads=sizes.kv_heads,
        head_dim=sizes.hidden_size // sizes.heads, ffn=sizes.ffn_size, vocab=TINY_VOCAB, tied=True,
        moe=moe, qk_norm="head" if moe else "none",
        source="model.tiny of the configuration",
    )  # fmt: skip
