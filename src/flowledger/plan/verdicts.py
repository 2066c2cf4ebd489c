"""What the memory ledger means for a launch, as findings beside those of the rules: does it fit, does the engine start."""

from collections.abc import Iterator

from flowledger.config.engine import Serving
from flowledger.config.schema import RunConfig
from flowledger.ledger.rows import FindingRow
from flowledger.plan import kv_cache
from flowledger.plan.engines import IN_PROCESS, replicas
from flowledger.plan.memory import StageMemory
from flowledger.plan.roles import longest
from flowledger.plan.serving import Served
from flowledger.tables.models import Architecture

GIB = 2**30


def verdicts(
    config: RunConfig, architecture: Architecture, serving: Serving, served: Served, stages: list[StageMemory]
) -> Iterator[FindingRow]:
    """A finding for the engine, for each stage that does not fit, and for a KV pool that makes samples wait."""
    if not stages or stages[0].limit is None:
        pool = "" if serving.engine in IN_PROCESS else " (an engine's pool is then that of 80 GiB)"
        yield FindingRow(
            id="memory.fits", scope="plan", order="oom", verdict="skipped", needs=["gpu"],
            message=f"whether it fits was not checked: no device is named{pool}", next_step="name one with --gpu",
        )  # fmt: skip
        return
    yield _engine(served)
    over = sorted((one for one in _fullest(stages) if (one.free or 0) < 0), key=lambda one: one.free or 0)
    if over:
        yield _over(over[0], over[1:])
    if not over:
        yield FindingRow(
            id="memory.fits", scope="plan", order="oom", verdict="pass", message="every stage fits the device"
        )
    if serving.engine not in IN_PROCESS and served.kv_pool:
        yield _waiting(config, architecture, serving, served)


def _engine(served: Served) -> FindingRow:
    if served.fits:
        message = f"the inference engine starts with {served.kv_pool / GIB:.1f} GiB for keys and values"
        return FindingRow(id="memory.engine", scope="plan", order="oom", verdict="pass", message=message)
    return FindingRow(
        id="memory.engine", scope="plan", order="oom", verdict="fail", severity="error", fires_at="worker_start",
        message=f"the inference engine cannot start: {served.reason}",
        next_step="shard it over more GPUs, give it a larger share, or offload what rests beside it",
    )  # fmt: skip


def _fullest(stages: list[StageMemory]) -> list[StageMemory]:
    """Each stage once: on the rank class and step where least is free."""
    found: dict[str, StageMemory] = {}
    for one in stages:
        if one.stage not in found or (one.free or 0) < (found[one.stage].free or 0):
            found[one.stage] = one
    return list(found.values())


def _over(one: StageMemory, others: list[StageMemory]) -> FindingRow:
    """One finding for the worst stage; the others that do not fit are named in it."""
    need, limit = max(one.reserved, one.peak.bytes), one.limit or 0
    largest = next(iter(one.peak.by_kind().items()))
    where = "" if one.ranks.label == "all" else f" on {one.ranks.label}"
    too = f"; nor do {', '.join(other.stage for other in others)}" if others else ""
    first = "first_rollout" if any(other.stage == "rollout" for other in (one, *others)) else "first_update"
    return FindingRow(
        id="memory.fits", scope="plan", order="oom", verdict="fail", severity="error", stage=one.stage, role=one.role,
        step=one.step, fires_at=first,
        message=f"{one.stage}{where} needs {need / GIB:.1f} GiB at {one.peak.instant} and the device has {limit / GIB:.1f} GiB; "
        f"most of it is {largest[0]}, {largest[1] / GIB:.1f} GiB{too}",
        next_step="--advise ranks single changes by what they save",
    )  # fmt: skip


def pools_hold(config: RunConfig, architecture: Architecture, served: Served) -> int:
    """Samples of full length that the pools of all engines hold; 0 where there is no engine, or no pool."""
    serving = config.rollout.serving
    if serving.engine in IN_PROCESS or not served.kv_pool:
        return 0
    return replicas(config) * kv_cache.capacity(architecture, serving, served.kv_pool, tokens=longest(config))


def _waiting(config: RunConfig, architecture: Architecture, serving: Serving, served: Served) -> FindingRow:
    """Whether the pool holds as many full-length samples as the engine would run at once."""
    whole = longest(config)
    engines = max(1, replicas(config) // serving.mesh.dp)
    wanted = -(-config.samples_per_step // engines)
    wanted = min(wanted, serving.max_running or wanted)
    holds = kv_cache.capacity(architecture, serving, served.kv_pool, tokens=whole)
    enough = holds >= wanted
    message = f"the KV pool holds {holds} samples of {whole} tokens; up to {wanted} would run at once on a replica"
    return FindingRow(
        id="memory.kv_pool", scope="plan", order="oom", verdict="pass" if enough else "warn",
        severity="info" if enough else "warning", stage="rollout", fires_at="long_sample",
        message=message if enough else f"{message}: the others wait or are preempted",
        next_step=None if enough else "a larger share of the device, more tensor parallelism, or shorter responses",
    )  # fmt: skip
