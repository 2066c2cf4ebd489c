"""What vLLM's scheduler (0.32) tells with each of its calls: numbers for an `Engine`, read off its own objects.

Each function is told of one call that has returned: the recorder, the arguments, the result.
"""

import atexit
import time
from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

from flowledger.record.engine import Engine, Finished, Recording, Step

Given = tuple[Any, ...]
Named = Mapping[str, Any]
_engines: dict[int, tuple[ReferenceType[Any], Engine]] = {}  # by the id of a scheduler, and whose it is


def scheduled(recorder: Recording, given: Given, _: Named, output: Any) -> None:
    """`Scheduler.schedule` has chosen who runs in the next step."""
    scheduler = given[0]
    engine = _engine(recorder, scheduler)
    for new in output.scheduled_new_reqs:
        waited_s = max(time.time() - scheduler.requests[new.req_id].arrival_time, 0.0)
        engine.started(new.req_id, cached_tokens=new.num_computed_tokens, waited_s=waited_s)
    if output.total_num_scheduled_tokens:
        running, waiting = scheduler.get_request_counts()
        pool, prefill = scheduler.kv_cache_manager.block_pool, _prefill_tokens(output)
        blocks = pool.num_gpu_blocks - 1  # one is never given to anybody
        engine.stepped(
            Step(
                running=running, waiting=waiting, blocks_used=blocks - pool.get_num_free_blocks(), blocks=blocks,
                prefill_tokens=prefill, decode_tokens=output.total_num_scheduled_tokens - prefill,
            )
        )  # fmt: skip


def preempted(recorder: Recording, given: Given, _: Named, __: object) -> None:
    """`Scheduler._preempt_request` has taken a request's blocks."""
    _engine(recorder, given[0]).preempted()


def freed(recorder: Recording, given: Given, named: Named, _: object) -> None:
    """`Scheduler._free_request`: a request has ended, however that came."""
    scheduler, request = given[0], given[1] if len(given) > 1 else named["request"]
    engine = _engine(recorder, scheduler)
    engine.finished(
        Finished(
            name=request.request_id, reason=str(request.get_finished_reason()), prompt_tokens=request.num_prompt_tokens,
            response_tokens=request.num_output_tokens, computed_tokens=request.num_computed_tokens,
            seconds=max(time.time() - request.arrival_time, 0.0),
        )
    )  # fmt: skip
    if not scheduler.requests:
        engine.rest()


def versioned(recorder: Recording, given: Given, named: Named, _: object) -> None:
    """`EngineCore.set_weight_version`: whoever has sent weights says which they are, in words of his own."""
    words = str(given[1] if len(given) > 1 else named["weight_version"])
    _engine(recorder, given[0].scheduler).version(int(words) if words.isdecimal() else None)


def _engine(recorder: Recording, scheduler: Any) -> Engine:
    """The engine of a scheduler. Asked for every token, so that a dictionary by weak references would be too slow."""
    key = id(scheduler)
    known = _engines.get(key)
    if known is not None and known[0]() is scheduler and known[1].recorder is recorder:  # a fork has one of its own
        return known[1]
    engine = Engine(recorder)
    _engines[key] = ref(scheduler), engine
    atexit.register(engine.write)  # what it did last, where it ends with an error
    return engine


def _prefill_tokens(output: Any) -> int:
    """Tokens of requests that have said nothing yet, or that come back after they were preempted."""
    tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    new = [one.req_id for one in output.scheduled_new_reqs]
    if not new and not cached.resumed_req_ids and 0 not in cached.num_output_tokens:
        return 0  # as in most steps
    said = zip(cached.req_ids, cached.num_output_tokens, strict=True)
    again = (name for name, made in said if not made or name in cached.resumed_req_ids)
    return sum(int(tokens[name]) for name in (*new, *again))
