"""What calls tell beside tensors: versions, names, tokenizers, models, numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from flowledger.record import checkpoint_files, endings, lineage, numbering
from flowledger.record.numbering import Numbering
from flowledger.record.observe import Observer
from flowledger.record.position import Frame
from flowledger.record.watch import Named
from flowledger.record.weight_stream import Passed
from flowledger.tables.metrics import canonical

_NUMBERS = {name: name for name in ("policy_version", "micro_batch", "done_step")} | {"at_step": "step"}  # of the frame
_CHECKPOINTS = {"written_checkpoint": "written", "restored_checkpoint": "restored"}


class Facts:
    """Takes the facts of a call to whoever needs them."""

    def __init__(
        self,
        observer: Observer,
        *,
        metric: Callable[..., None],
        meet: Callable[[Any], None],
        bind: Callable[[Mapping[str, int]], Mapping[str, int]],
        numbering: Numbering,
        rank: int = 0,
    ) -> None:
        self._rank = rank
        self._observer, self._metric, self._bind = observer, metric, bind
        self._numbering, self._bound = numbering, bind({})
        self._told: set[str] = set()  # metrics that come from the arguments of calls
        self._takers: dict[str, Callable[[Any, str, Frame, int], None]] = {
            "tokenizer": self._tokenizer, "model": lambda model, _of, _frame, _now: meet(model), "metric": self._number,
            "scalar": self._scalar, "end_tokens": self._ends,
            "metrics": self._numbers, "responses": self._responses, "received_weights": self._received,
            **{name: partial(self._checkpoint, how) for name, how in _CHECKPOINTS.items()},
        }  # fmt: skip

    def take(self, facts: Mapping[str, Any], frame: Frame, now: int) -> None:
        """One side of a call; the names are those of `watch`, without their @."""
        columns = {}
        sizes = {
            name[5:]: value for name, value in facts.items() if name.startswith("bind:") and isinstance(value, int)
        }
        if sizes:
            self._bound = self._bind(sizes)
        for fact, value in facts.items():
            name, _, of = fact.partition(":")
            if name in _NUMBERS:
                setattr(frame, _NUMBERS[name], int(value))
            elif name == "token":
                columns[of] = value
            elif name in lineage.FACTS:
                if self._observer.learns(frame):
                    lineage.take(frame, name, value)
            elif name in numbering.FACTS:
                self._numbering.take(frame, fact, value, self._bound.get("G", 1))
            elif name in self._takers:
                self._takers[name](value, of, frame, now)
            elif name not in ("step", "bind"):
                self._observer.facts[name] = value
        if columns:
            self._observer.token_values(frame, columns, now)

    def _tokenizer(self, tokenizer: Any, _of: str, _frame: Frame, _now: int) -> None:
        self._observer.tokens.tokenizer = tokenizer

    def _number(self, number: Any, of: str, frame: Frame, now: int) -> None:
        self._told.add(of)
        self._metric(of, number, frame, now)

    def _scalar(self, number: Any, of: str, frame: Frame, now: int) -> None:
        """A number that stands on a device as likely as not: reading it waits, so only where content is read anyway."""
        if self._observer.level == "tokens":
            self._metric(of, number, frame, now)

    def _numbers(self, numbers: Mapping[str, Any], of: str, frame: Frame, now: int) -> None:
        for raw, number in numbers.items():
            self._metric(canonical(of, str(raw)), number, frame, now, raw=str(raw))

    def _ends(self, tokens: Any, _of: str, _frame: Frame, _now: int) -> None:
        """A token that ends a response, or several: of whoever says one, each counts."""
        told = tokens if isinstance(tokens, Iterable) else (tokens,)
        self._observer.facts["end_tokens"] = {*self._observer.facts.get("end_tokens", ()), *told}

    def _responses(self, responses: Sequence[Sequence[int]], _of: str, frame: Frame, _now: int) -> None:
        last, lengths = [one[-1] if len(one) else None for one in responses], [len(one) for one in responses]
        ended = endings.reasons(last, lengths, self._observer.facts.get("end_tokens", ()), None)
        frame.columns = {"response_length": [*lengths], "finish_reason": [*ended], **(frame.columns or {})}

    def _checkpoint(self, how: str, folder: Any, _of: str, frame: Frame, now: int) -> None:
        if folder:
            checkpoint_files.tell(folder, self._rank, how, lambda what, number: self._metric(what, number, frame, now))

    def _received(self, weights: Any, _of: str, frame: Frame, now: int) -> None:
        """Some of the weights that an engine is sent; a stream of them is the engine's own, and not gone through."""
        if isinstance(weights, Iterator):
            return
        passed = Passed(waits=self._observer.level == "tokens")
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            passed.add(name, tensor)
        passed.tell(lambda name, value: self._metric(name, value, frame, now), "received")

    def schedule(self, written: Named, frame: Frame, now: int) -> None:
        """Running and waiting samples, where no decode step told them itself; equal steps in a row are one row, weighted."""
        for name, value in written:
            if name == "generation_metadata" and value.is_cpu and "rollout/running" not in self._told:
                for (running, waiting), alike in groupby(value.tolist()):
                    steps = float(sum(1 for _ in alike))
                    self._metric("rollout/running", running, frame, now, steps)
                    self._metric("rollout/waiting", waiting, frame, now, steps)
