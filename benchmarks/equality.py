"""Law 7: one RL step on any mesh gives the losses, gradients and weights of one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowledger.config.schema import RunConfig
from flowledger.flow.seams import replaced
from flowledger.run import loop
from flowledger.run.parallel import sharded


@dataclass(slots=True, kw_only=True)
class Trace:
    """What a step left behind on all ranks together."""

    metrics: dict[str, float] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # one an optimizer step, by parameter, unclipped
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far one trace is from another: losses relative, gradients relative to the largest of their tensor, weights."""

    loss: float
    grad: float
    weight_over_lr: float


FLOOR = 0.01  # a loss that is 0 by construction (advantages that add up to 0, ratio 1) is rounding and nothing else
LOSSES = ("policy_loss", "kl_loss", "entropy_loss", "value_loss", "grad_norm", "critic_grad_norm")


def step(config: RunConfig, steps: int = 1) -> Trace:
    """Run a configuration in this process (one rank of its mesh), and put together what its ranks have."""
    trace = Trace()
    with loop.prepared(config) as world, _gradients(trace, world):
        for report in list(loop.train(world))[:steps]:
            trace.metrics = dict(report.metrics)
        trace.weights = {name: weight.clone() for name, weight in world.weights.model.named_parameters()}
    return trace


@contextmanager
def _gradients(trace: Trace, world: Any) -> Iterator[None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(**given: Any) -> Any:
            model = given["model"]
            here = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            trace.gradients.append(sharded.everywhere(here, world.ranks))
            return original(**given)

        return watched

    with replaced([("flowledger.run.update:optimizer_step", make)]) as missed:
        assert not missed
        yield


def gap(one: Trace, other: Trace, lr: float) -> Gap:
    """The largest differences of `other` from `one`. Raises AssertionError where they do not have the same parts."""
    assert len(one.gradients) == len(other.gradients), (len(one.gradients), len(other.gradients))
    losses = [name for name in LOSSES if name in one.metrics]
    return Gap(
        loss=max(abs(one.metrics[n] - other.metrics[n]) / max(abs(one.metrics[n]), FLOOR) for n in losses),
        grad=max(_gradient_gap(a, b) for a, b in zip(one.gradients, other.gradients, strict=True)),
        weight_over_lr=max(
            float((weight - other.weights[name]).abs().max()) / lr for name, weight in one.weights.items()
        ),
    )


def _gradient_gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return max(
        float((grad - other[name]).abs().max()) / max(float(grad.abs().max()), 1e-12) for name, grad in one.items()
    )
