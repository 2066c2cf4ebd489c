"""Rewards: the weighted sum of their components, the same on tokens, on the last token that was chosen, less the KL penalty."""

from collections.abc import Iterator, Mapping

from flowledger.diagnose.checks.answers import Breach, answer, apart
from flowledger.diagnose.checks.sequences import Told, Trace, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SUM = "the reward of a sample is the sum of its components by their weights"
TOKENS = "the reward on tokens is that of the sample, and lies on the last token that it chose"
PENALTY = "the reward that advantages are made of is the scored one less kl_coef * KL"


def check(ledger: Ledger) -> list[FindingRow]:
    """`reward_sum_wrong`, `reward_misplaced` and `kl_penalty_wrong`."""
    data = told(ledger)
    weights = {
        one["name"]: one.get("weight", 1.0)
        for one in data.setting("reward.components", ())
        if isinstance(one, Mapping) and "name" in one
    }
    if not data.ours or not weights:
        needs = ("the weights of the components: framework = flowledger",)
        return [
            answer("reward_sum_wrong", SUM, seen=0, needs=needs),
            answer("reward_misplaced", TOKENS, seen=0, needs=needs),
        ]
    scored = [one for one in data.samples.values() if one.reward is not None and one.rewards]
    on_tokens = [one for one in data.sequences if one.has("scored")]
    return [
        answer(
            "reward_sum_wrong", SUM, seen=len(scored), breaches=list(_sums(data, weights)),
            needs=() if scored else ("rewards of samples: record.level = tensors",),
            cause="other weights than reward.components has, or rows of one that were swapped and not of the other",
        ),
        answer(
            "reward_misplaced", TOKENS, seen=len(on_tokens), breaches=list(_placed(data, on_tokens)),
            needs=() if on_tokens else ("rewards of tokens: record.level = tokens",),
            cause="rewards of other samples (rows that were swapped), or a mask that is shifted, look like this",
        ),
        *_penalty(ledger, data, on_tokens),
    ]  # fmt: skip


def _sums(data: Told, weights: Mapping[str, float]) -> Iterator[Breach]:
    for one in data.samples.values():
        if one.reward is None or not one.rewards or set(one.rewards) != set(weights) or None in one.rewards.values():
            continue
        due = sum(weights[name] * float(value or 0.0) for name, value in one.rewards.items())
        if apart(due, one.reward):
            parts = " + ".join(f"{weights[name]:g} * {value:.4g} ({name})" for name, value in one.rewards.items())
            yield Breach(
                step=one.step,
                stage="reward",
                text=f"sample {one.sample_id} has reward {one.reward:.5g}, {parts} is {due:.5g}",
            )


def _placed(data: Told, sequences: list[Trace]) -> Iterator[Breach]:
    single = all(sum(1 for value in one["scored"] if value) <= 1 for one in sequences)
    for one in sequences:
        sample = data.samples.get((one.step, one.sample_id))
        if sample is None or sample.reward is None:
            continue
        total = sum(value or 0.0 for value in one["scored"])
        if apart(total, sample.reward):
            yield Breach(
                step=one.step,
                stage="reward",
                text=f"sample {one.sample_id} has reward {sample.reward:.5g}, and its tokens {total:.5g}",
            )
        own = [at for at, on in enumerate(one["response_mask"]) if on]
        lies = [at for at, value in enumerate(one["scored"]) if value]
        if single and own and lies and lies[0] != own[-1]:
            yield Breach(
                step=one.step,
                stage="reward",
                text=f"sample {one.sample_id} chose its last token at position {one.positions[own[-1]]}, and its reward lies at "
                f"{one.positions[lies[0]]}",
            )


def _penalty(ledger: Ledger, data: Told, sequences: list[Trace]) -> Iterator[FindingRow]:
    """Only where the KL is in the reward."""
    if data.setting("algorithm.kl_in", "loss") != "reward" or data.setting("ref") is None:
        return
    told_coefs = ledger.rows(
        f"SELECT step, value FROM metrics_by_step WHERE name = 'kl_coef' AND value IS NOT NULL AND {WHOLE}"
    )
    coefs = {row["step"]: row["value"] for row in told_coefs}
    breaches = []
    for one in sequences:
        coef = coefs.get(one.step, data.setting("algorithm.kl_coef", 0.0))
        for at, (scored, reward, kl) in enumerate(zip(one["scored"], one["reward"], one["kl"], strict=True)):
            if None in (scored, reward, kl) or not apart(scored - coef * kl, reward):
                continue
            sign = "; it is added" if not apart(scored + coef * kl, reward) else ""
            breaches.append(
                Breach(
                    step=one.step,
                    stage="advantage",
                    text=f"sample {one.sample_id} position {one.positions[at]}: {scored:.5g} - {coef:g} * {kl:.5g} is not {reward:.5g}{sign}",
                )
            )
            break
    yield answer(
        "kl_penalty_wrong",
        PENALTY,
        seen=sum(one.has("kl") for one in sequences),
        breaches=breaches,
        cause="the sign or the coefficient of the penalty",
    )
