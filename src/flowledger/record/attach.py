"""Attach to a running job from outside: functions named by a table of probes are wrapped, and put back at the end.

A wrapper opens a span, looks at what goes in, calls the function with exactly what it was given, looks at what comes
out and closes the span; on an exception it closes the span and lets the exception pass.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from flowledger.flow.seams import Function, Probe, replaced
from flowledger.record.recorder import Recorder
from flowledger.record.watch import Watch

Source = Callable[[], Recorder | None]  # the recorder of this process; None: this call is not recorded


@contextmanager
def attach(probes: Sequence[Probe], recorder: Recorder) -> Iterator[Recorder]:
    """Record while the context is open. A target that is not there becomes a finding, never an exception."""
    changes = [
        (probe.target, maker(probe, lambda: recorder, recorder.level))
        for probe in probes
        if wants(recorder.level, probe)
    ]
    with replaced(changes) as missed:
        for probe in probes:
            if probe.target in missed:
                recorder.missed(probe)
        try:
            yield recorder
        finally:
            recorder.close()


def wants(level: str, probe: Probe) -> bool:
    """Whether a level has a span for each call. At `steps`, decode steps and calls without a phase go unseen."""
    return level != "steps" or probe.scope not in ("decode", "call") or probe.phase is not None


def maker(probe: Probe, source: Source, level: str) -> Callable[[Function], Function]:
    """What makes of a function the watched one."""
    if probe.scope == "collective":
        recorder = source()
        return partial(recorder.collectives.wrapped, probe) if recorder is not None else _unchanged

    def make(original: Function) -> Function:
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrapped(original.__func__, probe, source, level))
        return _wrapped(original, probe, source, level)

    return make


def _wrapped(original: Function, probe: Probe, source: Source, level: str) -> Function:
    watch = Watch(probe, original, level)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = source()
        if recorder is None or (watch.conditions and not recorder.concerns(watch, args, kwargs)):
            return original(*args, **kwargs)
        frame, around = recorder.enter(watch, args, kwargs)
        try:
            if around is None:
                result = original(*args, **kwargs)
            else:
                with around:
                    result = original(*args, **kwargs)
        except BaseException as error:
            recorder.fail(watch, frame, error)
            raise
        recorder.leave(watch, frame, args, kwargs, result)
        return result

    @functools.wraps(original)
    def edge(*args: Any, **kwargs: Any) -> Any:
        recorder = source()
        if recorder is not None and probe.edge == "begin":
            recorder.edges.begin(watch, args, kwargs)
        result = original(*args, **kwargs)
        if recorder is not None and probe.edge == "end":
            recorder.edges.end(watch.scope)
        return result

    return edge if probe.edge else wrapper


def _unchanged(original: Function) -> Function:
    return original
