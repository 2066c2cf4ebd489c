"""What the columns of a token mean: in words for `explain`, and as the legend beneath the strip of a passport."""

from collections.abc import Collection

# Columns of the ledger's `tokens` that are no tensors of the flow -> (English, Chinese).
MADE_BY_THE_LOSS: dict[str, tuple[str, str]] = {
    "ratio": (
        "exp(new_log_prob - old_log_prob) of this token; of a whole response where the policy loss takes it so",
        "该 token 的 exp(new_log_prob - old_log_prob)；策略 loss 按整条 response 取 ratio 时为整条的值",
    ),
    "clipped": ("whether the clip decided this token's loss", "该 token 的 loss 是否由裁剪决定"),
    "loss_share": (
        "this token's part of the policy loss of its mini-batch: all of them add up to it",
        "该 token 在其 mini-batch 策略 loss 中占的份额：全部相加即为该 loss",
    ),
}

# Headings of the strip -> what stands under them. Headings that are not shown are left out.
LEGEND: tuple[tuple[tuple[str, ...], str], ...] = (
    (("rollout", "old", "ref", "new"), "log-prob of this token"),
    (("value",), "the critic's estimate before it"),
    (("reward",), "token_level_reward, less KL where that is in the reward"),
    (("kl",), "KL to the reference"),
    (("adv",), "its weight in the loss"),
    (("return",), "the critic's target, what was obtained from it on (in GRPO, without a critic, the advantage)"),
    (("weight",), "what its loss is multiplied with, for the rollout's log-probs"),
    (("ratio",), "exp(new - old), * where the clip decided"),
    (("loss share",), "its part of the mini-batch's loss"),
)


def legend(shown: Collection[str]) -> str:
    """One line on the headings that are shown: `old, new: log-prob of this token; adv: …`."""
    parts = [
        f"{', '.join(there)}: {meaning}"
        for headings, meaning in LEGEND
        if (there := [heading for heading in headings if heading in shown])
    ]
    return f"{'; '.join(parts)}. A R L: attention, response, loss mask. Dimmed: not in the loss."
