"""Metrics of the update, token by token: what was clipped, how far the policy moved, how sure it is, and of what worth its
weights are. Means are over the tokens of the loss mask and all passes through the update, whatever micro-batch they were in.
"""

from typing import Any

from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger

HERE = f"source <> 'plan' AND step IS NOT NULL AND {WHOLE}"
BOUND = 20  # log-ratios are cut off there before they are exponentiated, and k3 at half of it, as in the loss


def ratio(log: str) -> str:
    """exp of a log-ratio. What is no number, or not there, stays so, which `least` would hide."""
    return f"exp(CASE WHEN {log} IS NULL OR isnan({log}) THEN {log} ELSE greatest(least({log}, {BOUND}), -{BOUND}) END)"


# One row a token and pass. What the update did not say of a token is taken from the stages before it. Ranks that hold the
# same sample (tp, cp, pp) say the same.
PASSES = f"""
passes AS (
    SELECT step, sample_id, position, epoch, mini_batch, micro_batch, min(rank) AS rank, max(new_log_prob) AS new, max(old_log_prob) AS old,
        max(ref_log_prob) AS ref, max(advantage) AS advantage, arg_max(loss_mask, t_ns) AS loss_mask, max(ratio) AS said_ratio,
        bool_or(clipped) AS said_clipped, max(entropy) AS entropy, max(kl) AS kl
    FROM tokens WHERE stage = 'update_actor' AND {HERE}
    GROUP BY step, sample_id, position, epoch, mini_batch, micro_batch),
before AS (
    SELECT step, sample_id, position, arg_max(old_log_prob, t_ns) AS old, arg_max(ref_log_prob, t_ns) AS ref,
        arg_max(advantage, t_ns) AS advantage, arg_max(loss_mask, t_ns) AS loss_mask
    FROM tokens WHERE stage IS DISTINCT FROM 'update_actor' AND {HERE} GROUP BY ALL),
pairs AS (
    SELECT step, sample_id, position, epoch, mini_batch, micro_batch, rank, said_ratio, said_clipped, entropy, kl, new, coalesce(passes.old, before.old) AS old,
        coalesce(passes.ref, before.ref) AS ref, coalesce(passes.advantage, before.advantage) AS a
    FROM passes LEFT JOIN before USING (step, sample_id, position)
    WHERE coalesce(passes.loss_mask, before.loss_mask) = 1)"""

# lower: a bad token that became much rarer; upper: a good one that became much more frequent; dual: a bad one far more frequent.
# Where the run's loss judges something else than tokens (a response, a difference), its own word for ratio and clip stands.
SIDES = f"""
sides AS (
    SELECT *, {ratio("new - old")} AS w, CASE WHEN $low::DOUBLE IS NULL THEN coalesce(said_ratio, w) ELSE coalesce(w, said_ratio) END AS ratio,
        a < 0 AND w < 1 - $low AS below, a > 0 AND w > 1 + $high AS above, a < 0 AND w > $dual AS beyond,
        CASE WHEN $low::DOUBLE IS NULL OR w IS NULL THEN said_clipped ELSE below OR above OR beyond END AS clipped
    FROM pairs)"""

# w of a response is the product over its tokens.
RESPONSES = f"""
responses AS (
    SELECT step, sum(v) ** 2 / (count(v) * sum(v * v)) AS worth FROM (
        SELECT step, {ratio("sum(new - old)")} AS v FROM pairs GROUP BY step, sample_id, epoch)
    GROUP BY step)"""

K3 = f"{ratio('ref - new')} - (ref - new) - 1"
FORMS = {
    "k1": "new - ref", "k2": "(new - ref) ** 2 / 2", "k3": f"least({K3}, {BOUND // 2})", "abs": "abs(new - ref)",
}  # fmt: skip
SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

COLUMNS = (
    ("clip_ratio", "avg(clipped::INT)"),
    ("clip_ratio/lower", "avg(CASE WHEN $low::DOUBLE IS NOT NULL THEN below::INT END)"),
    ("clip_ratio/upper", "avg(CASE WHEN $low::DOUBLE IS NOT NULL THEN above::INT END)"),
    ("clip_ratio/dual", "avg(CASE WHEN $low::DOUBLE IS NOT NULL THEN beyond::INT END)"),
    ("policy_kl", "avg(old - new)"),
    ("policy_kl/k3", "avg(w - (new - old) - 1)"),
    ("ref_kl/k1", "avg(new - ref)"),
    ("ref_kl/k3", f"avg({K3})"),
    ("ratio/mean", "avg(ratio)"),
    ("ratio/min", "min(ratio)"),
    ("ratio/max", "max(ratio)"),
    ("ratio/effective_sample_size", "sum(w) ** 2 / (count(w) * sum(w * w))"),
    ("ratio/effective_responses", "any_value(worth)"),
    ("entropy", "avg(entropy)"),
)


def bounds_and_form(ledger: Ledger) -> tuple[dict[str, Any], tuple[str, str]]:
    """The bounds of the clip, where the loss clips token by token, and `ref_kl` in the form that the run uses."""
    clips = ledger.setting("algorithm.policy_loss") == "vanilla"
    bounds = {name: ledger.setting(f"algorithm.clip_{name}") if clips else None for name in ("low", "high", "dual")}
    form = str(ledger.setting("algorithm.kl_form") or "").rstrip("+")
    of_form = FORMS.get(SAME.get(form, form))
    return bounds, ("ref_kl", f"avg({of_form})" if of_form else "avg(kl)")


def update(ledger: Ledger) -> Rows:
    """All of them in one look at the tokens."""
    if loss_rejects(ledger):
        return []
    bounds, ref_kl = bounds_and_form(ledger)
    return ledger.rows(
        f"WITH {PASSES}, {SIDES}, {RESPONSES} SELECT sides.step, {named((*COLUMNS, ref_kl))} "
        "FROM sides LEFT JOIN responses USING (step) GROUP BY sides.step",
        bounds,
    )


def loss_rejects(ledger: Ledger) -> bool:
    """Whether the loss takes tokens out of its mask by itself (bypass_mode with rejections): which ones is not recorded."""
    correction = ledger.setting("algorithm.rollout_correction.rejections")
    return ledger.setting("algorithm.policy_loss") == "bypass_mode" and bool(correction)


def why_not(ledger: Ledger) -> str:
    """What is lacking where there is no number."""
    if loss_rejects(ledger):
        return "which tokens the loss itself rejected: bypass_mode with rejections does not tell"
    return "rows of `tokens` with new_log_prob, old_log_prob and loss_mask of the update: record.level = tokens"


MEASURES = (
    Measure(names=(*(name for name, _ in COLUMNS), "ref_kl"), make=update, needs=why_not, of_tokens="new_log_prob"),
)
