"""GPUs, their memory and the model, as people name them in a sentence."""

import re
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.tables.gpus import GIB, gpu
from flowledger.tables.models import Architecture, find

COUNTS = (
    r"(\d+)\s*(?:nodes?|machines?)\s*(?:x|×|\*|of|with)\s*(\d+)\s*(?:x|×)?\s*(?:\w+\s*)?(?:gpus?|cards?|[AHBVL]\d{2,3})",
    r"(\d+)\s*(?:x|×)\s*(\d+)\s*(?:x|×)?\s*(?:nvidia )?(?:gpus?|[AHBVL]\d{2,3})",
    r"(\d+)\s*(?:x|×|\*)?\s*(?:gpus?\b|cards?\b|(?:nvidia )?(?:[AHBVL]\d{2,3}|RTX)\b)",
    r"\b(?:[AHBVL]\d{2,3}|RTX)[\w ]*?(?:\d+ ?GB)?\s*(?:x|×|\*)\s*(\d+)",
    r"(?:gpu|gib\)|gb\)?)\s*(?:x|×)\s*(\d+)",
)  # fmt: skip
GPU = re.compile(r"\b((?:GB|[AHBVL])\d{2,3}[A-Z]?|RTX[ -]?(?:PRO[ -]?)?\d{4}|\d090)\b", re.IGNORECASE)
SIZED = re.compile(r"(\d{2,3}(?:\.\d+)?)[ -]?(?:GB|GiB|G)\b(?![^,;]{0,8}(?:RAM|host|system))", re.IGNORECASE)
HOST = re.compile(r"(\d{2,5}(?:\.\d+)?) ?(?:GB|GiB|G) (?:of )?(?:RAM|host|system|CPU|memory)", re.IGNORECASE)
PARAMETERS = re.compile(r"(?<![\w.])(\d{1,4}(?:\.\d+)?) ?[bB]\b")
NAMED = re.compile(r"[A-Za-z][\w.]*[-_/][\w./-]*")
FAMILIES = (
    (r"qwen ?3\.5|qwen3\.5", 248320),
    (r"qwen", 151936),
    (r"llama-?3|llama 3|deepscaler|r1-distill-qwen", 128256),
)


def hardware(words: str) -> dict[str, Any]:
    """`world`, `gpu_gib`, `host_gib`, as far as the words say."""
    found: dict[str, Any] = {**ranks(words)}
    host = HOST.search(words)
    if host:
        found["host_gib"] = float(host[1])
    name, memory = _device(words)
    found |= {"gpu_gib": memory} if memory else {}
    return {**found, "gpu_name": name} if name else found


def ranks(words: str) -> dict[str, int]:
    """`world`: how many GPUs there are in all."""
    match = next((found for one in COUNTS if (found := re.search(one, words, re.IGNORECASE))), None)
    return {"world": int(match[1]) * (int(match[2]) if match.lastindex == 2 else 1)} if match else {}


def _device(words: str) -> tuple[str | None, float | None]:
    """The device as the catalogue has it, and its memory in GiB: where the name is not known, the size that stands beside it."""
    named, sized = GPU.search(words), SIZED.search(HOST.sub("", words))
    for name in (f"{named[1]} {sized[1]}GB" if named and sized else "", named[1] if named else ""):
        try:
            if name:
                return gpu(name).name, round(gpu(name).memory_bytes / GIB, 2)
        except BadInput:
            continue
    return None, float(sized[1]) if sized and 8 <= float(sized[1]) <= 300 else None


def model(words: str) -> dict[str, Any]:
    """Sizes of the named model: from the catalogue, else the parameters of its name (`7B`) and its family's vocabulary."""
    row = _catalogued(words)
    if row is not None:
        return {
            "params_b": (row.published or 0) / 1e9 or _parameters(words), "vocab": row.vocab, "heads": row.heads,
            "kv_heads": row.kv_heads, "model_name": row.name, "layers": row.layers, "hidden": row.hidden, "head_dim": row.head_dim,
            "moe": row.moe is not None, **({"experts": row.moe.experts} if row.moe else {}),
        }  # fmt: skip
    found: dict[str, Any] = {"params_b": _parameters(words)}
    vocab = next((size for family, size in FAMILIES if re.search(family, words, re.IGNORECASE)), None)
    found |= {"vocab": vocab} if vocab else {}
    return {name: value for name, value in found.items() if value}


def _catalogued(words: str) -> Architecture | None:
    if len(words) < 200 and (whole := find(words)):
        return whole
    return next((row for name in NAMED.findall(words[:20000]) if (row := find(name.strip(".-/_")))), None)


def _parameters(words: str) -> float | None:
    match = PARAMETERS.search(words[:20000])
    return float(match[1]) if match else None
