"""What collectives fill: a row of `comm_buffer` for the first such buffer of a stage, and the sign that it is one.

In-place collectives also fill tensors of the flow (parameters, batches): what the probes know by another name is no buffer.
"""

from collections.abc import Iterator
from typing import Any

from flowledger.record.extract import Templates, Where
from flowledger.record.observe import Observer, Put, is_tensor
from flowledger.record.position import Frame, OnceAStage

_NAME = "comm_buffer"


class Buffers:
    """The buffers of one recorder."""

    def __init__(self, put: Put, observer: Observer, templates: Templates) -> None:
        self._put, self._observer, self._templates = put, observer, templates
        self._shown = OnceAStage()

    def see(self, value: Any, source: object, frame: Frame, now: int) -> None:
        """Tensors that the collective `source` fills, be they in lists."""
        tensors = list(leaves(value))
        if not tensors:
            return
        if self._observer.sign is not None:
            for tensor in tensors:
                self._observer.sign(tensor, "collective")
        first = tensors[0]
        shape = tuple(first.shape) if len(tensors) == 1 else (sum(tensor.numel() for tensor in tensors),)
        seen = frame.stage is not None and self._observer.level != "steps"
        if seen and self._shown.first(frame, (source, frame.phase, shape, first.dtype)):
            self._show(tensors, shape, frame, now)

    def _show(self, tensors: list[Any], shape: tuple[int, ...], frame: Frame, now: int) -> None:
        lives = self._observer.lives
        if any(lives.name_of(tensor) not in (None, _NAME) for tensor in tensors):
            return
        first = tensors[0]
        row = self._templates.row(_NAME, shape, first.dtype, first.element_size(), Where(frame.stage, "write"))
        row.access, row.offset = "write", first.storage_offset()
        row.dims = row.shape_checksum = None  # it is no part of a whole: ranks may have buffers of other sizes
        row.owner_rank = str(row.rank)
        numbers = [lives.see(tensor, _NAME, "write", frame, now) for tensor in tensors]
        row.storage = numbers[0]
        self._put(row, frame, now)


def leaves(value: Any) -> Iterator[Any]:
    """The tensors in a value: itself, or those of its lists."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner)
    elif is_tensor(value):
        yield value


def size_of(value: Any) -> int:
    """Bytes of the tensors in a value."""
    if value is None:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in leaves(value))
