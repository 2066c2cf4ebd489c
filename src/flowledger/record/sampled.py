"""A step whose operators are watched: what each storage is, the memory by kind at every boundary, and the peak."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from flowledger.ledger.rows import MemoryRow, Row, StorageRow
from flowledger.record.hooks import ModelHooks
from flowledger.record.layers import held, module_in
from flowledger.record.observe import Observer
from flowledger.record.operators import Event, Operators
from flowledger.record.position import Frame
from flowledger.record.watch import Watch

# Storages smaller than this share of the step's peak (and never those of 1 KiB) are counted in the sums but get no rows:
# a step of a real model has a hundred thousand of them, and all together they explain nothing.
_SMALL_SHARE, _SMALL_BYTES = 1e-3, 1024


class _Rows(Protocol):
    def put(self, row: Row, frame: Frame, now: int) -> None: ...
    def guard(self, work: Callable[..., Any], *args: Any) -> Any: ...


class SampledStep:
    """One such step, from its begin to its rows."""

    def __init__(self, rows: _Rows, observer: Observer, frame: Frame) -> None:
        self._rows, self._observer = rows, observer
        self.mode = Operators(frame)
        observer.sign = self.mode.sign
        observer.lives.number_of = self._number_of

    def around(
        self, watch: Watch, frame: Frame, model: Any, hooks: Callable[[], ModelHooks]
    ) -> AbstractContextManager[Any] | None:
        """What a call is to run in: the step, and the forward pass of its first micro-batch."""
        if watch.scope == "step":
            stack = ExitStack()
            stack.enter_context(self.mode.watching())
            stack.enter_context(hooks().saving(self._saved))
            return stack
        module = module_in(model) if watch.probe.phase == "forward" else None
        if module is None or frame.epoch or frame.mini_batch or frame.micro_batch:
            return None
        return self._forward(hooks(), module, frame)

    def _saved(self, tensor: Tensor) -> None:
        """A tensor is saved for backward."""
        self.mode.sign(tensor, "saved_for_backward")

    @contextmanager
    def _forward(self, hooks: ModelHooks, module: nn.Module, frame: Frame) -> Iterator[None]:
        """Rows of hidden states and activations for one forward pass."""

        along = bool(getattr(module, "sequence_parallel", False))  # Megatron's: what a model says of itself

        def output(layer: int, value: Tensor) -> None:
            self._observer.hidden(frame, layer, value, time.monotonic_ns(), along_sequence=along)

        with hooks.forward(module, output) as saved:
            yield
        for layer, dtype, size in saved:
            self._rows.guard(self._observer.saved, frame, layer, dtype, size, time.monotonic_ns())

    def began(self, watch: Watch, frame: Frame, now: int) -> None:
        self.mode.mark(frame, frame, "begin" if watch.boundary else "", now)
        if watch.probe.phase == "step":
            self._sign_gradients()

    def ended(self, watch: Watch, frame: Frame, now: int) -> None:
        if watch.probe.phase == "backward":
            self._sign_gradients()
        self.mode.mark(frame, frame.parent or frame, "end" if watch.boundary else "", now)

    def write(self) -> None:
        """All rows of the step, once it is over."""
        self._sign_models()
        small = max(_SMALL_BYTES, int(_SMALL_SHARE * self.mode.peak_growth))
        for seen in self.mode.replay(small):
            if isinstance(seen, Event):
                self._storage(seen)
                continue
            for kind, size in seen.live.items():
                self._rows.put(MemoryRow(instant=seen.label, kind=kind, allocated=size), seen.frame, seen.t_ns)
        self.mode.forget()

    def _storage(self, seen: Event) -> None:
        born = seen.storage
        if seen.name == "freed" and born.shared:
            return  # the probes follow this one to its end
        if born.number is None:
            born.number = self._observer.lives.new_number()
        row = StorageRow(storage=born.number, event=seen.name, bytes=seen.size, kind=seen.kind)
        self._rows.put(row, seen.frame, seen.t_ns)

    def _number_of(self, pointer: int) -> int | None:
        born = self.mode.find(pointer)
        if born is None:
            return None
        if born.number is None:
            born.number = self._observer.lives.new_number()
        born.shared = True
        return born.number

    def _sign_gradients(self) -> None:
        """Gradients that exist now; they are gone by the end of the step."""
        for module in self._observer.layers.modules():
            for tensor in module.parameters():
                if tensor.grad is not None:
                    self.mode.sign(held(tensor.grad), "gradient")

    def _sign_models(self) -> None:
        """Parameters, buffers, gradients and optimizer state of all that was met so far."""
        self._sign_gradients()
        for module in self._observer.layers.modules():
            for tensor in (*module.parameters(), *module.buffers()):
                self.mode.sign(held(tensor), "parameter")
        for tensor in self._observer.layers.optimizer_tensors():
            self.mode.sign(held(tensor), "optimizer_state")
