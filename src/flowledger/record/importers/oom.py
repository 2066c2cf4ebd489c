"""The sizes in an allocator's last words."""

import re
from typing import NamedTuple

from flowledger.ledger.rows import MemoryRow

UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 1 << 10,
    "MB": 1 << 20,
    "GB": 1 << 30,
}
SIZE = r"(\d[\d.]{0,15}) (bytes|[KMGT]iB|[KMG]?B)"

# what it is called -> how it is printed, in the words of today's allocator and of older ones
SIZES = {
    "asked": re.compile(rf"[Tt]ried to allocate {SIZE}"),
    "capacity": re.compile(rf"total capac(?:i)?ty of {SIZE}|{SIZE} total capacity"),
    "free": re.compile(rf"of which {SIZE} is free|{SIZE} free[;.)]"),
    "in_use": re.compile(rf"this process has {SIZE} memory in use"),
    "allocated": re.compile(rf"{SIZE} is allocated by PyTorch|{SIZE} already allocated"),
    "idle": re.compile(rf"{SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{SIZE} reserved in total by PyTorch"),
    "graphs": re.compile(rf"with {SIZE} allocated in private pools"),
}
DEVICE = re.compile(r"\b(?:GPU|NPU|XPU) (\d{1,4})\b")


class Sizes(NamedTuple):
    """Bytes, by what the message calls them; None where it does not say."""

    asked: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None
    allocated: int | None = None
    idle: int | None = None
    reserved: int | None = None
    graphs: int | None = None


def sizes(message: str) -> Sizes:
    """Every size that a message of an allocator states."""
    found = {}
    for name, pattern in SIZES.items():
        if (match := pattern.search(message)) is not None:
            value, unit = (part for part in match.groups() if part)
            try:
                found[name] = round(float(value) * UNITS[unit])
            except ValueError:
                continue
    return Sizes(**found)


def memory_row(said: Sizes) -> MemoryRow | None:
    """The device at the moment of the crash; None where the message says too little."""
    reserved = said.reserved
    if reserved is None and said.allocated is not None and said.idle is not None:
        reserved = said.allocated + said.idle
    used = said.capacity - said.free if said.capacity is not None and said.free is not None else None
    if said.allocated is None and used is None:
        return None
    return MemoryRow(
        instant="crash",
        kind="total",
        allocated=said.allocated,
        reserved=reserved,
        device_used=used,
        limit=said.capacity,
    )


def sentences(said: Sizes) -> list[str]:
    """The sizes, one sentence each, with their bytes."""
    words = {
        "asked": "it asked for", "capacity": "the device has", "free": "free were", "in_use": "the process held",
        "allocated": "PyTorch had allocated", "idle": "reserved but not allocated were", "reserved": "PyTorch had reserved",
        "graphs": "of it in private pools (CUDA graphs) were",
    }  # fmt: skip
    told = ((name, getattr(said, name)) for name in words)
    return [f"{words[name]} {size / (1 << 30):.2f} GiB ({size:,} bytes)" for name, size in told if size is not None]
