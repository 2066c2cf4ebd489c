"""What calls tell beside tensors: versions, names, tokenizers, models, numbers."""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from flowledger.record.observe import Observer
from flowledger.record.position import Frame
from flowledger.record.watch import Named


class Facts:
    """Takes the facts of a call to whoever needs them."""

    def __init__(self, observer: Observer, *, metric: Callable[..., None], meet: Callable[[Any], None]) -> None:
        self._observer, self._metric, self._meet = observer, metric, meet
        self._told: set[str] = set()  # metrics that come from the arguments of calls

    def take(self, facts: Mapping[str, Any], frame: Frame, now: int) -> None:
        """One side of a call; the names are those of `watch`, without their @."""
        columns = {}
        for name, value in facts.items():
            if name == "policy_version":
                frame.policy_version = int(value)
            elif name == "micro_batch":
                frame.micro_batch = int(value)
            elif name == "tokenizer":
                self._observer.tokens.tokenizer = value
            elif name == "model":
                self._meet(value)
            elif name.startswith("metric:"):
                self._told.add(name[7:])
                self._metric(name[7:], value, frame, now)
            elif name == "metrics":
                for metric, number in value.items():
                    self._metric(metric, number, frame, now)
            elif name.startswith("token:"):
                columns[name[6:]] = value
            elif name != "step":
                self._observer.facts[name] = value
        if columns:
            self._observer.token_values(frame, columns, now)

    def schedule(self, written: Named, frame: Frame, now: int) -> None:
        """Running and waiting samples, where no decode step told them itself; equal steps in a row are one row, weighted."""
        for name, value in written:
            if name == "generation_metadata" and value.is_cpu and "rollout/running" not in self._told:
                for (running, waiting), alike in groupby(value.tolist()):
                    steps = float(sum(1 for _ in alike))
                    self._metric("rollout/running", running, frame, now, steps)
                    self._metric("rollout/waiting", waiting, frame, now, steps)
