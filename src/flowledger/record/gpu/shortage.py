"""What an out-of-memory error of a GPU says, and the finding that comes of it and of the allocator's figures."""

import re
from typing import NamedTuple

from flowledger.flow.lost import CHAINED
from flowledger.ledger.rows import FindingRow
from flowledger.record.gpu.blocks import Held

KINDS, PLACES = 3, 5  # that a finding names: the largest
# Errors of other libraries that mean the same; they come as a RuntimeError.
_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_SAID = {
    "asked": re.compile(rf"[Tt]ried to allocate {_SIZE}"),
    "total": re.compile(rf"total capac?i?ty of {_SIZE}"),  # so spelt before torch 2.3
    "free": re.compile(rf"of which {_SIZE} is free"),
    "process": re.compile(rf"this process has {_SIZE} memory in use"),
}


class Said(NamedTuple):
    """The sizes in the text of an error, in bytes, as it rounds them (CUDACachingAllocator.cpp)."""

    asked: int | None = None
    total: int | None = None
    free: int | None = None
    process: int | None = None  # in use by this process, in torch's allocator and outside


class Shortage(NamedTuple):
    """All that is known of one."""

    where: str
    said: Said
    allocated: int | None
    reserved: int | None
    peak: tuple[int, str] | None  # the highest of the process so far, and where that was
    held: list[Held]  # what fills it, where a history was kept

    @property
    def fragmentation(self) -> float | None:
        """The part of what is reserved that nothing lives in."""
        return 1 - self.allocated / self.reserved if self.allocated is not None and self.reserved else None

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of each kind, the largest first."""
        sums: dict[str, int] = {}
        for one in self.held:
            sums[one.kind] = sums.get(one.kind, 0) + one.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def shortage_in(error: BaseException | None) -> BaseException | None:
    """The out-of-memory error that an exception is or comes from."""
    for _ in range(CHAINED):
        if error is None:
            return None
        kinds = {kind.__name__ for kind in type(error).__mro__}
        words = "RuntimeError" in kinds and any(word in str(error) for word in _WORDS)
        if words or "OutOfMemoryError" in kinds:
            return error
        error = error.__cause__  # not its context: what is raised after one that was dealt with is another matter
    return None


def said(text: str) -> Said:
    """The sizes that the text of an error names."""
    found = {name: pattern.search(text) for name, pattern in _SAID.items()}
    sizes = {name: round(float(one[1]) * _UNITS[one[2]]) for name, one in found.items() if one is not None}
    return Said(**sizes)


def finding(short: Shortage) -> FindingRow:
    """One sentence for what happened, the largest blocks as evidence, and what to look at next."""
    cited = [
        f"{_size(one.bytes)} {one.kind} in {one.blocks} block{'s' if one.blocks > 1 else ''}"
        f"{f', made in {one.stage}' if one.stage else ''}{f', {one.place}' if one.place else ''}"
        for one in short.held[:PLACES]
    ]
    return FindingRow(
        id="out_of_memory", verdict="fail", severity="error", message=_message(short), evidence=cited or None,
        next_step=_next(short),
    )  # fmt: skip


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"


def _message(short: Shortage) -> str:
    told, part = short.said, short.fragmentation
    asked = f": {_size(told.asked)} more were asked for" if told.asked is not None else ""
    free = f", {_size(told.free)} of {_size(told.total)} were free" if told.free is not None and told.total else ""
    holds = ""
    if short.allocated is not None and short.reserved is not None:
        holds = f"; allocated {_size(short.allocated)} of {_size(short.reserved)} reserved"
    broken = f" (fragmentation {part:.1%})" if part is not None else ""
    kinds = ", ".join(f"{kind} {_size(size)}" for kind, size in list(short.kinds.items())[:KINDS])
    made = f"; most of it {kinds}" if kinds else ""
    peak = f"; highest peak {_size(short.peak[0])} in {short.peak[1]}" if short.peak is not None else ""
    return f"{short.where} ran out of GPU memory{asked}{free}{holds}{broken}{made}{peak}"


def _next(short: Shortage) -> str:
    """The first that would have been enough for what was asked."""
    told = short.said
    asked = told.asked or 0
    if 0 < asked <= (short.reserved or 0) - (short.allocated or 0):
        return "enough was reserved and free, but in pieces: expandable_segments:True (not beside vLLM's sleep mode) joins them"
    if told.total and told.free is not None and told.process:
        others = told.total - told.free - told.process
        if others >= asked > 0:
            return f"other processes hold {_size(others)} of the device: is an engine that shares it awake?"
    if not short.held:
        return "FLOWLEDGER_MEMORY_HISTORY=100000, or record.memory_history, tells which kinds and stages fill it"
    return "compare the largest kinds with `flowledger plan`"
