"""A probe made ready: where in a call each tensor and each fact is found.

A key of `args` is a parameter, or a path from one (`weights.version`); a key of `results` a field of the result, a path
from one, "" for the result itself, or `args.` and a path for what the call writes into an argument. Values are tensors
of the flow, or facts (` & ` stands between two of one path): `@step`, `@at_step` (of this call alone), `@done_step` (this
call ends that step), `@micro_batch` (which one this is, where the order of calls does not say it), `@group_ids`,
`@sessions`, `@sample_keys` (whose rows these are, see `lineage`), `@tags` (what is noted beside these), `@versions` (of the
weights that sampled each), `@received_weights` (names and tensors), `@written_checkpoint`, `@restored_checkpoint` (a folder),
`@policy_version`, `@tokenizer`, `@component_names`, `@dropped_reason`, `@model` (a module whose forward passes are worth
watching), `@metric:NAME` (a number), `@scalar:NAME` (one that is read at level
`tokens` alone), `@metrics` (many of them by name), `@metrics:TABLE` (by names that a table of
`tables/metric_names.toml` knows), `@bind:SYMBOL` (the size that a symbol of dimensions stands for), `@token:COLUMN` (a value
for each token). Where samples have no names: `@new_samples` (a batch of so many is about to be made), `@samples` (a batch of
them in that order), `@samples_made:KEY,KEY` (a dictionary of what they became; by these entries a row is known again),
`@samples_among:KEY,KEY` (one of some of them, in any order). `@responses` (lists of token ids), `@end_tokens` (what they
end in where they were not cut off; `@end_tokens:WHO` where more than one says some), `@response_limit` (tokens, at which they
are), `@reward_weights` (one a component). `record.collectives` has facts of its own.
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flowledger.flow.seams import Function, Probe
from flowledger.flow.stages import stages
from flowledger.ledger.rows import SpanRow
from flowledger.record.position import Frame, OnceAStage

_WHOLE = ("epoch", "mini_batch", "micro_batch", "decode", "call")  # one row at the end is enough
_MISSING = object()
_ITEMS: Any = type({}.items())
_AT_STEPS = ("attention_mask", "generation_metadata")
_FACTS_AT_STEPS = ("step", "at_step", "done_step", "micro_batch", "policy_version", "model", "metrics")
Named = list[tuple[str, Any]]
Path = tuple[str, ...]


class Watch:
    """One probe on one function."""

    def __init__(self, probe: Probe, function: Function, level: str) -> None:
        self.probe, self.scope = probe, probe.scope
        self.whole = probe.scope in _WHOLE
        # Memory is read here.
        self.boundary = probe.scope in ("step", "stage") or (probe.phase is not None and level != "steps")
        own = probe.target.rpartition(":")[2].rpartition(".")[2]
        named = {"step": "step", "stage": probe.stage or own}
        self.name = named.get(probe.scope) or probe.phase or own
        self.span_kind = "stage" if probe.scope in ("step", "stage") else "compute"
        self.role = probe.role or (_role_of(probe.stage) if self.scope == "stage" else None)
        self._row = SpanRow(id=0, event="", name=self.name, span_kind=self.span_kind, start_ns=0)
        self.reads, self.read_facts = split(probe.args)
        self.writes, self.write_facts = split(probe.results)
        self._metrics = [(_path(key), name) for key, name in probe.metrics.items()]
        if level == "steps":
            self._prune()
        self.looks_in = bool(self.reads or self.read_facts) or not self.whole
        # What ends a step is written at once.
        self.urgent = any(name.startswith("metrics") for _, name in self.read_facts)
        self.looks_out = bool(self.writes or self.write_facts or probe.metrics)
        self._same = [(_path(one), _path(other)) for one, other in probe.only_if.items() if not other.startswith("=")]
        self.words = [(_path(one), other[1:]) for one, other in probe.only_if.items() if other.startswith("=")]
        self.conditions = bool(self._same or probe.within or probe.not_within)
        self._function = function
        self.aside = self.scope == "call" and inspect.iscoroutinefunction(function)
        self._names: list[str] | None = None
        self.stage, self.phase = probe.stage, probe.phase
        looks = self.looks_in or self.looks_out or self.boundary or self.aside or self.urgent
        self.plain = level == "steps" and not looks and self.scope not in ("step", "stage")
        self.shown = OnceAStage()  # of what a call that repeats (a decode step, a micro-batch) has to show

    def _prune(self) -> None:
        """Keep what level `steps` makes use of."""
        tensors = _AT_STEPS if self.scope == "stage" else ()
        self.reads, self.writes = (
            [(path, name) for path, name in table if name in tensors] for table in (self.reads, self.writes)
        )
        self.read_facts, self.write_facts = (
            [
                (path, name)
                for path, name in table
                if name in _FACTS_AT_STEPS or name.startswith(("metric:", "metrics:", "bind:"))
            ]
            for table in (self.read_facts, self.write_facts)
        )

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """The arguments by parameter name."""
        if not args:
            return kwargs
        if self._names is None:
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            with suppress(ValueError):  # a builtin function that does not say
                parameters = inspect.signature(self._function).parameters.values()
                self._names = [parameter.name for parameter in parameters if parameter.kind in positional]
        return {**dict(zip(self._names or (), args, strict=False)), **kwargs}

    def concerns(self, given: Mapping[str, Any], stage: str | None) -> bool:
        """Whether a call with these arguments, made within a stage, is one that the probe means."""
        if stage in self.probe.not_within or (self.probe.within and stage not in self.probe.within):
            return False
        found = [(_follow(given, one), _follow(given, other)) for one, other in self._same]
        return all(one is other and one is not _MISSING for one, other in found)

    def says(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are the words that the probe asks for."""
        return all(self.word(path, args, kwargs) == word for path, word in self.words)

    def word(self, path: str | Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The word that a path leads to in the arguments; None where there is none."""
        value = _follow(self.arguments(args, kwargs), _path(path) if isinstance(path, str) else path)
        return str(value) if isinstance(value, (str, bool)) else None

    def span(self, frame: Frame, event: str, now: int | None) -> SpanRow:
        """A row of the span of one call; `now` is its end, None at its begin."""
        row: SpanRow = self._row.__copy__()  # type: ignore[attr-defined]  # twice as quick as copy.copy
        row.id, row.event, row.start_ns, row.end_ns = frame.id, event, frame.start_ns, now
        if frame.parent is not None and frame.parent.id:
            row.parent = frame.parent.id
        if now is not None:
            row.tokens_logical, row.tokens_valid = frame.tokens_logical, frame.tokens_valid
        return row

    def metrics(self, result: Any) -> Named:
        """(name, value) of each metric in a result."""
        found: Named = []
        for path, name in self._metrics:
            value = _follow(result, path)
            if name == "*" and isinstance(value, Mapping):
                found += value.items()
            elif value is not _MISSING and value is not None:
                found.append((name, value))
        return found


def _role_of(name: str | None) -> str | None:
    known = stages().get(name) if name is not None else None
    return known.role if known is not None else None


def pick(paths: list[tuple[Path, str]], source: Any, given: Any = None) -> Named:
    """What the paths lead to, None and what is not there left out. Paths from `args` start at `given`.

    Of several paths in succession to entries of one mapping (a batch), the way to it is gone once.
    """
    found = []
    ahead: Path | None = None  # the way to the mapping that was opened last
    entries: Mapping[str, Any] = {}
    for number, (path, name) in enumerate(paths):
        if len(path) == 1 and type(source) is dict:  # what most paths are: a parameter by its name
            value = source.get(path[0])
        elif ahead is not None and path[:-1] == ahead:
            value = entries.get(path[-1])
        else:
            start, way = (given, path[1:]) if path and path[0] == "args" and given is not None else (source, path)
            ahead = None
            if way and number + 2 < len(paths) and paths[number + 2][0][:-1] == path[:-1]:
                holder = _follow(start, way[:-1])
                opened = _opened(holder)
                if opened is None:
                    value = _follow(holder, way[-1:])
                else:
                    ahead, entries = path[:-1], opened
                    value = entries.get(path[-1])
            else:
                value = _follow(start, way)
        if value is not _MISSING and value is not None:
            found.append((name, value))
    return found


def _opened(holder: Any) -> Mapping[str, Any] | None:
    """The dictionary in which a mapping keeps its entries, where it lets that be seen; None elsewhere.

    To ask a TensorDict for an entry takes thirty times as long as to ask the dictionary that its `items` belong to.
    """
    if type(holder) is dict:
        return holder
    if not isinstance(holder, Mapping):
        return None
    try:
        items: Any = holder.items()
    except Exception:  # noqa: BLE001  one that cannot list its entries is asked for each
        return None
    return items.mapping if type(items) is _ITEMS else None


def split(table: Mapping[str, str]) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Paths to tensors, and paths to facts (the @ taken off), of a probe's arguments or results."""
    told = [(_path(key), name) for key, names in table.items() for name in names.split(" & ")]
    tensors = [(path, name) for path, name in told if not name.startswith("@")]
    return tensors, [(path, name[1:]) for path, name in told if name.startswith("@")]


def _path(key: str) -> Path:
    return tuple(key.split(".")) if key else ()


def _follow(value: Any, path: Path) -> Any:
    for step in path:
        try:
            value = _part(value, step)
        except Exception:  # noqa: BLE001  what cannot be had (a property that raises) is not there
            return _MISSING
        if value is _MISSING:
            return value
    return value


def _part(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _MISSING)
    if isinstance(value, (list, tuple)) and step.isdecimal():
        return value[int(step)] if int(step) < len(value) else _MISSING
    return getattr(value, step, _MISSING)
