"""OOM: the stage of the peak, then its parts by kind, then whether batch and sequence cuts have changed it."""

import re

from flowledger.diagnose.orders import allocation, changes
from flowledger.diagnose.orders.answer import KNOWN, Answer, failed, passed, skipped, sureness, warned
from flowledger.diagnose.orders.budget import (
    cut_of,
    growing,
    heaviest,
    limit_of,
    short_stage,
    smaller,
    token_counts,
)
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.peaks import (
    FULLEST,
    MOST,
    above_plan,
    is_far,
    kinds_of,
    largest,
    largest_kind,
    largest_planned,
    of_limit,
    on_rank,
    place,
    planned_for,
    planned_kinds,
    planned_peaks,
    size,
)
from flowledger.diagnose.orders.shortage import Said, said
from flowledger.diagnose.orders.table import orders
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.ledger.manifest import value_at

NEAR = 0.95  # of the device: what allocators keep for themselves is not there for a larger batch
OVER = 1.15  # recorded above planned, of one kind, before that kind is called the cause
# Causes of reports that name the tensor of an allocation, by its size or by the frame that asked for it.
NAMES_THE_TENSOR = ("logits_allocation", "logits_of_too_many_tokens", "logits_by_the_frame")
SMALLER = "smaller micro-batches"  # stands for the changes of the stage that ran out: each pass has a knob of its own
RECOMPUTES = "recompute_full"
# Kind -> changes that make it smaller, the cheapest first (rows of tables/advice.toml).
CHANGES = {
    "activation": (RECOMPUTES, SMALLER),
    "temporary": ("fused_logits", "chunked_entropy", SMALLER),
    "optimizer": ("offload_optimizer", "optimizer_on_cpu", "shard_to_fsdp2"),
    "param": ("offload_param", "shard_to_fsdp2", "offload_ref"),
    "grad": ("reduce_every_micro_batch", "shard_to_fsdp2"),
    "kv_cache": ("engine_sleeps", "lower_engine_share"),
    "comm_buffer": ("smaller_sync_bucket",),
    "batch": (SMALLER,),
    "residue": ("lower_engine_share",),
}
# Functions and tensors that a traceback names where logits are made or summed up.
LOGITS_AT_WORK = re.compile(
    r"\w*(?:entropy|logits|log_?probs?|logps?|cross_entropy|log_softmax|softmax|lm_head)\w*", re.IGNORECASE
)
USUAL_VOCABULARY = 151_936  # of the Qwen2 and Qwen3 models, which most of these runs train
EXPANDABLE = {"key": "PYTORCH_CUDA_ALLOC_CONF", "from": "", "to": "expandable_segments:True"}

SIZES = {
    "total": "the device has", "free": "free", "process": "held by the process", "allocated": "allocated", "unused": "reserved and unused",
}  # fmt: skip


def peak_stage(evidence: Evidence) -> Answer:
    """Where memory ran out, or is fullest, and how near to the limit that is."""
    end, rows = evidence.end, evidence.rows(FULLEST)
    table = [f"{place(row)}: peak {size(row['peak'])}{of_limit(row)}" for row in rows[:MOST]] or planned_peaks(evidence)
    if end is not None and (short := shortage(evidence)) is not None:
        told = [f"asked for {size(short.asked.bytes)}"] if short.asked else []
        told += [f"{SIZES[name]} {size(one.bytes)}" for name, one in short._asdict().items() if one and name != "asked"]
        where, below = end.stage or "a stage that the text does not name", above_plan(evidence, short)
        return failed(
            f"memory ran out in {where}{on_rank(end.rank)}: {', '.join(told)}", *below, end.message, *table,
            stage=end.stage, rank=end.rank, step=end.step, confidence=0.4 if end.stage else 0.3,
        )  # fmt: skip
    if end is not None and is_shortage(end.message):
        return failed(f"memory ran out in {end.stage or 'a stage that the text does not name'}{on_rank(end.rank)}",
                      end.message, *table, stage=end.stage, rank=end.rank, confidence=0.4)  # fmt: skip
    if not rows:
        return passed("the planned peak fits", *table) if table and evidence.limit else skipped()
    top = rows[0]
    limit = top["limit"] or evidence.limit
    message = f"the peak is {size(top['peak'])} in {place(top)}{of_limit(top)}"
    full = max(top["peak"], top["reserved_peak_since_stage"] or top["reserved"] or 0) if limit else 0
    if limit and full > NEAR * limit:
        return warned(
            f"{message}; {full / limit:.0%} of the device are taken", *table, stage=top["stage"], rank=top["rank"]
        )
    return passed(message, *table)


def by_kind(evidence: Evidence) -> Answer:
    """What the peak is made of; an allocation that failed by the tensor it was for."""
    rows = evidence.rows(FULLEST)
    split = [row for row in rows if row["known"]]
    table = kinds_of(split[0], planned_for(evidence, split[0])) if split else planned_kinds(evidence)
    short = shortage(evidence)
    if short is not None and short.asked is not None:
        far = not split and is_far(evidence, short)
        return _named(evidence, short, above_plan(evidence, short)[:1] if far else table)  # other parts would mislead
    if not table:
        return skipped()
    if split and (planned := planned_for(evidence, split[0])):
        over = {
            kind: (split[0][kind] or 0, getattr(planned, kind)) for kind in KINDS
            if kind != "residue" and (split[0][kind] or 0) > OVER * getattr(planned, kind)
        }  # fmt: skip
        kind, (has, told) = max(over.items(), key=lambda one: one[1][0] - one[1][1], default=("", (0, 0)))
        if kind and has - told > 0.05 * planned.allocated:
            return failed(
                f"{kind} takes {size(has)} in {place(split[0])}, planned are {size(told)}", *table, stage=split[0]["stage"],
                fix=_turn(evidence, kind), confidence=0.7,
            )  # fmt: skip
    if is_short(evidence):
        kind, most = largest(split[0]) if split else largest_planned(evidence)
        return failed(
            f"the largest part is {kind} with {size(most)}", *table, fix=_turn(evidence, kind), confidence=0.5
        )
    return passed(f"the peak by kind: {'; '.join(table[1:4])}", *table)


def dynamic_batch(evidence: Evidence) -> Answer:
    """Whether the peak follows the tokens of a micro-batch, grows from one to the next, or leaves the cut of sequences unused."""
    if kept := growing(evidence):
        return kept
    if (found := heaviest(evidence)) is not None:
        return found.but(verdict="fail") if is_short(evidence) and found.is_bad else found.but(verdict="pass", fix=None)
    short = is_short(evidence)
    counts = token_counts(evidence, (short_stage(evidence) or "update_actor") if short else None)  # whose budget it is
    budget = limit_of(evidence, "max_tokens")
    if not counts:
        return skipped()
    most = max(counts)
    said_so = f"micro-batches have up to {most:,} tokens"
    if short and budget:
        return failed(
            f"{said_so}, the budget is {budget:,}: the peak follows it",
            fix=smaller(evidence, cut_of(evidence)), confidence=0.4,
        )  # fmt: skip
    return passed(said_so)


# ------------------------------------------------------------------------------------------------------ an allocation


def shortage(evidence: Evidence) -> Said | None:
    """The sizes that the error named, where it named what was asked for."""
    return said(evidence.words)


def is_shortage(text: str) -> bool:
    return orders()["oom"].is_meant(text)


def is_short(evidence: Evidence) -> bool:
    """Whether memory has run out, or a plan says that it will."""
    ran = evidence.end is not None and is_shortage(evidence.words)
    return ran or any(one.id.startswith("memory.") and one.verdict == "fail" for one in evidence.findings)


def _named(evidence: Evidence, short: Said, table: list[str]) -> Answer:
    """The tensor that was asked for; where none fits, whether pieces were free, or what fills the device."""
    asked = short.asked
    assert asked is not None
    end = evidence.end
    counts = token_counts(evidence)
    found = allocation.tensors_of(
        asked, evidence.sizes, counts, degrees=evidence.degrees, stage=end.stage if end else None,
        most_tokens=4 * max(counts) if counts else None, planned=_planned_shapes(evidence),
    )  # fmt: skip
    unused = short.unused.bytes if short.unused else 0
    if unused >= asked.bytes:
        named = [f"the allocation may be {found[0].sentence()}"] if found and found[0].solved is None else []
        return failed(
            f"{size(asked.bytes)} were asked for and {size(unused)} were reserved and unused, but in pieces: fragmentation",
            *named, *table, fix=EXPANDABLE, confidence=0.75,
        )  # fmt: skip
    working = LOGITS_AT_WORK.search(evidence.words)
    known = next((one for one in evidence.known if one.id in NAMES_THE_TENSOR), None)
    if not found and known is not None:  # what the whole text says of it, which is told as the cause: one truth
        return failed(known.message, *(known.evidence or ()), *table, fix=known.fix, next_step=known.next_step or "",
                      confidence=min(sureness(known), KNOWN))  # fmt: skip
    if not found and working:
        rough = asked.bytes // (4 * USUAL_VOCABULARY)
        return failed(
            f"{size(asked.bytes)} were asked for where logits [T_logit, V] are worked on ({working[0]}): tokens * vocabulary * 4 bytes, "
            f"such as {rough:,} tokens of a vocabulary of {USUAL_VOCABULARY:,}", *table, fix=_turn(evidence, "temporary"), confidence=0.6,
            next_step="give the CONFIG too (or --model): then the tokens are exact, and so is the budget that fits",
        )  # fmt: skip
    if not found:
        largest = f"; {table[1]} is the largest part" if len(table) > 1 else ""
        lacks = "" if "V" in evidence.sizes else " without the model's sizes (give the CONFIG, or --model)"
        fix = _turn(evidence, largest_kind(evidence)) if len(table) > 1 else None
        return failed(
            f"{size(asked.bytes)} were asked for, which no tensor of the flow explains{lacks}{largest}", *table, fix=fix,
            confidence=0.3,
        )  # fmt: skip
    best = found[0]
    sure = 0.85 if best.solved is None else 0.7 if working and best.tensor == "logits" else 0.5
    told = f"{size(asked.bytes)} {'=' if best.exact else '≈'} {best.sentence()}"
    told += "" if best.exact else f" = {size(best.bytes)}"
    if best.solved is not None:
        told += f" ({best.solved:,} tokens worked out of the size)"
    return failed(
        told, *(f"or {match.sentence()}" for match in found[1:3] if match.tensor != best.tensor), *table,
        fix=_smaller(evidence, best, short), confidence=sure, stage=end.stage if end else None,
    )  # fmt: skip


def _planned_shapes(evidence: Evidence) -> set[tuple[str, tuple[int, ...]]]:
    """Tensors with what one rank has of them by the plan, in the stage that ran out."""
    stage, rows = short_stage(evidence), evidence.planned.shapes if evidence.planned else ()
    return {(row.tensor_name, tuple(row.local_shape or ())) for row in rows if stage is None or row.stage == stage}


def _smaller(evidence: Evidence, match: allocation.Match, short: Said) -> dict[str, str] | None:
    """For what grows with tokens a budget that leaves room; of logits first a way not to make them whole."""
    free = (short.free.bytes if short.free else 0) + (short.unused.bytes if short.unused else 0)
    asked = short.asked.bytes if short.asked else 0
    grows = "T" in match.dims
    if match.tensor == "logits" and asked > 2 * free:
        for change in ("fused_logits", "chunked_entropy"):
            if found := changes.fix(change, evidence.framework, evidence.config):
                return found
    budget = limit_of(evidence, "max_tokens")
    if grows and budget and asked:
        fitting = min(0.5, free / asked) if free else 0.5
        return smaller(evidence, cut_of(evidence), to=max(int(budget * fitting) // 128 * 128, longest(evidence)))
    kind = (
        "temporary"
        if match.tensor == "logits"
        else "activation"
        if grows
        else "param"
        if match.tensor == "params"
        else "kv_cache"
    )
    return _turn(evidence, kind)


def longest(evidence: Evidence) -> int:
    """Tokens of the longest sample that may come; 0 where no configuration says."""
    prompt = value_at(evidence.config, "data.max_prompt_tokens") or 0
    return int(prompt + (value_at(evidence.config, "rollout.max_response_tokens") or 0))


def _turn(evidence: Evidence, kind: str) -> dict[str, str] | None:
    """The first change for a kind that means anything in the stage that ran out: who has no backward recomputes nothing."""
    cut, known = cut_of(evidence), stages().get(short_stage(evidence) or "")
    forward_only = known is not None and "backward" not in known.phases
    for change in CHANGES.get(kind, ()):
        if change == RECOMPUTES and forward_only:
            continue
        fix = smaller(evidence, cut) if change == SMALLER else changes.fix(change, evidence.framework, evidence.config)
        if fix is not None:
            return fix
    return None
