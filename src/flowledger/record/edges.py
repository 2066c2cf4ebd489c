"""Spans that begin with one call and end with another: the steps of a framework whose step is no function.

What was begun stays the innermost call of its thread, so what is called meanwhile lies within it. It ends with the call
that ends it, or when something else of its scope or a wider one begins, or when what is around it ends; where an exception
ends that, it has failed with it.
"""

from contextlib import ExitStack
from typing import Any, Protocol

from flowledger.flow.seams import Probe
from flowledger.record.position import SCOPES, Frame
from flowledger.record.watch import Watch


class Spans(Protocol):
    """What the recorder does for calls."""

    level: str

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Frame, Any]: ...
    def leave(self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...
    def fail(self, watch: Watch, frame: Frame, error: BaseException) -> None: ...
    def here(self) -> Frame: ...
    def inmost(self) -> Frame | None: ...


class Edges:
    """Opens and closes such spans for a recorder."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.left = 0  # how many stay open just now

    def begin(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a span that stays open after the call, and before it its stage, where that is not open."""
        self.end(watch.scope)
        stage = watch.probe.stage
        if watch.scope not in ("step", "stage") and stage is not None and self._spans.here().stage != stage:
            self.begin(Watch(Probe(stage=stage, target=watch.probe.target), self.begin, self._spans.level), (), {})
        frame, around = self._spans.enter(watch, args, kwargs)
        within = ExitStack()
        if around is not None:
            within.enter_context(around)

        def close(error: BaseException | None) -> None:
            self.left -= 1
            within.close()
            if error is None:
                self._spans.leave(watch, frame, (), {}, None)
            else:
                self._spans.fail(watch, frame, error)

        frame.close = close
        self.left += 1

    def end(self, scope: str) -> None:
        """Close what was left open of this scope, and what is within it."""
        self._end(SCOPES.index(scope), None)

    def fail(self, error: BaseException) -> None:
        """An exception leaves a call at an edge: what was left open within the step has failed. The step goes with its loop."""
        self._end(SCOPES.index("stage"), error)

    def end_within(self, frame: Frame, error: BaseException | None = None) -> None:
        """Close what calls within this one have left open; `error`: the exception that leaves this one."""
        while (inmost := self._spans.inmost()) is not None and inmost is not frame and inmost.close is not None:
            if not inmost.within(frame):
                return  # a generator that is closed from elsewhere: what is open there is not its own
            _shut(inmost, error)

    def _end(self, depth: int, error: BaseException | None) -> None:
        frame = self._spans.inmost()
        left: list[Frame] = []  # from the innermost
        while frame is not None and frame.close is not None:
            left.append(frame)
            frame = frame.parent
        for one in left:
            if SCOPES.index(one.scope) < depth:
                break
            _shut(one, error)


def _shut(frame: Frame, error: BaseException | None) -> None:
    close, frame.close = frame.close, None
    if close is not None:
        close(error)
