"""Memory that is kept longer than the flow declares: graphs, gradients, caches, copies, and what grows from step to step.

Kinds are counted at any boundary; activations and temporaries only where operators are watched (record.ops_every).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

Row = Mapping[str, Any]

LEFT = 0.1  # of the activations of a mini-batch that may outlive it: a loss or two, no graph
COPY = 0.5  # of the policy's weights: what is left after weight sync is no buffer any more
GROWS = 0.05, 16 << 20  # share and bytes by which a step may end above the one before, in two steps in a row
FOREIGN = 3  # steps of a loop that is not ours in which something is kept for good, before it is a leak
LEAKS = 0.005  # the same for the live tensors between steps, which are counted to the byte

READINGS = (
    f"SELECT * FROM memory_readings WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE} ORDER BY process, t_ns"
)
WATCHED = "memory by kind: record.level = tensors and record.ops_every > 0"
BY_KIND = "memory by kind: record.level = tensors"


@dataclass(frozen=True, slots=True)
class Memory:
    """The readings of a run in order, and the ledger that they are of."""

    ledger: Ledger
    readings: list[dict[str, Any]]

    @property
    def ours(self) -> bool:
        """Whether it is a run of flowledger's own loop, which keeps to the lifetimes of the flow."""
        return self.ledger.directory.manifest.framework == "flowledger"


def graphs(of: Memory) -> Answer:
    """Activations before the optimizer steps, when every backward pass of the mini-batch is over."""
    rows = [row for row in of.readings if row["activation"] is not None and row["stage"] == "update_actor"]
    if not rows:
        return Answer(needs=(WATCHED,))
    most: dict[tuple[Any, ...], int] = {}
    breaches, seen = [], 0
    for row in rows:
        key = (row["process"], row["step"], row["epoch"], row["mini_batch"])
        if row["phase"] == "step" and row["instant"] == "begin":
            seen += 1
            if row["activation"] > LEFT * most.get(key, 0) > 0:
                breaches.append(
                    Breach(
                        step=row["step"], stage="update_actor", rank=row["rank"],
                        text=f"mini-batch {row['mini_batch']}: {_bytes(row['activation'])} of activations "
                        f"are alive after the last backward pass, of {_bytes(most[key])} at most before",
                    )
                )  # fmt: skip
        else:
            most[key] = max(most.get(key, 0), row["activation"])
    return Answer(breaches=breaches, seen=seen)


# What is let go of before its step ends is late, and no leak. Other loops may keep a batch for several steps on purpose (TRL's
# buffer): there only what is never freed counts, step after step.
HELD = f"""
WITH freed AS (SELECT process, storage, min(coalesce(step, 0)) AS freed_in FROM storages WHERE event = 'freed' GROUP BY ALL)
SELECT step, stage, any_value(rank) AS rank, kind, coalesce(holder, 'unknown') AS holder, freed_in IS NULL AS for_good, count(*) AS n,
    sum(bytes)::BIGINT AS bytes
FROM storages LEFT JOIN freed USING (process, storage)
WHERE event = 'held' AND source <> 'plan' AND coalesce(freed_in > step, true) AND {WHOLE}
GROUP BY step, stage, kind, holder, for_good ORDER BY step, bytes DESC
"""


def held(of: Memory) -> Answer:
    """What the recorder found alive after its release, and who holds it."""
    (told,) = of.ledger.rows("SELECT count(*) AS n FROM storages WHERE source <> 'plan'")
    if not told["n"]:
        return Answer(needs=("rows of `storages`: record.level = tensors",))
    rows = of.ledger.rows(HELD)
    if not of.ours:
        rows = [row for row in rows if row["for_good"]]
        rows = rows if len({row["step"] for row in rows}) > FOREIGN else []
    return Answer(
        seen=told["n"],
        breaches=[
            Breach(
                step=row["step"], stage=row["stage"], rank=row["rank"],
                text=f"{row['n']} storages of kind {row['kind']} ({_bytes(row['bytes'])}) outlive what the flow declares; held by "
                f"{row['holder']}",
            )
            for row in rows
        ],
    )  # fmt: skip


def gradients(of: Memory) -> Answer:
    """Gradients outside of the updates: our own loop frees them in the optimizer step, others before the next backward."""
    if not of.ours:
        return Answer(needs=("a run of flowledger's own loop: others may zero gradients where the next update begins",))
    return _outside(of, "grad", ("update_actor", "update_critic"), "gradients are alive outside of the update")


def caches(of: Memory) -> Answer:
    """The KV cache outside of rollout."""
    return _outside(of, "kv_cache", ("rollout", "validate"), "KV cache is alive after the rollout")


def _outside(of: Memory, kind: str, at_home: tuple[str, ...], what: str) -> Answer:
    rows = [row for row in of.readings if row[kind] is not None]
    if not rows:
        return Answer(needs=(BY_KIND,))
    away = [row for row in rows if row["stage"] is not None and row["stage"] not in at_home and row[kind] > 0]
    first: dict[tuple[str, int], Row] = {}
    for row in away:
        first.setdefault((row["process"], row["step"]), row)
    return Answer(
        seen=len(rows),
        breaches=[
            Breach(
                step=row["step"], stage=row["stage"], rank=row["rank"],
                text=f"{_bytes(row[kind])} of {what}, in {row['stage']}",
            )
            for row in first.values()
        ],
    )  # fmt: skip


def copies(of: Memory) -> Answer:
    """What weight sync leaves behind, against the weights that it has read."""
    rows = [row for row in of.readings if row["stage"] == "weight_sync" and row["known"] is not None]
    begins = {
        (row["process"], row["step"]): row for row in rows if row["instant"] == "begin" and row["temporary"] is not None
    }
    weights = {
        (row["process"], row["step"]): row["bytes"]
        for row in of.ledger.rows(
            "SELECT process, step, sum(bytes)::BIGINT AS bytes FROM tensors WHERE tensor_name = 'params' AND "
            "stage = 'weight_sync' AND access = 'read' AND source <> 'plan' GROUP BY process, step"
        )
    }
    ends = {(row["process"], row["step"]): row for row in rows if row["instant"] == "end"}
    both = sorted(begins.keys() & ends.keys() & weights.keys())
    if not both:
        return Answer(needs=(WATCHED,))
    breaches = [
        Breach(
            step=step, stage="weight_sync", rank=ends[process, step]["rank"],
            text=f"weight sync leaves {_bytes(more)} behind that were not there before; the policy has {_bytes(size)}",
        )
        for process, step in both
        if (more := ends[process, step]["known"] - begins[process, step]["known"])
        > COPY * (size := weights[process, step])
    ]  # fmt: skip
    return Answer(breaches=breaches, seen=len(both))


def leaks(of: Memory) -> Answer:
    """Live tensors where a step begins: from the second on they are weights and optimizer state, and nothing comes on top."""
    rows = [
        row
        for row in of.readings
        if row["stage"] is None and row["instant"] == "begin" and row["temporary"] is not None
    ]
    if len(rows) < 3:
        return Answer(needs=("operators watched in three steps: record.ops_every = 1",))

    def besides(row: Row) -> int:
        return int(row["known"] - (row["optimizer"] or 0) - (row["param"] or 0))

    return Answer(
        seen=len(rows),
        breaches=_grown(
            rows, besides, lambda row: LEAKS * row["known"], "live tensors besides weights and their state"
        ),
    )


def grows(of: Memory) -> Answer:
    """The allocator and the process at the end of each step; the first two steps fill what stays."""
    rows = [row for row in of.readings if row["stage"] is None and row["instant"] == "end"]
    if not any(row["allocated"] is not None or row["host_used"] is not None for row in rows):
        return Answer(needs=("rows of `memory` at the end of steps",))
    breaches: list[Breach] = []
    share, least = GROWS
    first = min(row["step"] for row in rows)  # a framework may count from 1, a resumed run from anywhere
    for column, what in (("allocated", "allocated memory"), ("host_used", "memory of the process")):
        told = [row for row in rows if row[column] is not None and row["step"] > first]
        breaches += _grown(
            told, lambda row, of=column: row[of], lambda row, of=column: max(least, share * row[of]), what
        )
    return Answer(breaches=breaches, seen=len(rows))


def _grown(rows: Iterable[Row], value: Any, least: Any, what: str) -> list[Breach]:
    """Where a value has grown by more than `least` twice in a row, in steps that follow each other."""
    found: list[Breach] = []
    by_process: dict[str, list[Row]] = {}
    for row in rows:
        by_process.setdefault(row["process"], []).append(row)
    for mine in by_process.values():
        for one, two, three in zip(mine, mine[1:], mine[2:], strict=False):
            if three["step"] - one["step"] != 2:
                continue
            first, second = value(two) - value(one), value(three) - value(two)
            if first > least(one) and second > least(two):
                found.append(
                    Breach(
                        step=three["step"], rank=three["rank"],
                        text=f"{what} went from {_bytes(value(one))} over {_bytes(value(two))} to "
                        f"{_bytes(value(three))} in two steps",
                    )
                )  # fmt: skip
    return found


def _bytes(size: int) -> str:
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size} bytes"


FLOW = "flow/tensors.toml: lifetime and freed_by of the tensor"
QUESTIONS = (
    Question(
        id="graph_retained", sentence="no graph outlives its mini-batch", source=FLOW, ask=graphs,
        next_step="keep loss.detach() or loss.item() in logs and lists, and drop retain_graph=True",
    ),
    Question(
        id="held_beyond_lifetime", sentence="nobody holds what the flow has freed", source=FLOW, ask=held, verdict="warn",
        confidence=0.9, next_step="let the holder go of it where its stage ends, or keep what is needed of it only",
    ),
    Question(
        id="gradients_kept", sentence="gradients are freed in the optimizer step", source=FLOW, ask=gradients, verdict="warn",
        confidence=0.9,
        next_step="call optimizer.zero_grad(set_to_none=True) after the step; where grad_norm grows, they were not even zeroed",
    ),
    Question(
        id="kv_cache_kept", sentence="the KV cache is freed after rollout", source=FLOW, ask=caches, verdict="warn",
        next_step="let the cache go when generation ends (an engine: sleep mode, free_cache_engine)",
    ),
    Question(
        id="weights_copied", sentence="weight sync leaves no copy of the weights behind", source=f"{FLOW}; {COPY:.0%} of the weights",
        ask=copies, verdict="warn",
        next_step="free the buffers and state dicts of the sync before the next step begins",
    ),
    Question(
        id="tensors_leak", sentence="no more tensors are alive from step to step",
        source="between steps there are weights and optimizer state: flow/tensors.toml, lifetime persistent", ask=leaks,
        next_step="look who holds them: flowledger show RUN lifetimes names holders",
    ),
    Question(
        id="memory_grows_fast", sentence="memory does not grow from step to step",
        source=f"the run's own steps: {GROWS[0]:.0%} and 16 MiB, twice in a row, after the first two", ask=grows, verdict="warn",
        confidence=0.7, next_step="see which kind grows in flowledger show RUN memory; if none, it is outside of torch",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether anything is kept that should have been freed."""
    return asked(ledger, QUESTIONS, Memory(ledger, ledger.rows(READINGS)))
