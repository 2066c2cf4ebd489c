"""Accelerators: one row each in `gpus.toml`, with memory, bandwidths and matrix rate, and the source of each."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.flow.errors import BadInput, nearest

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, as a process sees it."""

    name: str
    vendor: str
    memory_bytes: int  # all that the runtime gives a process: `total_memory` of torch
    driver_bytes: int | None  # what the vendor's tool shows, a little more
    hbm_bytes_per_s: float
    matrix_flops: float  # dense bfloat16, in operations a second
    float32_flops: float | None  # the same of float32, in full precision; None where no data sheet states it
    link_bytes_per_s: float  # to the other devices of a node, both directions together
    sm: int | None  # CUDA compute capability times 10; null on other vendors
    source: str
    date: str
    aliases: tuple[str, ...]

    def flops(self, dtype: str) -> float:
        """Peak of products in a dtype; that of bfloat16 where no other is known, as of types of 8 bits."""
        return self.float32_flops if dtype == "float32" and self.float32_flops else self.matrix_flops


@cache
def gpu(name: str) -> Gpu:
    """The row of a device by name or alias; case, spaces and dashes do not matter: `h100-80g`, `H100`, `a100 80gb`.

    Raises BadInput with the nearest known name.
    """
    found = _by_plain_name().get(_plain(name))
    if found is None:
        spellings = sorted({alias for row in gpus().values() for alias in _names(row)})
        hint = nearest(name.casefold(), spellings) or f"; known are {', '.join(gpus())}"
        raise BadInput(f"no device is called {name!r}{hint}")
    return found


@cache
def gpus() -> Mapping[str, Gpu]:
    """Every device of the table by its name."""
    text = files("flowledger.tables").joinpath("gpus.toml").read_text(encoding="utf-8")
    return {raw["name"]: _row(raw) for raw in tomllib.loads(text)["gpu"]}


@cache
def _by_plain_name() -> Mapping[str, Gpu]:
    return {_plain(alias): row for row in gpus().values() for alias in _names(row)}


def _names(row: Gpu) -> Iterator[str]:
    yield row.name
    yield from row.aliases


def _plain(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB`, `a100 sxm4 80g` are the same words: no vendor, no separators, `g` for `gb`."""
    words = re.sub(r"\b(nvidia|amd|instinct|huawei|intel|google|tesla|geforce)\b", "", name.casefold())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=\d)gb?\b", "g", words))


def _row(raw: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=raw["name"],
        vendor=raw["vendor"],
        memory_bytes=round(raw["memory_gib"] * GIB),
        driver_bytes=raw["driver_mib"] * MIB if "driver_mib" in raw else None,
        hbm_bytes_per_s=raw["hbm_gb_per_s"] * 1e9,
        matrix_flops=raw["matrix_tflops"] * 1e12,
        float32_flops=raw["float32_tflops"] * 1e12 if "float32_tflops" in raw else None,
        link_bytes_per_s=raw["link_gb_per_s"] * 1e9,
        sm=raw.get("sm"),
        source=raw["source"],
        date=raw["date"],
        aliases=tuple(raw["aliases"]),
    )
