"""The laws that every ledger must keep, as questions to it. Each answers with one finding: pass, fail, or skipped with what it lacks.

1 shapes: the local shards of all ranks give the logical tensor.  2 tokens: every sample is trained as often as asked, or
says why not, and the tokens of all micro-batches are those of the step.  3 masks nest.  4 lifetimes close.  5 memory adds
up.  6 the identities of a first step. A step that was cut off (`missing`) is left out of all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flowledger.diagnose import missing, shards
from flowledger.diagnose.missing import WHOLE
from flowledger.flow.tensors import tensors
from flowledger.ledger.assemble import SAME, meshes_of
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

Rows = list[dict[str, Any]]

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

TOKENS = "rows of `tokens`: record.level = tokens"  # what a law about tokens lacks where none were recorded

# Noise floors in nats between two computations of the same log-prob, by the dtype that the model computes in.
NOISE = {"float32": 1e-3, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one law found: breaches in words, or what it lacked; `seen` counts what was looked at."""

    seen: int = 0
    breaches: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def check(ledger: Ledger) -> list[FindingRow]:
    """One finding for each law, in their order. Where rows were dropped no law can be held against the rest."""
    lost, cut = missing.rows_dropped(ledger), missing.cut_off(ledger)
    if lost is not None or not missing.has_whole_step(ledger):
        lacks = f"a complete recording: {lost.message}" if lost else f"a step that every rank ended: {cut}"
        answer = Answer(needs=(lacks,))
        skipped = [_finding(position, name, sentence, answer) for position, (name, sentence, _) in enumerate(LAWS, 1)]
        return [*([lost] if lost else []), *skipped]
    return [
        _finding(position, name, sentence, law(ledger), cut) for position, (name, sentence, law) in enumerate(LAWS, 1)
    ]


def shapes_conserved(ledger: Ledger) -> Answer:
    """Law 1, and that a row's numbers agree with each other: numel = Π local shape, bytes = numel * size of the dtype."""
    meshes = meshes_of(ledger.mesh)
    rows = ledger.rows(EVERY if meshes else ALIKE)  # of one process equal rows of all steps are one question
    if not rows:
        return Answer(needs=("rows of `tensors`: record.level = tensors",))
    breaches = [
        f"{shards.where(row)}: {row['numel']} elements and {row['bytes']} bytes do not fit {row['local_shape']} of {row['dtype']}"
        for row in rows
        if not _fills(row) or (row["dtype"] in ITEMSIZE and row["bytes"] != row["numel"] * ITEMSIZE[row["dtype"]])
    ]
    group_size = (ledger.directory.manifest.config.get("rollout") or {}).get("samples_per_prompt", 1)
    alone = ledger.directory.manifest.framework in shards.PAD_ALONE
    if meshes:
        breaches += shards.breaches(rows, meshes, group_size, pad_alone=alone)
    return Answer(seen=sum(row["times"] for row in rows), breaches=tuple(breaches))


# Of each access what the law looks at.
ALIKE_BY = (
    "tensor_name",
    "dims",
    "local_shape",
    "logical_shape",
    "placement",
    "numel",
    "bytes",
    "dtype",
    "padding",
    "rank",
    "stage",
    "phase",
    "access",
)
OF_STEP = tuple(name for name in (*SAME, "seq") if name not in ALIKE_BY)
HELD = f"FROM tensors WHERE source <> 'plan' AND local_shape IS NOT NULL AND {WHOLE}"
EVERY = f"SELECT {', '.join((*ALIKE_BY, *OF_STEP))}, 1 AS times {HELD}"
ALIKE = (
    f"SELECT {', '.join(ALIKE_BY)}, {', '.join(f'arg_min_null({name}, seq) AS {name}' for name in OF_STEP)}, count(*) AS times "
    f"{HELD} GROUP BY {', '.join(ALIKE_BY)} ORDER BY seq"
)


def _fills(row: Mapping[str, Any]) -> bool:
    """Whether a tensor has as many elements as its shape says; a jagged one has at most as many."""
    whole = int(prod(row["local_shape"]))
    return bool(row["numel"] <= whole if row["padding"] == "jagged" else row["numel"] == whole)


def tokens_conserved(ledger: Ledger) -> Answer:
    """Law 2."""
    samples = ledger.rows(f"SELECT * FROM samples_merged WHERE {WHOLE} ORDER BY step, sample_id")
    if not samples:
        return Answer(needs=("rows of `samples`: record.level = tensors",))
    if not ledger.rows("SELECT 1 FROM spans WHERE source <> 'plan' LIMIT 1"):
        return Answer(needs=("spans of the stages: which steps came to their end (record.level = steps)",))
    complete, samples = _complete_steps(ledger), _turn_has_come(samples)
    config = ledger.directory.manifest.config
    every = int((config.get("actor") or {}).get("epochs", 1))
    starts = int((config.get("critic") or {}).get("warmup_steps", 0))  # before, the critic alone learns
    breaches = []
    for sample in samples:
        if _used_in(sample) not in complete:
            continue
        times, epochs = len(sample["trained"] or ()), every if sample["step"] >= starts else 0
        if sample["dropped_reason"] is None and times != epochs:
            breaches.append(
                f"sample {sample['sample_id']} of step {sample['step']} was trained {times} times, not {epochs}, and not dropped"
            )
        if sample["dropped_reason"] is not None and times:
            breaches.append(
                f"sample {sample['sample_id']} was dropped ({sample['dropped_reason']}) and trained all the same"
            )
    went, used = _tokens_updated(ledger), dict[int | None, Rows]()
    for sample in samples:
        used.setdefault(_used_in(sample), []).append(sample)
    for step in sorted(complete & went.keys()):
        due = every * _tokens_kept(used.get(step, []))
        if went[step] != due:
            breaches.append(f"step {step}: {went[step]} tokens went through the update, the kept samples have {due}")
    return Answer(seen=len(samples), breaches=tuple(breaches))


def _used_in(sample: Mapping[str, Any]) -> int | None:
    """The step that learns of a sample: that of its update, which may come later where a run samples ahead."""
    trained: int | None = sample["trained_in"]
    return sample["step"] if trained is None else trained


def _turn_has_come(samples: Rows) -> Rows:
    """Without those that wait: where a run samples ahead, what was sampled last has not been trained on when it ends."""
    trained = [one for one in samples if one["trained_in"] is not None]
    if not any(one["trained_in"] > one["step"] for one in trained):
        return samples
    last = max(one["step"] for one in trained)
    return [one for one in samples if one["trained_in"] is not None or one["dropped_reason"] or one["step"] < last]


def _tokens_kept(samples: Rows) -> int:
    return sum(
        s["prompt_length"] + s["response_length"]
        for s in samples
        if s["dropped_reason"] is None and s["prompt_length"] is not None and s["response_length"] is not None
    )


def _tokens_updated(ledger: Ledger) -> dict[int, int]:
    """Step -> tokens that went through the update of the actor, of each replica once."""
    rows = ledger.rows(
        "SELECT step, sum(tokens_valid)::BIGINT AS valid FROM spans_view WHERE stage = 'update_actor' AND phase = 'forward' "
        "AND (process IN (FROM first_of_replica) OR process NOT IN (SELECT process FROM processes)) AND step IS NOT NULL GROUP BY step"
    )
    return {row["step"]: row["valid"] for row in rows if row["valid"] is not None}


def masks_nest(ledger: Ledger) -> Answer:
    """Law 3, token by token where tokens were recorded."""
    tokens = _tokens(ledger, "coalesce(attention_mask, response_mask, loss_mask) IS NOT NULL")
    if not tokens:
        return Answer(needs=(TOKENS,))
    wrong = ledger.rows(
        "WITH told AS (SELECT sample_id, bool_or(attention_mask IS NOT NULL) AS attention, bool_or(response_mask IS NOT NULL) "
        "AS response FROM tokens GROUP BY ALL) "  # a mask that nobody has told of a sample is not 0
        "SELECT sample_id, position, attention_mask, response_mask, loss_mask FROM tokens_merged JOIN told USING (sample_id) "
        "WHERE ((attention AND coalesce(response_mask, 0) > coalesce(attention_mask, 0)) "
        f"OR (response AND coalesce(loss_mask, 0) > coalesce(response_mask, 0))) AND {WHOLE} LIMIT 20"
    )
    breaches = tuple(
        f"sample {row['sample_id']} position {row['position']}: attention {row['attention_mask']}, "
        f"response {row['response_mask']}, loss {row['loss_mask']}"
        for row in wrong
    )
    return Answer(seen=tokens, breaches=breaches)


def lifetimes_close(ledger: Ledger) -> Answer:
    """Law 4: what was born is freed or declared persistent (or its holder is named), and nothing is read outside its life."""
    (seen,) = ledger.rows("SELECT count(*) AS n FROM storages WHERE source <> 'plan'")
    if not seen["n"]:
        return Answer(needs=("rows of `storages`: record.level = tensors",))
    persistent = [name for name, row in tensors().items() if row.lifetime == "persistent"]
    last = max(_complete_steps(ledger), default=-1)
    breaches = [
        f"storage {row['storage']} in {row['process']} was never freed and is not persistent"
        for row in ledger.rows(NEVER_FREED, [persistent, last])
    ]
    for row in ledger.rows(OUT_OF_LIFE):
        if row["late"]:
            breaches.append(
                f"{row['tensor_name']} at {row['stage']} was read after its storage {row['storage']} was freed"
            )
        if row["early"]:
            breaches.append(
                f"{row['tensor_name']} at {row['stage']} was read before its storage {row['storage']} was born"
            )
    return Answer(seen=seen["n"], breaches=tuple(breaches))


LIVED = f"""
WITH lives AS (
    SELECT process, storage, min(t_ns) FILTER (event = 'born') AS born, min(t_ns) FILTER (event = 'freed') AS freed,
        bool_or(event = 'held') AS held FROM storages WHERE source <> 'plan' GROUP BY process, storage),
uses AS (
    SELECT process, storage, tensor_name, step, stage, t_ns, lifetime FROM tensors
    WHERE source <> 'plan' AND storage IS NOT NULL AND {WHOLE})"""
# Of a process that died by itself it is not told what it freed last.
NEVER_FREED = f"""{LIVED},
used AS (
    SELECT process, storage, bool_or(list_contains(?, tensor_name) OR lifetime IS NOT DISTINCT FROM 'persistent') AS kept,
        bool_or(step < ? AND process NOT IN (SELECT process FROM walked WHERE NOT closed)) AS due FROM uses GROUP BY process, storage)
SELECT process, storage FROM lives JOIN used USING (process, storage)
WHERE born IS NOT NULL AND freed IS NULL AND NOT held AND due AND NOT kept ORDER BY process, storage"""
OUT_OF_LIFE = f"""{LIVED}
SELECT tensor_name, stage, storage, coalesce(t_ns > freed, false) AS late, coalesce(t_ns < born, false) AS early
FROM uses JOIN lives USING (process, storage) WHERE t_ns > freed OR t_ns < born ORDER BY t_ns"""


def memory_adds_up(ledger: Ledger) -> Answer:
    """Law 5: at every instant of a step whose operators were watched, what lives by kind does not exceed the allocator's count."""
    readings = ledger.rows(
        "SELECT step, stage, phase, instant, allocated, residue FROM memory_readings "
        f"WHERE source <> 'plan' AND allocated IS NOT NULL AND residue IS NOT NULL AND {WHOLE} ORDER BY step, t_ns, process"
    )
    if not readings:
        return Answer(needs=("memory by kind: record.level = tensors and record.ops_every > 0",))
    breaches = tuple(
        f"step {row['step']} {row['stage']} {row['instant']}: the kinds add up to {-row['residue']} bytes more than the allocator counts"
        for row in readings
        if row["residue"] < 0
    )
    return Answer(seen=len(readings), breaches=breaches)


def identities(ledger: Ledger) -> Answer:
    """Law 6, on recorded tokens: ratio 1 before the first update, ref = old in the first step, rollout = old within noise."""
    noise = noise_floor(ledger)
    sampling = ledger.directory.manifest.config.get("rollout") or {}
    same = sampling.get("top_p", 1.0) == 1.0 and sampling.get("top_k", 0) == 0
    rows = ledger.rows(IDENTITIES, [noise, noise])
    seen = sum(row["seen"] for row in rows)
    if not seen:
        lacks = (
            "a token in the loss: none of the recorded groups is"
            if _tokens(ledger, "loss_mask IS NOT NULL")
            else TOKENS
        )
        return Answer(needs=(lacks,))
    breaches = []
    for row in rows:
        at = f"sample {row['sample_id']} position {row['position']}"
        if same and row["rollout_off"]:
            breaches.append(
                f"{at}: rollout {row['rollout_log_prob']:.4f}, old {row['old_log_prob']:.4f} (noise floor {noise})"
            )
        if row["ref_off"]:
            breaches.append(f"{at}: ref {row['ref_log_prob']:.4f}, old {row['old_log_prob']:.4f} in the first step")
    ratios = ledger.rows(
        "SELECT sample_id, position, ratio FROM tokens WHERE epoch = 0 AND mini_batch = 0 AND loss_mask = 1 "
        f"AND ratio IS NOT NULL AND abs(ratio - 1) > ? AND {WHOLE} LIMIT 20",
        [noise],
    )
    breaches += [
        f"sample {r['sample_id']} position {r['position']}: ratio {r['ratio']:.5f} before any update" for r in ratios
    ]
    return Answer(seen=seen, breaches=tuple(breaches))


# Tokens in the loss whose log-probs are further apart than noise, and in a last row how many were looked at. What was sampled for a
# later step is of an older policy.
IDENTITIES = f"""
WITH told AS (
    SELECT step, sample_id, position, rollout_log_prob, old_log_prob, ref_log_prob,
        abs(rollout_log_prob - old_log_prob) > ? AND sample_id NOT IN (
            SELECT sample_id FROM samples_merged WHERE trained_in > step AND sample_id IS NOT NULL) AS rollout_off,
        step = 0 AND abs(ref_log_prob - old_log_prob) > ? AS ref_off
    FROM tokens_merged WHERE loss_mask = 1 AND old_log_prob IS NOT NULL AND {WHOLE})
SELECT sample_id, position, rollout_log_prob, old_log_prob, ref_log_prob, rollout_off, ref_off, 0 AS seen FROM told
WHERE rollout_off OR ref_off
UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, false, false, count(*) FROM told
"""


def noise_floor(ledger: Ledger) -> float:
    """How far two computations of the same log-prob may be apart in the dtype that the model of this run computes in, in nats."""
    model = ledger.directory.manifest.config.get("model") or {}
    return NOISE.get(model.get("dtype") or _computed_in(ledger), 0.25)


def _computed_in(ledger: Ledger) -> str:
    """The dtype of log-probs as a pass makes them, of a run without a configuration; they may be kept in another later."""
    found = ledger.rows(
        "SELECT DISTINCT dtype FROM tensors WHERE tensor_name = 'new_log_prob' AND dtype <> 'float32' LIMIT 1"
    )
    return found[0]["dtype"] if found else "float32"


LAWS: tuple[tuple[str, str, Callable[[Ledger], Answer]], ...] = (
    ("shapes_conserved", "local shards of all ranks give the logical tensor", shapes_conserved),
    ("tokens_conserved", "every sample is trained as often as asked or says why not", tokens_conserved),
    ("masks_nest", "loss mask within response mask within attention mask", masks_nest),
    ("lifetimes_close", "what is made is freed or persistent, and read only while it lives", lifetimes_close),
    ("memory_adds_up", "live bytes by kind stay within what the allocator counts", memory_adds_up),
    ("identities", "ratio = 1, ref = old and rollout = old where they must be", identities),
)


def _finding(position: int, name: str, sentence: str, answer: Answer, cut: str = "") -> FindingRow:
    """`cut`: which steps were left out."""
    if answer.needs:
        return FindingRow(
            id=name, order="laws", position=position, verdict="skipped",
            message=f"{sentence}: not checked", needs=list(answer.needs),
        )  # fmt: skip
    if not answer.breaches:
        without = f"; not checked: {cut}" if cut else ""
        return FindingRow(
            id=name, order="laws", position=position, verdict="pass", message=f"{sentence} ({answer.seen} rows{without})"
        )  # fmt: skip
    more = f" (and {len(answer.breaches) - 1} more)" if len(answer.breaches) > 1 else ""
    return FindingRow(
        id=name, order="laws", position=position, verdict="fail", severity="error",
        message=f"{sentence}: not so. {answer.breaches[0]}{more}", evidence=list(answer.breaches[:20]),
    )  # fmt: skip


def _tokens(ledger: Ledger, that: str = "true") -> int:
    """Rows of tokens that are not of a step that was cut off, and of which something holds."""
    return int(ledger.rows(f"SELECT count(*) AS n FROM tokens_merged WHERE {WHOLE} AND {that}")[0]["n"])


def _complete_steps(ledger: Ledger) -> set[int]:
    """Steps whose weights were passed on: one that was interrupted or failed in its update owes nothing."""
    rows = ledger.rows(
        "SELECT DISTINCT step FROM spans_view WHERE stage = 'weight_sync' AND span_kind = 'stage' AND end_ns IS NOT NULL "
        f"AND step IS NOT NULL AND {WHOLE}"
    )
    return {row["step"] for row in rows}
