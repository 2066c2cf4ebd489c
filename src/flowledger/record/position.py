"""Where in a step we are: one frame per open call, made by nesting and never by arguments.

A frame knows its step, stage, phase, epoch, mini-batch and micro-batch. Epochs are counted within their stage,
mini-batches within their epoch (or stage), micro-batches within their mini-batch (or stage), all from 0. Leaving a
call means going back to its parent frame, so the position is right after an exception too.
"""

from flowledger.ledger.rows import Row

_COUNTING = frozenset({"step", "stage", "epoch", "mini_batch"})  # scopes that count the calls within them


class Frame:
    """One open call. Everything but the counters and what the recorder notes on it is fixed at birth."""

    __slots__ = (
        "columns", "counts", "epoch", "id", "masks", "micro_batch", "mini_batch", "name", "parent", "peak",
        "peak_before", "phase", "policy_version", "role", "sample_ids", "scope", "stage", "stage_frame", "start_ns",
        "step", "tokens_before", "tokens_logical", "tokens_valid",
    )  # fmt: skip

    def __init__(self, name: str, scope: str, parent: "Frame | None" = None) -> None:
        self.name, self.scope, self.parent = name, scope, parent
        self.id = self.start_ns = self.tokens_before = 0
        self.counts = [0, 0, 0]  # epochs, mini-batches, micro-batches begun within this frame
        self.columns: dict[str, list[object]] | None = None  # sample columns learnt from the arguments
        self.masks: dict[str, tuple[list[int], float | None]] | None = (
            None  # mask seen in this call: shape, kept fraction
        )
        self.peak: int | None = None  # highest allocated reading, kept on stage frames
        self.peak_before: int | None = None
        self.tokens_logical: int | None = None
        self.tokens_valid: int | None = None
        self.stage_frame: Frame = self
        self.step: int | None = None
        self.stage: str | None = None
        self.phase: str | None = None
        self.role: str | None = None
        self.epoch: int | None = None
        self.mini_batch: int | None = None
        self.micro_batch: int | None = None
        self.policy_version: int | None = None
        self.sample_ids: list[str] | None = None
        if parent is not None:
            self._inherit(parent)

    def _inherit(self, parent: "Frame") -> None:
        self.step, self.stage, self.phase, self.role = parent.step, parent.stage, parent.phase, parent.role
        self.epoch, self.mini_batch, self.micro_batch = parent.epoch, parent.mini_batch, parent.micro_batch
        self.policy_version, self.sample_ids = parent.policy_version, parent.sample_ids
        self.stage_frame = parent.stage_frame
        if self.scope not in _COUNTING:
            self.counts = parent.counts

    def stamp(self, row: Row) -> None:
        """Write this position into a row."""
        row.step, row.role, row.stage, row.phase = self.step, self.role, self.stage, self.phase
        row.epoch, row.mini_batch, row.micro_batch = self.epoch, self.mini_batch, self.micro_batch
        row.policy_version = self.policy_version


def inner(parent: Frame, *, name: str, scope: str, stage: str | None, phase: str | None, role: str | None) -> Frame:
    """The frame of a call made from within `parent`."""
    frame = Frame(name, scope, parent)
    if scope == "step" or (scope == "stage" and stage is not None):
        frame.stage, frame.stage_frame, frame.sample_ids = stage, frame, None
        frame.phase = frame.epoch = frame.mini_batch = frame.micro_batch = None
    elif scope == "epoch":
        frame.epoch, frame.mini_batch, frame.micro_batch = _next(parent, 0), None, None
    elif scope == "mini_batch":
        frame.mini_batch, frame.micro_batch = _next(parent, 1), None
    elif scope == "micro_batch":
        frame.micro_batch = _next(parent, 2)
    if stage is not None:
        frame.stage = stage
    if phase is not None:
        frame.phase = phase
    if role is not None:
        frame.role = role
    return frame


def _next(parent: Frame, level: int) -> int:
    number = parent.counts[level]
    parent.counts[level] = number + 1
    return number
