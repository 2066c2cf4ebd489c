"""Reads the sizes of a model from its `config.json`, as Hugging Face and its users write it.

`read_model("/models/Qwen3-8B")`. What each model type calls its sizes stands in `tables/model_types.toml`. The language
model of a vision-language model is read; its towers are not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowledger.config.model_layers import feed_forward_layers, kinds_of, linear_of
from flowledger.config.model_values import Values
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables.model_types import ModelType, generic, model_types, nested, refused
from flowledger.tables.models import Architecture, Mla, Moe

ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
NEEDED = ("hidden", "heads", "ffn", "vocab")


def read_model(path: str | Path) -> Architecture:
    """The architecture of a `config.json` or of a directory with one. Raises BadInput with one line."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    data = _language_model(_document(file))
    kind = str(data.get("model_type", ""))
    if kind in refused() or data.get("is_encoder_decoder"):
        raise BadInput(f"{file}: model_type = {kind!r}: an encoder is no language model that a policy can be")
    row = model_types().get(kind, generic())
    values = Values(file, {**row.defaults, **{key: value for key, value in data.items() if value is not None}})
    _refuse_missing(values, row, kind)
    return _architecture(values, row, kind, _name(file, data))


def _document(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist; a model is a directory with a config.json, or that file") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file} is not text") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise BadInput(f"{file}: cannot be the sizes of a model: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{file}: expected an object with the sizes of a model, found a {type(data).__name__}")
    return data


def _language_model(data: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model. Whether the head is tied, and the dtype, is said outside."""
    for key in nested():
        inner = data.get(key)
        if isinstance(inner, dict) and inner:
            outer = {
                name: data[name]
                for name in ("tie_word_embeddings", "dtype", "torch_dtype")
                if data.get(name) is not None
            }
            kind = {"model_type": data["model_type"]} if "model_type" in data else {}
            return _language_model({**kind, **inner, **outer})
    return data


def _refuse_missing(values: Values, row: ModelType, kind: str) -> None:
    missing = [field for field in NEEDED if values.first(row.keys[field]) is None and not _may_miss(values, row, field)]
    if "layers" not in missing and values.first(row.keys["layers"]) is None and kinds_of(values, row, None) == ():
        missing.insert(0, "layers")
    if not missing:
        return
    keys = ", ".join(row.keys[field][0] for field in missing)
    if kind in model_types():
        raise BadInput(f"{values.file}: missing {keys}: the sizes of a {kind} model need it")
    hint = nearest(kind, model_types()) if kind else ""
    raise BadInput(
        f"{values.file}: model_type = {kind!r} is not known{hint or ';'} and as a Llama-like model it lacks {keys}"
    )


def _may_miss(values: Values, row: ModelType, field: str) -> bool:
    """GPT-2 may leave out the width of its feed-forward: four times the hidden size."""
    return field == "ffn" and not row.gated and values.first(row.keys["hidden"]) is not None


def _architecture(values: Values, row: ModelType, kind: str, name: str) -> Architecture:
    keys = row.keys
    kinds = kinds_of(values, row, values.count(keys["layers"]))
    layers = values.count(keys["layers"]) or len(kinds)
    hidden, heads = values.needed(keys["hidden"]), values.needed(keys["heads"])
    kv_heads = values.count(keys["kv_heads"]) or heads
    if heads % kv_heads:
        raise BadInput(f"{values.file}: {keys['kv_heads'][0]} = {kv_heads}: must divide the {heads} attention heads")
    mla, moe = _mla(values), _moe(values, row, layers, kinds)
    fields: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": mla.qk_nope + mla.qk_rope if mla else values.count(keys["head_dim"]) or hidden // heads,
        "ffn": values.count(keys["ffn"]) or 4 * hidden,
        "vocab": values.needed(keys["vocab"]),
        "max_positions": (values.count(keys["max_positions"]) or 0) + row.position_offset,
        "mlp": _mlp(values, row),
        "kinds": kinds if set(kinds) != {"full"} else (),
        "window": values.count(["sliding_window"]) if "sliding" in kinds else None,
        "mla": mla,
        "moe": moe,
        "linear": linear_of(values, row) if "linear" in kinds else None,
        "dtype": str(values.first(["dtype", "torch_dtype"]) or "bfloat16").removeprefix("torch."),
    }
    fields |= {field: values.flag(keys[field]) for field in ("tied", "qkv_bias", "o_bias", "mlp_bias", "head_bias")}
    for key, switched in row.switch.items():
        fields |= switched if values.flag([key]) else {}
    known = "" if kind in model_types() else f": model_type {kind!r} is not known and was read as a Llama-like model"
    return Architecture(**{**fields, **row.fixed}, name=name, source=f"{values.file}{known}")


def _mlp(values: Values, row: ModelType) -> str:
    """The feed-forward by its activation: two branches with SiLU or GELU; one with GELU, ReLU or its square."""
    activation = str(values.first(list(ACTIVATION_KEYS)) or ("silu" if row.gated else "gelu"))
    if row.gated:
        return "geglu" if "gelu" in activation else "swiglu"
    return {"relu": "relu", "relu2": "squared_relu"}.get(activation, "gelu")


def _mla(values: Values) -> Mla | None:
    rank = values.count(["kv_lora_rank"])
    if rank is None:
        return None
    return Mla(
        q_lora=values.count(["q_lora_rank"]),
        kv_lora=rank,
        qk_nope=values.needed(["qk_nope_head_dim"]),
        qk_rope=values.needed(["qk_rope_head_dim"]),
        v=values.needed(["v_head_dim"]),
    )


def _moe(values: Values, row: ModelType, layers: int, kinds: tuple[str, ...]) -> Moe | None:
    keys = row.moe_keys
    experts = values.count(keys["experts"])
    routed = feed_forward_layers(values, layers, kinds)
    if experts is None or not routed:
        return None
    width, topk = values.needed(keys["ffn"]), values.needed(keys["topk"])
    if topk > experts:
        raise BadInput(f"{values.file}: {topk} experts a token: there are only {experts}")
    shared: int = values.count(keys["shared_ffn"]) or (values.count(keys["shared_count"]) or 0) * width
    return Moe(
        experts=experts,
        topk=topk,
        ffn=width,
        shared_ffn=shared,
        dense=tuple(
            layer for layer in range(layers) if layer not in routed and not (kinds and row.fixed.get("single"))
        ),
        **{key: value and (key != "shared_gate" or shared > 0) for key, value in row.moe_fixed.items()},
    )


def _name(file: Path, data: Mapping[str, Any]) -> str:
    """What the model calls itself, else its directory, else its file."""
    given = str(data.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return given or (file.resolve().parent.name if file.name == "config.json" else file.stem)
