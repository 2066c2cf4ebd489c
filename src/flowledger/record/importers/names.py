"""Rows of numbers under both names: the framework's own, and the canonical one where there is one."""

from collections import Counter
from collections.abc import Iterable

from flowledger.ledger.rows import MetricRow
from flowledger.tables.metrics import canonical, name_tables

MOST_NAMES = 50_000  # a log that has more is no log; the cache starts again


# A name that only one framework has -> its table. The first that is there decides.
SIGNS = (
    ("actor/pg_loss", "verl"), ("actor/ppo_kl", "verl"), ("critic/score/mean", "verl"), ("timing_s/step", "verl"),
    ("ppo_actor/", "areal"), ("timeperf/", "areal"), ("train/token_mult_prob_error", "nemo_rl"), ("train/gen_kl_error", "nemo_rl"),
    ("performance/", "nemo_rl"), ("train/pg_clipfrac", "slime"), ("perf/actor_train_time", "slime"), ("rollout/truncated_ratio", "slime"),
    ("train/train_rollout_logprob_abs_diff", "slime"),
    ("train/ppo_clip_ratio", "openrlhf"), ("train/vllm_kl", "openrlhf"), ("train/policy_loss", "openrlhf"),
    ("train/frac_reward_zero_std", "trl_grpo"), ("train/completions/", "trl_grpo"),
    ("frac_reward_zero_std", "trl_grpo"), ("completions/", "trl_grpo"),
)  # fmt: skip


# What people call numbers in tables of their own, where one word has one meaning. Not here: kl (to the reference or to the
# policy of the rollout), loss, entropy_loss.
PLAIN = {
    "response_len": "response_length/mean", "resp_len": "response_length/mean", "mean_response_length": "response_length/mean",
    "prompt_len": "prompt_length/mean", "prompt_length": "prompt_length/mean", "mean_reward": "reward/mean", "reward_mean": "reward/mean",
    "rewards": "reward/mean", "gradient_norm": "grad_norm", "kl_ref": "ref_kl", "clipfrac": "clip_ratio", "clip_frac": "clip_ratio",
}  # fmt: skip


def table_of(names: Iterable[str]) -> str | None:
    """The table of the framework whose names these are: by a sign, else the one that alone knows most of them.

    Names without a `/`, and those that trackers put `train/` before, are of many frameworks: they are not counted.
    """
    known = list(names)
    if (
        table := next((table for sign, table in SIGNS if any(name.startswith(sign) for name in known)), None)
    ) is not None:
        return table
    counted = Counter(
        table
        for name in known
        if "/" in name and not name.startswith("train/")
        for table in name_tables()
        if canonical(table, name) != name
    )
    best = [table for table, count in counted.items() if count == max(counted.values())]
    return best[0] if len(best) == 1 else None


def shared(raw: str) -> str | None:
    """The canonical name that at least two tables give to `raw`, where none gives another; else None."""
    found = [name for table in name_tables() if (name := canonical(table, raw)) != raw]
    return found[0] if len(found) > 1 and len(set(found)) == 1 else None


class Names(dict[str, str]):
    """Own name -> canonical name, by a table of metric_names.toml. `strip`: what a tracker puts before each name.

    `plain`: nobody knows whose names they are; then those count that mean the same wherever they are used.
    """

    def __init__(self, table: str | None, strip: str = "", *, plain: bool = False):
        super().__init__()
        self._table, self._strip, self._plain = table, strip, plain

    def __missing__(self, raw: str) -> str:
        if len(self) > MOST_NAMES:
            self.clear()
        name = canonical(self._table, raw) if self._table is not None else raw
        if name == raw and self._table is not None and self._strip and raw.startswith(self._strip):
            bare = raw.removeprefix(self._strip)
            name = found if (found := canonical(self._table, bare)) != bare else raw
        if name == raw and self._plain:
            bare = raw.removeprefix(self._strip)
            name = PLAIN.get(bare) or shared(raw) or shared(bare) or raw
        self[raw] = name
        return name

    def row(self, raw: str, value: float, step: int | None) -> MetricRow:
        """One number of one step. What JSON cannot hold the writer moves to `special`."""
        return MetricRow(name=self[raw], raw_name=raw, value=value, step=step)
