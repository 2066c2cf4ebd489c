"""What an inference engine did: which requests ran and waited, how full its cache was, what became of each request.

A step of an engine may take a millisecond, so it is no row. What steps tell is added up and written at most every
`WINDOW_NS` (`WINDOW_NS_AT_STEPS` at that level), and as soon as nothing is left to do: from then on an engine may be killed at any moment.
"""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from flowledger.ledger.rows import Row, SpanRow
from flowledger.record.position import Frame, inner

WINDOW_NS, WINDOW_NS_AT_STEPS = 250_000_000, 1_000_000_000
STARTED = 100_000  # requests that may be under way; beyond it, when they were scheduled is forgotten
clock = time.monotonic_ns


class Recording(Protocol):
    """What the recorder does for an engine."""

    level: str

    def here(self) -> Frame: ...
    def new_span(self) -> int: ...
    def put(self, row: Row, frame: Frame, now: int, /) -> None: ...
    def metric(self, name: str, value: Any, frame: Frame, now: int, weight: float | None = None) -> None: ...
    def cost(self) -> dict[str, float]: ...


class Step(NamedTuple):
    """One step: the requests [B_run] that run and wait in it, cache blocks, tokens that the model is given."""

    running: int
    waiting: int
    blocks_used: int
    blocks: int
    prefill_tokens: int
    decode_tokens: int


class Finished(NamedTuple):
    """One request that has ended."""

    name: str
    reason: str  # stop, length, abort, or a word of the engine's own
    prompt_tokens: int
    response_tokens: int
    computed_tokens: int  # of both, those that lay in the cache included
    seconds: float  # since it arrived


class _Started(NamedTuple):
    at_ns: int
    cached_tokens: int


class _Window:
    """What some steps have told, and where they were."""

    def __init__(self, frame: Frame, now: int) -> None:
        self.frame, self.began_ns, self.steps = frame, now, 0
        self.running = self.waiting = self.blocks_used = self.blocks = 0  # sums over steps
        self.seconds = 0.0  # of the requests that ended
        self.queued: list[float] = []  # seconds of those that were scheduled for the first time
        self.counts: Counter[str] = Counter({"preemptions": 0, "prefill_tokens": 0, "decode_tokens": 0})
        self.ended: Counter[str] = Counter()

    def add(self, step: Step) -> None:
        self.steps += 1
        self.running += step.running
        self.waiting += step.waiting
        self.blocks_used += step.blocks_used
        self.blocks += step.blocks
        self.counts["prefill_tokens"] += step.prefill_tokens
        self.counts["decode_tokens"] += step.decode_tokens

    def means(self) -> dict[str, tuple[float, int]]:
        """Metric -> sum, and how many it is the sum of."""
        by_step = {
            "running": self.running, "waiting": self.waiting, "kv_blocks_used": self.blocks_used, "kv_blocks": self.blocks,
        }  # fmt: skip
        return {
            **{name: (value, self.steps) for name, value in by_step.items()},
            "request_time_s": (self.seconds, self.ended.total()),
            "queue_time_s": (sum(self.queued), len(self.queued)),
        }


class Engine:
    """One engine in this process, as a recorder sees it."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._longest_ns = WINDOW_NS_AT_STEPS if recorder.level == "steps" else WINDOW_NS
        self._version: int | None = None
        self._started: dict[str, _Started] = {}
        self._window: _Window | None = None

    def version(self, number: int | None) -> None:
        """Other weights from now on; None where nobody can say which."""
        self.write()
        self._version = number

    def started(self, name: str, *, cached_tokens: int, waited_s: float) -> None:
        """A request is scheduled for the first time; so many tokens of its prompt were in the cache."""
        now = clock()
        if len(self._started) >= STARTED:
            self._started.clear()
        self._started[name] = _Started(now, cached_tokens)
        window = self._open(now)
        window.counts["cached_tokens"] += cached_tokens
        window.queued.append(waited_s)

    def stepped(self, step: Step) -> None:
        """The engine begins a step."""
        now = clock()
        if self._window is not None and now - self._window.began_ns > self._longest_ns:
            self.write()
        self._open(now).add(step)

    def preempted(self) -> None:
        """A running request gives its blocks back and has to be computed again."""
        self._open(clock()).counts["preemptions"] += 1

    def finished(self, request: Finished) -> None:
        """A request has ended."""
        now = clock()
        window, started = self._open(now), self._started.pop(request.name, None)
        window.ended[request.reason] += 1
        window.seconds += request.seconds
        if self.recorder.level != "steps":
            self._spans(window.frame, request, started, now)

    def rest(self) -> None:
        """Nothing is left to do."""
        frame = self.write()
        if frame is not None and frame.step is None:  # a process with steps tells at the end of each
            for name, value in self.recorder.cost().items():
                self.recorder.metric(f"recorder/{name}", value, frame, clock())

    def write(self) -> Frame | None:
        """Write what has been told since it was written last; returns where that was."""
        window, self._window = self._window, None
        if window is None:
            return None
        now, frame, metric = clock(), window.frame, self.recorder.metric
        for name, (total, of) in window.means().items():
            if of:
                metric(f"rollout/{name}", total / of, frame, now, float(of))
        counts: Mapping[str, int] = {
            "engine_steps": window.steps, **window.counts, **{f"finished/{why}": n for why, n in window.ended.items()},
        }  # fmt: skip
        for name, count in counts.items():
            metric(f"rollout/{name}", count, frame, now)
        if window.steps:
            self._put("engine_steps", "compute", (window.began_ns, now), frame)
        return frame

    def _open(self, now: int) -> _Window:
        if self._window is None:
            here = self.recorder.here()
            frame = inner(
                here, name="engine", scope="call", stage=here.stage or "rollout", phase=None, role="rollout"
            )  # fmt: skip
            if self._version is not None:
                frame.policy_version = self._version
            self._window = _Window(frame, now)
        return self._window

    def _spans(self, frame: Frame, request: Finished, started: _Started | None, now: int) -> None:
        """From its arrival to its end, with the response's tokens; within it `queued`, with those of the prompt."""
        arrived = now - round(request.seconds * 1e9)
        scheduled = now if started is None else started.at_ns
        prompt, response = request.prompt_tokens, request.response_tokens
        whole = self._put(
            f"request/{request.reason}", "host", (arrived, now), frame, sample_id=request.name,
            tokens_logical=response, tokens_valid=response,
            tokens_computed=min(max(request.computed_tokens - prompt, 0), response),
        )  # fmt: skip
        self._put(
            "queued", "wait", (min(arrived, scheduled), scheduled), frame, sample_id=request.name, parent=whole,
            tokens_logical=prompt, tokens_valid=prompt,
            tokens_computed=None if started is None else max(prompt - started.cached_tokens, 0),
        )  # fmt: skip

    def _put(self, name: str, kind: str, during: tuple[int, int], frame: Frame, **more: Any) -> int:
        start, end = during
        number = self.recorder.new_span()
        row = SpanRow(id=number, event="whole", name=name, span_kind=kind, start_ns=start, end_ns=end, **more)
        self.recorder.put(row, frame, end)
        return number
