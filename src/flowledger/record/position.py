"""Where in a step we are: one frame per open call, made by nesting and never by arguments.

A frame knows its step, stage, phase, epoch, mini-batch and micro-batch. Epochs are counted within their stage,
mini-batches within their epoch (or stage), micro-batches within their mini-batch (or stage), all from 0; a call that
knows its micro-batch says so itself (a pipeline goes through them in an order of its own). Leaving a call means going
back to its parent frame, so the position is right after an exception too.
"""

from collections.abc import Callable
from contextvars import ContextVar

SCOPES = ("step", "stage", "epoch", "mini_batch", "micro_batch", "decode", "call")  # from the outermost
_COUNTING = frozenset({"step", "stage", "epoch", "mini_batch"})  # scopes that count the calls within them
_LEVEL = {"epoch": 0, "mini_batch": 1, "micro_batch": 2}


class Frame:
    """One open call. What a call may learn has its default on the class, since most calls learn nothing."""

    id = 0
    start_ns = 0
    tokens_before = 0  # tokens that had entered a model when the call began
    tokens_logical: int | None = None
    tokens_valid: int | None = None
    peak: int | None = None  # highest allocated reading, on the frame of a stage
    masks: dict[str, tuple[list[int], float | None]] | None = None  # masks seen in this call: shape, kept fraction
    columns: dict[str, list[object]] | None = None  # what this stage learnt of its samples
    close: Callable[[BaseException | None], None] | None = None  # of what stays open between two calls
    groups: list[str] | None = None  # whose rows a call has, where a framework names groups and sessions
    sessions: list[str] | None = None
    done_step: int | None = None  # the step that ends with this call
    over = False  # it has ended
    plain = False  # nothing but its time is wanted
    aside = False  # one of many that go on in turns: nothing but what it calls itself lies within it

    def __init__(self, name: str, scope: str, parent: "Frame | None" = None) -> None:
        self.name, self.scope, self.parent = name, scope, parent
        self.counts: list[int]  # epochs, mini-batches, micro-batches begun within this frame
        self.stage_frame: Frame
        self.step: int | None
        self.stage: str | None
        self.phase: str | None
        self.role: str | None
        self.epoch: int | None
        self.mini_batch: int | None
        self.micro_batch: int | None
        self.policy_version: int | None
        self.sample_ids: list[str] | None
        if parent is None:
            self.stage_frame, self.counts = self, [0, 0, 0]
            self.step = self.epoch = self.mini_batch = self.micro_batch = self.policy_version = None
            self.stage = self.phase = self.role = self.sample_ids = None
            return
        self.stage_frame = parent.stage_frame
        self.counts = [0, 0, 0] if scope in _COUNTING else parent.counts
        self.step, self.stage, self.phase, self.role = parent.step, parent.stage, parent.phase, parent.role
        self.epoch, self.mini_batch, self.micro_batch = parent.epoch, parent.mini_batch, parent.micro_batch
        self.policy_version, self.sample_ids = parent.policy_version, parent.sample_ids

    def within(self, outer: "Frame") -> bool:
        """Whether this is `outer`, or a call made from within it."""
        frame: Frame | None = self
        while frame is not None and frame is not outer:
            frame = frame.parent
        return frame is outer

    def in_step(self) -> bool:
        """Whether a step is around this call."""
        frame = self.parent
        while frame is not None and frame.scope != "step":
            frame = frame.parent
        return frame is not None

    def around(self) -> "Frame | None":
        """The innermost call around this one that has not ended; a task may outlive what it was begun from."""
        frame = self.parent
        while frame is not None and frame.over:
            frame = frame.parent
        return frame


class Here:
    """The innermost call that is open in this thread, or in this task of an event loop."""

    def __init__(self) -> None:
        self._frame: ContextVar[Frame | None] = ContextVar("frame", default=None)

    @property
    def frame(self) -> Frame | None:
        frame = self._frame.get()
        return _called(frame.around()) if frame is not None and frame.over else frame

    @frame.setter
    def frame(self, frame: Frame | None) -> None:
        self._frame.set(frame)

    def back(self, frame: Frame) -> None:
        """The innermost call has ended."""
        frame.over = True
        self._frame.set(_called(frame.around()))

    def end(self, frame: Frame) -> None:
        """A call has ended: a generator maybe in another thread than it began in, or before what began after it."""
        frame.over = True
        inmost = self._frame.get()
        if inmost is not None and inmost.within(frame):
            self._frame.set(_called(frame.around()))


def _called(frame: Frame | None) -> Frame | None:
    """None for the process, which nobody has called."""
    return frame if frame is not None and frame.parent is not None else None


class OnceAStage:
    """What repeats within a stage and is to be shown the first time."""

    def __init__(self) -> None:
        self._shown: set[object] = set()
        self._stage: Frame | None = None

    def first(self, frame: Frame, what: object) -> bool:
        """Whether the stage of this frame has not shown it yet."""
        if self._stage is not frame.stage_frame:
            self._stage = frame.stage_frame
            self._shown.clear()
        if what in self._shown:
            return False
        self._shown.add(what)
        return True


def inner(parent: Frame, *, name: str, scope: str, stage: str | None, phase: str | None, role: str | None) -> Frame:
    """The frame of a call made from within `parent`."""
    frame = Frame(name, scope, parent)
    if scope == "step" or (scope == "stage" and stage is not None):
        frame.stage, frame.stage_frame, frame.sample_ids = stage, frame, None
        frame.phase = frame.epoch = frame.mini_batch = frame.micro_batch = None
    elif scope in _LEVEL:
        _count(frame, parent.counts, _LEVEL[scope])
    if stage is not None:
        frame.stage = stage
    if phase is not None:
        frame.phase = phase
    if role is not None:
        frame.role = role
    return frame


def _count(frame: Frame, counts: list[int], level: int) -> None:
    number = counts[level]
    counts[level] = number + 1
    if level == 0:
        frame.epoch, frame.mini_batch, frame.micro_batch = number, None, None
    elif level == 1:
        frame.mini_batch, frame.micro_batch = number, None
    else:
        frame.micro_batch = number
