"""Who the log-probs are of: a reference that stays, and old log-probs that the update moves away from."""

from collections.abc import Iterator

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.sequences import TOKENS, Told, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

REF = "the reference stays what it was while the policy learns"
RATIO = "the policy moves away from the old one within a step that has several optimizer steps"
FEW = 4  # tokens, below which equal numbers say nothing


def check(ledger: Ledger) -> list[FindingRow]:
    """`ref_is_policy` and `ratio_is_always_1`."""
    data = told(ledger)
    moved = _moved(ledger)
    return [*_reference(data, moved), *_ratio(ledger, data, moved)]


def _moved(ledger: Ledger) -> set[int]:
    """Steps whose update changed the weights, as far as a gradient and a learning rate can tell."""
    rows = ledger.rows(
        f"SELECT step, max(value) FILTER (name = 'grad_norm') AS norm, max(value) FILTER (name = 'lr') AS lr, "
        f"max(value) FILTER (name = 'update_ratio') AS ratio FROM metrics_by_step WHERE {WHOLE} AND step IS NOT NULL GROUP BY step"
    )
    return {
        row["step"]
        for row in rows
        if (row["norm"] or 0) > 1e-6 and (row["lr"] or 0) > 0 and (row["ratio"] is None or row["ratio"] > 1e-7)
    }


def _reference(data: Told, moved: set[int]) -> Iterator[FindingRow]:
    having = [one for one in data.sequences if one.has("ref_log_prob") and one.has("old_log_prob")]
    if not having:
        return
    breaches, seen = [], 0
    for step in sorted({one.step for one in having}):
        pairs = [
            (old, ref)
            for one in having
            if one.step == step
            for old, ref, on in zip(one["old_log_prob"], one["ref_log_prob"], one["loss_mask"], strict=True)
            if on and old is not None and ref is not None
        ]
        if len(pairs) < FEW or not any(earlier < step for earlier in moved):
            continue
        seen += len(pairs)
        if all(old == ref for old, ref in pairs):
            breaches.append(
                Breach(
                    step=step,
                    stage="ref_log_prob",
                    text=f"ref_log_prob is old_log_prob to the last digit on all {len(pairs)} recorded tokens, and the weights have moved since",
                )
            )
    yield answer(
        "ref_is_policy", REF, seen=seen, breaches=breaches, needs=() if seen else ("a step after the weights have moved",),
        cause="the reference is the policy itself (one module, or its weights are synchronised too), so the KL is 0",
    )  # fmt: skip


def _ratio(ledger: Ledger, data: Told, moved: set[int]) -> Iterator[FindingRow]:
    """Before the first optimizer step of a step the ratio is 1; after it, it is not."""
    later = [one for one in data.passes if (one.epoch, one.mini_batch) > (0, 0) and one.step in moved]
    by_step: dict[int, list[float]] = {}
    for one in later:
        by_step.setdefault(one.step, []).extend(
            r for r, on in zip(one["ratio"], one["loss_mask"], strict=True) if on and r is not None
        )
    breaches = [
        Breach(
            step=step,
            stage="update_actor",
            text=f"all {len(ratios)} recorded ratios after its first optimizer step are exactly 1",
        )
        for step, ratios in sorted(by_step.items())
        if len(ratios) >= FEW and all(ratio == 1.0 for ratio in ratios)
    ]
    seen = sum(map(len, by_step.values()))
    lacks = () if seen else (_lacked(ledger, data),)
    yield answer(
        "ratio_is_always_1", RATIO, seen=seen, breaches=breaches, needs=lacks,
        cause="old log-probs are made again after each update, so nothing is ever clipped",
        next_step="compute old_log_prob once a step, before its first optimizer step",
    )  # fmt: skip


def _lacked(ledger: Ledger, data: Told) -> str:
    """Why no ratio after an optimizer step was seen: none recorded, none of that part of a step, or no weights that moved."""
    if not data.passes:
        return TOKENS
    if any((one.epoch, one.mini_batch) > (0, 0) for one in data.passes):
        return "a step whose update moves the weights"
    later = "SELECT 1 FROM spans WHERE source <> 'plan' AND stage = 'update_actor' AND (mini_batch > 0 OR epoch > 0) LIMIT 1"
    if ledger.rows(later):
        return "ratios of a later mini-batch, whose samples were not recorded: record.groups as many as a step has"
    return "ratios after an optimizer step: several mini-batches or epochs a step"
