"""Attach to a running job from outside: functions named by a table of probes are wrapped, and put back at the end.

A wrapper opens a span, looks at what goes in, calls the function with exactly what it was given, looks at what comes
out and closes the span; on an exception it closes the span and lets the exception pass. Of a coroutine, or of a generator
that somebody goes through, the span lasts until it is done.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import groupby
from typing import Any

from flowledger.flow.seams import Function, Probe, locate, replaced
from flowledger.record.position import Frame
from flowledger.record.recorder import Recorder, clock
from flowledger.record.upkeep import missed
from flowledger.record.watch import Watch
from flowledger.record.weight_stream import counted

Source = Callable[[], Recorder | None]  # the recorder of this process; None: this call is not recorded


@contextmanager
def attach(probes: Sequence[Probe], recorder: Recorder) -> Iterator[Recorder]:
    """Record while the context is open. A target that is not there becomes a finding, never an exception."""
    with replaced(list(makers(probes, lambda: recorder, recorder.level))) as gone:
        for probe in probes:
            if probe.target in gone:
                recorder.find(missed(probe))
        try:
            yield recorder
        finally:
            recorder.close()


def wants(level: str, probe: Probe) -> bool:
    """Whether a level has a span for each call. At `steps`, decode steps and calls without a phase, numbers or a step's end go unseen."""
    told = (*probe.args.values(), *probe.results.values())
    numbers = any(fact.startswith(("@metrics", "@bind:", "@done_step")) for fact in told)
    return level != "steps" or numbers or probe.scope not in ("decode", "call") or probe.phase is not None


def makers(probes: Iterable[Probe], source: Source, level: str) -> Iterator[tuple[str, Callable[[Function], Function]]]:
    """(target, what makes of it the watched one) of the probes that a level wants.

    Of one target that is called for many things, which a word among its arguments tells apart, one wrapper finds the probe.
    """
    for (target, path), several in groupby((probe for probe in probes if wants(level, probe)), _told_apart_by):
        some = list(several)
        words = {probe.only_if[path] for probe in some} if path else set()
        if len(some) == len(words) > 1:
            yield target, partial(_by_word, some, path, source, level)
        else:
            yield from ((target, maker(probe, source, level)) for probe in some)


def _told_apart_by(probe: Probe) -> tuple[str, str]:
    """The target, and the path of the word where nothing but one says which calls are meant."""
    conditions = list(probe.only_if.items())
    alone = len(conditions) == 1 and conditions[0][1].startswith("=") and not (probe.within or probe.not_within)
    return probe.target, conditions[0][0] if alone else ""


def maker(probe: Probe, source: Source, level: str) -> Callable[[Function], Function]:
    """What makes of a function the watched one."""
    if probe.scope == "collective":
        recorder = source()
        return partial(recorder.collectives.wrapped, probe) if recorder is not None else _unchanged
    if probe.told:
        return partial(_told, locate(probe.told)[2], source)

    def make(original: Function) -> Function:
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrapped(original.__func__, probe, source, level))
        return _wrapped(original, probe, source, level)

    return make


def _by_word(probes: Sequence[Probe], path: str, source: Source, level: str, original: Function) -> Function:
    """The word is looked up, not compared with that of each probe in turn."""
    if inspect.iscoroutinefunction(original) or isinstance(original, (staticmethod, classmethod)):
        return reduce(lambda wrapped, probe: maker(probe, source, level)(wrapped), probes, original)
    reader = Watch(probes[0], original, level)
    watched = {
        probe.only_if[path].removeprefix("="): _wrapped(original, replace(probe, only_if={}), source, level)
        for probe in probes
    }

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        word = reader.word(path, args, kwargs)
        return (original if word is None else watched.get(word, original))(*args, **kwargs)

    return chosen


def _wrapped(original: Function, probe: Probe, source: Source, level: str) -> Function:
    watch = Watch(probe, original, level)

    def concerned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
        """The recorder of a call that the probe means. What is not meant at all does not bring one about."""
        if watch.words and not watch.says(args, kwargs):
            return None
        recorder = source()
        if recorder is None or (watch.conditions and not recorder.concerns(watch, args, kwargs)):
            return None
        return recorder

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = concerned(args, kwargs)
        if recorder is None:
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
        return streamed(recorder, result) if probe.streams else result

    @functools.wraps(original)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        recorder = concerned(args, kwargs)
        if recorder is None:
            return await original(*args, **kwargs)
        frame, _ = recorder.enter(watch, args, kwargs)  # operators are not watched across an await
        with _failing(recorder, watch, frame):
            result = await original(*args, **kwargs)
        recorder.leave(watch, frame, args, kwargs, result)
        return result

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> Any:
        recorder = concerned(args, kwargs)
        if recorder is None:
            return (yield from original(*args, **kwargs))
        frame, around = recorder.enter(watch, args, kwargs)
        with _failing(recorder, watch, frame), around or nullcontext():
            result = yield from original(*args, **kwargs)
        recorder.leave(watch, frame, args, kwargs, result)
        return result

    @functools.wraps(original)
    def edge(*args: Any, **kwargs: Any) -> Any:
        recorder = concerned(args, kwargs)
        if recorder is None:
            return original(*args, **kwargs)
        if probe.edge == "begin":
            recorder.edges.begin(watch, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            recorder.edges.fail(error)
            raise
        if probe.edge == "end":
            recorder.edges.end(watch.scope)
        return result

    if probe.edge:
        return edge
    if inspect.iscoroutinefunction(original):
        return coroutine
    return generator if inspect.isgeneratorfunction(original) else wrapper


@contextmanager
def _failing(recorder: Recorder, watch: Watch, frame: Frame) -> Iterator[None]:
    """An exception that leaves closes the span. A plain call does without: this would cost it a microsecond."""
    try:
        yield
    except BaseException as error:
        recorder.fail(watch, frame, error)
        raise


def streamed(recorder: Recorder, result: Any) -> Any:
    """A result whose first part is a stream of names and weights, the same but counted as it passes."""
    frame = recorder.here()

    def metric(name: str, value: float) -> None:
        recorder.guard(recorder.metric, name, value, frame, clock())

    return counted(result, recorder.guard_hook, metric, waits=recorder.level == "tokens")


def _told(tell: Function, source: Source, original: Function) -> Function:
    """Tell of each call that has returned."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        recorder = source()
        if recorder is not None:
            recorder.guard_hook(tell, recorder, args, kwargs, result)
        return result

    return wrapper


def _unchanged(original: Function) -> Function:
    return original
