"""The update as the weights show it: that they move, by the rate asked for, with a memory of the steps before."""

from dataclasses import dataclass

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked, number
from flowledger.diagnose.measures.series import Series, series_of
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

EXACT = 1e-6  # relative, of a learning rate


@dataclass(frozen=True, slots=True)
class Run:
    """A run and its numbers."""

    ledger: Ledger
    series: Series

    @property
    def ours(self) -> bool:
        """Whether it is a run of flowledger's own loop."""
        return self.ledger.directory.manifest.framework == "flowledger"


def moved(of: Run) -> Answer:
    """Steps in which a gradient was there and a rate above 0, and no weight has changed."""
    ratio, norm, rate = (of.series.by_step(name) for name in ("update_ratio", "grad_norm", "lr"))
    steps = sorted(ratio.keys() & norm.keys() & rate.keys())
    if not steps:
        return Answer(needs=("metrics update_ratio (rollout.weights = copy), grad_norm and lr",))
    return Answer(
        seen=len(steps),
        breaches=[
            Breach(
                step=step, stage="update_actor",
                text=f"grad_norm is {norm[step]:.3g} and lr {rate[step]:.3g}, and no weight has changed",
            )
            for step in steps
            if ratio[step] == 0 and norm[step] > 0 and rate[step] > 0
        ],
    )  # fmt: skip


def rates(of: Run) -> Answer:
    """The learning rate against what was asked for: our own loop's is constant after a linear warm-up."""
    asked_for, told = number(of.ledger, "optim.lr"), of.series.by_step("lr")
    if not of.ours or asked_for is None or not told:
        return Answer(needs=("the metric lr, and optim.lr of a run of flowledger's own loop",))
    warmup, starts = (int(number(of.ledger, key) or 0) for key in ("optim.warmup_steps", "critic.warmup_steps"))
    breaches = []
    for step, rate in sorted(told.items()):
        right = asked_for * min(1.0, (max(0, step - starts) + 1) / (warmup + 1))
        if not abs(rate - right) <= EXACT * asked_for:
            breaches.append(
                Breach(
                    step=step, stage="update_actor",
                    text=f"lr is {rate:.3g}, and optim.lr = {asked_for:g} with warmup_steps = {warmup} makes {right:.3g}",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=len(told))


STATES = f"""
SELECT step, stage, process, rank, count(*) FILTER (access = 'read') AS read, count(*) FILTER (access = 'write') AS written,
    min(seq) AS first
FROM tensors WHERE tensor_name = 'optimizer_state' AND phase = 'step' AND source <> 'plan' AND step IS NOT NULL AND {WHOLE}
GROUP BY step, stage, process, rank, epoch, mini_batch ORDER BY process, first
"""


def remembered(of: Run) -> Answer:
    """Optimizer steps that begin without a state, after one has left one behind. Where a loop never tells what its steps
    begin with, nothing can be said of it; our own does.
    """
    rows = of.ledger.rows(STATES)
    if not of.ours and not any(row["read"] for row in rows):
        rows = []
    if not rows:
        return Answer(needs=("the optimizer's state before and after its steps: record.level = tensors",))
    left: set[tuple[str, str]] = set()
    breaches = []
    for row in rows:
        key = (row["process"], row["stage"])
        if key in left and row["written"] and not row["read"]:
            breaches.append(
                Breach(
                    step=row["step"], stage=row["stage"], rank=row["rank"],
                    text="the optimizer begins without moments, and the update before had left some",
                )
            )  # fmt: skip
        if row["written"]:
            left.add(key)
    return Answer(breaches=breaches, seen=len(rows))


BOUNDS = f"""
SELECT step, any_value(rank) AS rank, max(abs("return")) AS most, max(abs(value)) AS value FROM tokens
WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY step HAVING count("return") > 0 AND count(value) > 0 ORDER BY step
"""
REWARDS = f"""
SELECT step, max(total) AS total FROM (SELECT step, sample_id, sum(most) AS total FROM (
    SELECT step, sample_id, position, max(abs(reward)) AS most FROM tokens
    WHERE reward IS NOT NULL AND source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY ALL) GROUP BY ALL) GROUP BY step
"""


def returns(of: Run) -> Answer:
    """Returns of a critic: a discounted mixture of rewards to come and of one value, so no larger than both together."""
    rewards = {row["step"]: row["total"] for row in of.ledger.rows(REWARDS)}
    rows = [row for row in of.ledger.rows(BOUNDS) if row["step"] in rewards]
    if not rows:
        return Answer(needs=("returns, values and rewards of tokens: record.level = tokens, and a critic",))
    return Answer(
        seen=len(rows),
        breaches=[
            Breach(
                step=row["step"], stage="update_critic",
                text=f"a return of {row['most']:.3g} in size; the rewards of a sample add up to {rewards[row['step']]:.3g} at most, "
                f"and no value exceeds {row['value']:.3g}",
            )
            for row in rows
            if row["most"] > (1 + 1e-4) * (rewards[row["step"]] + row["value"]) + 1e-4
        ],
    )  # fmt: skip


QUESTIONS = (
    Question(
        id="weights_still", sentence="a gradient and a rate above 0 move the weights", ask=moved,
        source="update_ratio is exactly 0 only where every weight is bitwise the same",
        next_step="see that the optimizer holds the parameters of the model that trains (made before wrapping or sharding?), "
        "that they require gradients, and that an update is not below the rounding of bfloat16 weights",
    ),
    Question(
        id="learning_rate_off", sentence="the learning rate is the one asked for", ask=rates,
        source=f"optim.lr after a linear warm-up, {EXACT:g} relative",
        next_step="look at who sets param_groups: a schedule with another number of steps, a rate scaled twice, a restored state",
    ),
    Question(
        id="optimizer_forgets", sentence="the optimizer keeps its moments", ask=remembered,
        source="Adam's moments are written by one step and read by the next: flow/tensors.toml, optimizer_state",
        next_step="build the optimizer once; restore its state with the weights; see what clears or rebuilds it between updates",
    ),
    Question(
        id="returns_too_large", sentence="returns are no larger than rewards and values together", ask=returns,
        source="GAE (arXiv 1506.02438) with 0 <= gamma, lambda <= 1: a return is a mixture of discounted rewards and a value",
        next_step="see that returns are not normalised, scaled or summed twice between advantage and update_critic",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether updates do what they are asked for."""
    return asked(ledger, QUESTIONS, Run(ledger, series_of(ledger)))
