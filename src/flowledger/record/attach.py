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


@contextmanager
def attach(probes: Sequence[Probe], recorder: Recorder) -> Iterator[Recorder]:
    """Record while the context is open. A target that is not there becomes a finding, never an exception."""
    changes = [(probe.target, _maker(probe, recorder)) for probe in probes if recorder.wants(probe)]
    with replaced(changes) as missed:
        for probe in probes:
            if probe.target in missed:
                recorder.missed(probe)
        try:
            yield recorder
        finally:
            recorder.close()


def _maker(probe: Probe, recorder: Recorder) -> Callable[[Function], Function]:
    if probe.scope == "collective":
        return partial(recorder.collectives.wrapped, probe)

    def make(original: Function) -> Function:
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrapped(original.__func__, probe, recorder))
        return _wrapped(original, probe, recorder)

    return make


def _wrapped(original: Function, probe: Probe, recorder: Recorder) -> Function:
    watch = Watch(probe, original, recorder.level)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
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

    return wrapper
