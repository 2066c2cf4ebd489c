"""The planned collectives of one step of flowledger's own loop on one rank: the page that puts the stages in a row."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flowledger.flow.mesh import Mesh
from flowledger.ledger.rows import SpanRow
from flowledger.plan import step_talk
from flowledger.plan.course import Course
from flowledger.plan.model_talk import Passes, rounds, through
from flowledger.plan.talk import Talk, peers_of


def communication(course: Course) -> list[Talk]:
    """Every collective of a step, alike ones together, in the order of the stages. One process has none."""
    return [] if course.on.size == 1 else _together(_all(course))


def _all(course: Course) -> Iterator[Talk]:
    config = course.config
    yield from step_talk.sampling(course)
    yield from step_talk.balancing(course)
    squares = config.needs("sum_pi_squared")
    if config.old_log_prob_pass:
        yield from _looking(course, "old_log_prob", "actor", 2 + squares)
    if config.ref is not None:
        yield from _looking(course, "ref_log_prob", "ref", 2)
    if config.critic is not None:
        yield from _looking(course, "values", "critic", 1)
    yield from step_talk.estimating(course)
    if config.critic is not None:
        yield from _learning(course, "update_critic", "critic", config.critic.epochs or config.actor.epochs)
    yield from _learning(course, "update_actor", "actor", config.actor.epochs)
    yield from step_talk.summing(course)
    yield from step_talk.syncing(course)
    yield from step_talk.measuring(course)


def _passes(course: Course, stage: str, role: str, numbers: int, *, learns: bool) -> Passes:
    heads = 0 if role == "critic" else numbers
    return Passes(course=course, role=role, stage=stage, learns=learns, heads=heads, numbers=numbers)


def _looking(course: Course, stage: str, role: str, numbers: int) -> Iterator[Talk]:
    """A pass without gradients over all micro-batches."""
    passes = _passes(course, stage, role, numbers, learns=False)
    for mini in course.mini_batches:
        yield from through(passes, rounds(mini, course))
    yield from step_talk.from_last(course, stage, numbers)


def _learning(course: Course, stage: str, role: str, epochs: int) -> Iterator[Talk]:
    """All optimizer steps of a model."""
    passes = _passes(course, stage, role, 1 if role == "critic" else 2, learns=True)
    once = [talk for mini in course.mini_batches if mini for talk in through(passes, rounds(mini, course))]
    for talk in once:
        yield replace(talk, count=talk.count * epochs)
    steps = epochs * sum(bool(mini) for mini in course.mini_batches)
    yield from step_talk.tied(course, stage, passes.shards, steps)
    yield from step_talk.updating(course, stage, steps, 2 if role == "critic" else 3)


def _together(talks: Iterator[Talk]) -> list[Talk]:
    """Collectives that are alike in everything are one row."""
    counts: Counter[Talk] = Counter()
    for talk in talks:
        counts[replace(talk, count=1)] += talk.count
    return [replace(talk, count=count) for talk, count in counts.items()]


def spans(talks: Sequence[Talk], on: Mesh, rank: int, rank_count: int) -> list[SpanRow]:
    """As rows of the ledger: one for all that are alike, which says their number and has the bytes of all of them."""
    peers = {name: list(peers_of(on, name, rank)) for name in {one.group for one in talks}}
    return [
        SpanRow(
            seq=number, t_ns=number, id=number, event="whole", span_kind="comm", start_ns=0, step=1, stage=one.stage,
            phase=one.phase, rank=rank, rank_count=rank_count, name=f"{one.count} × {one.what}", comm_type=one.comm_type,
            group=one.group, peer_ranks=peers[one.group], bytes=None if one.bytes is None else one.total,
        )
        for number, one in enumerate(talks)
    ]  # fmt: skip


def summed(talks: Sequence[Talk]) -> list[dict[str, Any]]:
    """By stage, group and kind: how many, and their bytes; None where those of some are not known."""
    found: dict[tuple[str | None, str, str], list[Talk]] = {}
    for one in talks:
        found.setdefault((one.stage, one.group, one.comm_type), []).append(one)
    return [
        {
            "stage": stage, "group": group, "comm_type": kind, "count": sum(one.count for one in alike),
            "bytes": None if any(one.bytes is None for one in alike) else sum(one.total for one in alike),
        }
        for (stage, group, kind), alike in found.items()
    ]  # fmt: skip
