"""What a pipeline's stage between the ends gathers ahead in vain: a layer at the end of an optimizer step's first backward pass.

FSDP2 gathers in the reverse order of what went forward since the last backward pass: after the first layer of a pass, the
last layer of the pass before. Nobody needs that one; it is cut again, and gathered anew when its turn comes. At both ends
what no layer owns stands between two passes, and is there already.
Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py, `_backward_prefetch`, `_record_post_forward`.
"""

from collections.abc import Iterator, Sequence

from flowledger.plan.model_talk import Passes, rounds, unit_bytes
from flowledger.plan.own_loop import asked
from flowledger.plan.rows_of_tokens import Micro
from flowledger.plan.talk import Talk


def gathered_ahead(
    passes: Passes, mini_batches: Sequence[Sequence[Micro]], epochs: int, *, looked: bool
) -> Iterator[Talk]:
    """All of them in one stage of a step. `looked`: the model has gone forward in this step before, without gradients."""
    course = passes.course
    at, pp = course.on.at(course.rank, "pp"), course.on.degree("pp")
    if not 0 < at < pp - 1:
        return
    layers, counts = _layers_of_chunks(passes), dict[int, int]()
    for first, mini in enumerate(mini_batches):
        number = len(rounds(mini, course, passes.role))
        before = _chunk_before(passes, number, at, pp) if number else None
        times = epochs
        if number and before is None and looked and not first:
            before, times = passes.chunks - 1, 1
        if before is not None and (before < passes.chunks - 1 or len(layers[-1]) > 1):
            counts[layers[before][-1]] = counts.get(layers[before][-1], 0) + times
    dealt = course.on.degree("ep") > 1
    for layer, times in counts.items():
        unit = [one for one in passes.shards.held(course.rank, layer) if not (dealt and one.weight.expert)]
        size = unit_bytes(course, passes.shards, unit, "shards")
        yield from passes.speaker("backward").say("a layer, gathered in vain", "all_gather", "shards", size, times)


def _layers_of_chunks(passes: Passes) -> list[tuple[int, ...]]:
    """The layers of each chunk on this rank."""
    course = passes.course
    at, pp = course.on.at(course.rank, "pp"), course.on.degree("pp")
    told = asked(course.config, passes.role).layers_in_stages[at::pp]
    found, start = [], 0
    for size in told or (len(passes.layers) // passes.chunks,) * passes.chunks:
        found.append(passes.layers[start : start + size])
        start += size
    return found


def _chunk_before(passes: Passes, number: int, at: int, pp: int) -> int | None:
    """The chunk that went forward just before the rank's last one did for the last time before backward begins; null: none.

    Orders as torch's schedules have them: 1F1B with fewer micro-batches than stages is GPipe's.
    """
    chunks, one_by_one = passes.chunks, asked(passes.course.config, passes.role).pipeline == "1f1b" and number >= pp
    if chunks == 1:
        return 0 if (min(number, pp - at) if one_by_one else number) > 1 else None
    each = number // max(1, number // pp)
    passed = min((chunks - 1) * each + 2 * (pp - 1 - at) + 1, number * chunks)
    order = [one // each % chunks for one in range(passed)]
    last = max(index for index, chunk in enumerate(order) if chunk == chunks - 1)
    return order[last - 1]
