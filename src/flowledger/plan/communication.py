"""The planned collectives of one step of flowledger's own loop on one rank: the page that puts the stages in a row."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from flowledger.flow.mesh import Mesh, cut
from flowledger.flow.rank_classes import spans as written
from flowledger.ledger.rows import SpanRow
from flowledger.plan import step_talk
from flowledger.plan.course import Course
from flowledger.plan.gathered_ahead import gathered_ahead
from flowledger.plan.model_talk import INT, Passes, rounds, through
from flowledger.plan.setting import RankClass
from flowledger.plan.shards import Cut
from flowledger.plan.talk import Speaker, Talk, peers_of


def communication(course: Course) -> list[Talk]:
    """Every collective of a step, alike ones together, in the order of the stages. One process has none."""
    return [] if course.on.size == 1 else _together(_all(course))


def by_ranks(
    course_of: Callable[[int], Course], on: Mesh, classes: Sequence[RankClass]
) -> list[tuple[RankClass, list[Talk]]]:
    """Every class of ranks with its collectives, in parts where not all ranks have the same."""
    found = []
    for ranks in classes:
        alike: dict[tuple[Talk, ...], list[int]] = {}
        for mine in _with_equal_shares(course_of, on, range(ranks.first, ranks.first + ranks.count)):
            alike.setdefault(tuple(communication(course_of(mine[0]))), []).extend(mine)
        for talks, mine in alike.items():
            mine.sort()
            found.append((replace(ranks, first=mine[0], count=len(mine), part=_part(on, ranks, mine)), list(talks)))
    return found


def _with_equal_shares(course_of: Callable[[int], Course], on: Mesh, ranks: Iterable[int]) -> Iterable[list[int]]:
    """Ranks of a pipeline stage of which collectives see the same: tokens of responses, weights as tp cuts them, prompts."""
    found: dict[Any, list[int]] = {}
    places: dict[tuple[int, int], Any] = {}  # along cp and sp, and along tp
    for rank in ranks:
        course, place = course_of(rank), (on.at(rank, "tokens"), on.at(rank, "tp"))
        if place not in places:
            places[place] = _seen(course)
        start, stop = cut((0, course.config.data.prompts_per_step), on.size, rank)
        found.setdefault((places[place], stop - start, _tied(course)), []).append(rank)
    return found.values()


def _seen(course: Course) -> Any:
    """Of each micro-batch the tokens whose logits are here, and the shapes of weights before FSDP cuts them."""
    minis = [*course.mini_batches, *(mini for batches in course.own.values() for mini in batches)]
    micros = dict.fromkeys(micro for mini in minis for micro in mini)
    kinds = {
        (one.shape, *one.left.items()): (shards, one)
        for _, shards in course.models.values()
        for one in map(Cut, shards.weights)
    }
    return (
        tuple(course.wanted(micro, role) for role in ("actor", "critic") for micro in micros),
        tuple(shards.left(one, course.rank) for shards, one in kinds.values()),
    )


def _tied(course: Course) -> tuple[int, ...]:
    """What FSDP leaves here of an embedding whose gradient goes from one end of the pipeline to the other."""
    shards, at, last = course.models["actor"][1], course.on.at(course.rank, "pp"), course.on.degree("pp") - 1
    if not (shards.tied and last and at in (0, last)):
        return ()
    return tuple(shards.piece(one, course.rank) for one in shards.held(course.rank, None) if one.weight.part == "embed")


def _part(on: Mesh, ranks: RankClass, mine: Sequence[int]) -> str:
    """Which of a class: `sp 0`, or their numbers where no positions along axes are theirs alone."""
    if len(mine) == ranks.count:
        return ranks.part
    where = {axis: sorted({on.at(rank, axis) for rank in mine}) for axis in ("dp", "cp", "sp", "tp")}
    if prod(map(len, where.values())) == len(mine):
        return ", ".join(f"{axis} {written(at)}" for axis, at in where.items() if len(at) < on.degree(axis))
    return f"rank{'s' * (len(mine) > 1)} {written(mine)}"


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
    """A pass without gradients over all micro-batches: those of the update, or its own, whose number ranks agree on."""
    passes = _passes(course, stage, role, numbers, learns=False)
    yield from _cutting(course, stage)
    for mini in course.batches(stage):
        yield from through(passes, rounds(mini, course, role))
    read = 1 if role == "ref" else numbers  # nobody reads the reference's entropy
    yield from step_talk.from_last(course, stage, read)


def _cutting(course: Course, stage: str) -> Iterator[Talk]:
    """Who cuts samples anew agrees with other data-parallel ranks: two numbers of each mini-batch."""
    if minis := course.own.get(stage):
        size = len(minis) * INT
        yield from Speaker(course.on, stage).say("how many micro-batches, and sequences", "all_reduce", "dp", size, 2)


def _learning(course: Course, stage: str, role: str, epochs: int) -> Iterator[Talk]:
    """All optimizer steps of a model."""
    passes, minis = _passes(course, stage, role, 1 if role == "critic" else 2, learns=True), course.batches(stage)
    yield from _cutting(course, stage)
    once = [talk for mini in minis if mini for talk in through(passes, rounds(mini, course, role))]
    for talk in once:
        yield replace(talk, count=talk.count * epochs)
    looked = role == "critic" or course.config.old_log_prob_pass
    yield from gathered_ahead(passes, minis, epochs, looked=looked)
    steps = epochs * sum(bool(mini) for mini in minis)
    yield from step_talk.tied(course, stage, passes.shards, steps)
    yield from step_talk.updating(course, stage, steps, 2 if role == "critic" else 4)


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
            group=one.group, peer_ranks=peers[one.group], bytes=one.total,
        )
        for number, one in enumerate(talks)
    ]  # fmt: skip


def summed(talks: Sequence[Talk]) -> list[dict[str, Any]]:
    """By stage, group and kind: how many, and their bytes."""
    found: dict[tuple[str | None, str, str], list[Talk]] = {}
    for one in talks:
        found.setdefault((one.stage, one.group, one.comm_type), []).append(one)
    return [
        {
            "stage": stage, "group": group, "comm_type": kind, "count": sum(one.count for one in alike),
            "bytes": sum(one.total for one in alike),
        }
        for (stage, group, kind), alike in found.items()
    ]  # fmt: skip
