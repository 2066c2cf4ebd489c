"""Rows of numbers under both names: the framework's own, and the canonical one where there is one."""

from collections.abc import Iterable

from flowledger.ledger.rows import MetricRow
from flowledger.tables.metrics import canonical

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


def table_of(names: Iterable[str]) -> str | None:
    """The table of the framework whose names these are; None where no sign is there."""
    known = list(names)
    return next((table for sign, table in SIGNS if any(name.startswith(sign) for name in known)), None)


class Names(dict[str, str]):
    """Own name -> canonical name, by a table of metric_names.toml. `strip`: what a tracker puts before each name."""

    def __init__(self, table: str | None, strip: str = ""):
        super().__init__()
        self._table, self._strip = table, strip

    def __missing__(self, raw: str) -> str:
        if len(self) > MOST_NAMES:
            self.clear()
        name = canonical(self._table, raw) if self._table is not None else raw
        if name == raw and self._table is not None and self._strip and raw.startswith(self._strip):
            bare = raw.removeprefix(self._strip)
            name = found if (found := canonical(self._table, bare)) != bare else raw
        self[raw] = name
        return name

    def row(self, raw: str, value: float, step: int | None) -> MetricRow:
        """One number of one step. What JSON cannot hold the writer moves to `special`."""
        return MetricRow(name=self[raw], raw_name=raw, value=value, step=step)
