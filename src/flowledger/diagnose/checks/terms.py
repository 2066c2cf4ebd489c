"""The terms beside the policy loss: KL by its form, entropy that is none below 0, and how they add up to what is minimised."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp

from flowledger.diagnose.checks.answers import Breach, answer, apart
from flowledger.diagnose.checks.sequences import TOKENS, Pass, Told, Trace, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

KL = "the KL of a token is that of its log-probs, in the form that the run uses"
ENTROPY = "entropy is never below 0"
TERMS = "what is minimised is policy loss + kl_coef * KL - entropy_coef * entropy"

FORMS: Mapping[str, Callable[[float], float]] = {  # of log π - log π_ref
    "k1": lambda d: d,
    "kl": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: max(-10.0, min(10.0, exp(max(-20.0, min(20.0, -d))) - max(-20.0, min(20.0, -d)) - 1)),
    "low_var_kl": lambda d: FORMS["k3"](d),
}


def check(ledger: Ledger) -> list[FindingRow]:
    """`kl_wrong`, `entropy_negative` and `loss_terms_wrong`."""
    data = told(ledger)
    if not data.ours:
        return [answer("kl_wrong", KL, seen=0, needs=("the form of the KL: framework = flowledger",))]
    return [*_kl(data), *_entropy(data), *_terms(ledger, data)]


def _kl(data: Told) -> Iterator[FindingRow]:
    if data.setting("ref") is None:
        return
    in_reward = data.setting("algorithm.kl_in", "loss") == "reward"
    name = data.setting("algorithm.kl_form") or ("k1" if in_reward else "k3")
    form = FORMS.get(str(name).rstrip("+"))
    places = data.sequences if in_reward else data.passes
    policy, stage = ("old_log_prob", "advantage") if in_reward else ("new_log_prob", "update_actor")
    breaches, seen = [], 0
    for one in places if form is not None else ():
        values = zip(one.positions, one["loss_mask"], one[policy], one["ref_log_prob"], one["kl"], strict=True)
        for position, on, own, ref, kl in values:
            if not on or None in (own, ref, kl):
                continue
            seen += 1
            if apart(due := form(own - ref), kl, absolute=1e-4, relative=1e-3):  # type: ignore[misc]  # None is no form
                turned = "; log-probs were taken the wrong way round" if not apart(form(ref - own), kl) else ""  # type: ignore[misc]
                breaches.append(
                    Breach(
                        step=one.step,
                        stage=stage,
                        text=f"sample {one.sample_id} position {position}: KL {kl:.5f}, its log-probs give {due:.5f}{turned}",
                    )
                )
                break
    yield answer("kl_wrong", f"{KL} ({name})", seen=seen, breaches=breaches, needs=() if seen else (TOKENS,))


def _entropy(data: Told) -> Iterator[FindingRow]:
    everywhere: list[Pass | Trace] = [*data.passes, *data.sequences]
    values: Sequence[tuple[int, str, int, float]] = [
        (one.step, one.sample_id, position, value)
        for one in everywhere
        for position, value in zip(one.positions, one["entropy"], strict=True)
        if value is not None
    ]
    below = [
        Breach(step=step, stage="update_actor", text=f"sample {sample} position {position} has entropy {value:.4f}")
        for step, sample, position, value in values
        if value < -1e-3
    ]
    yield answer(
        "entropy_negative",
        ENTROPY,
        seen=len(values),
        breaches=below[:100],
        needs=() if values else (TOKENS,),
        cause="its sign is wrong",
    )


def _terms(ledger: Ledger, data: Told) -> Iterator[FindingRow]:
    """By micro-batch, where the recorder has noted the terms."""
    rows = ledger.rows(
        "SELECT step, process, epoch, mini_batch, micro_batch, max(value) FILTER (name = 'loss_term/total') AS total, "
        "max(value) FILTER (name = 'loss_term/policy') AS policy, max(value) FILTER (name = 'loss_term/kl') AS kl, "
        "max(value) FILTER (name = 'loss_term/entropy') AS entropy FROM metrics WHERE starts_with(name, 'loss_term/') AND "
        f"value IS NOT NULL AND {WHOLE} GROUP BY ALL ORDER BY step, epoch, mini_batch, micro_batch"
    )
    coefs = {
        row["step"]: row["value"]
        for row in ledger.rows("SELECT step, value FROM metrics_by_step WHERE name = 'kl_coef'")
    }
    entropy_coef, in_loss = (
        float(data.setting("algorithm.entropy_coef", 0.0)),
        data.setting("algorithm.kl_in", "loss") == "loss",
    )
    breaches, seen = [], 0
    for row in rows:
        if None in (row["total"], row["policy"], row["kl"], row["entropy"]):
            continue
        seen += 1
        kl_coef = float(coefs.get(row["step"]) or data.setting("algorithm.kl_coef", 0.0)) if in_loss else 0.0
        due = row["policy"] + kl_coef * row["kl"] - entropy_coef * row["entropy"]
        size = abs(row["policy"]) + abs(kl_coef * row["kl"]) + abs(entropy_coef * row["entropy"])
        if not apart(due, row["total"], absolute=1e-7 + 2e-6 * size, relative=1e-6):
            continue
        breaches.append(
            Breach(
                step=row["step"],
                stage="update_actor",
                text=f"mini-batch {row['mini_batch']} micro-batch {row['micro_batch']}: {row['total']:.6f} is minimised, "
                f"{row['policy']:.6f} + {kl_coef:g} * {row['kl']:.6f} - {entropy_coef:g} * {row['entropy']:.6f} is {due:.6f}",
            )
        )
    yield answer(
        "loss_terms_wrong",
        TERMS,
        seen=seen,
        breaches=breaches,
        needs=() if seen else ("terms of the loss: record.level = tokens",),
        cause="the sign or the coefficient of a term",
    )
