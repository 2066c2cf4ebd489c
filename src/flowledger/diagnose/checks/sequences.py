"""Recorded tokens as sequences: what each stage said of every token of a sample, side by side, for checks to compare.

Of long runs only so many tokens are looked at, of steps spread over the run with its first and last among them: what is
wrong from some step on is wrong in the last one too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.manifest import value_at
from flowledger.ledger.reader import Ledger

MOST_TOKENS, MOST_SAMPLES = 20_000, 20_000  # that are looked at, about
TOKENS = "rows of `tokens`: record.level = tokens"

Values = Sequence[Any]  # one a token, in the order of `positions`; None where nobody has said it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded sample of one step: what the stages before the update said of each of its tokens."""

    step: int
    sample_id: str
    positions: Sequence[int]
    columns: Mapping[str, Values]

    def __getitem__(self, column: str) -> Values:
        return self.columns[column]

    def has(self, column: str) -> bool:
        """Whether anybody has said it of any token."""
        return any(value is not None for value in self.columns[column])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One recorded sample in one micro-batch of the update: what its loss read and made of each token."""

    step: int
    epoch: int
    mini_batch: int
    micro_batch: int
    sample_id: str
    positions: Sequence[int]
    columns: Mapping[str, Values]

    def __getitem__(self, column: str) -> Values:
        return self.columns[column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of one sample, be its tokens recorded or not."""

    step: int
    sample_id: str
    group_id: str | None
    prompt_length: int | None
    response_length: int | None
    finish_reason: str | None
    rewards: Mapping[str, float | None] | None
    reward: float | None
    advantage: float | None
    trained: Sequence[Mapping[str, int]]
    dropped_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All of it, and what the run was asked to do."""

    config: Mapping[str, Any]
    ours: bool  # the manifest describes flowledger's own loop: its settings mean what its documentation says
    sequences: Sequence[Trace]
    passes: Sequence[Pass]
    samples: Mapping[tuple[int, str], Sample]
    of_step: Mapping[int, Sequence[Sample]]  # the same, by step
    lengths: Mapping[tuple[int, str], int]  # of recorded samples: tokens of the loss mask

    def setting(self, key: str, default: Any = None) -> Any:
        """A dotted key of the configuration; `default` where it is not there or null."""
        found = value_at(self.config, key)
        return default if found is None else found


_KNOWN: "WeakKeyDictionary[Ledger, Told]" = WeakKeyDictionary()

# Column -> which rows of `tokens` say it. The last one counts.
SAID = {
    "token_id": ("token_id", "stage IS DISTINCT FROM 'update_actor'"),
    "attention_mask": ("attention_mask", "phase IS NULL"),
    "response_mask": ("response_mask", "phase IS NULL"),
    "loss_mask": ("loss_mask", "stage IN ('filter', 'advantage')"),
    "rollout_log_prob": ("rollout_log_prob", "phase IS NULL"),
    "old_log_prob": ("old_log_prob", "phase IS NULL"),
    "ref_log_prob": ("ref_log_prob", "stage = 'ref_log_prob'"),
    "value": ("value", "stage = 'values' AND phase IS NULL"),
    "scored": ("reward", "stage = 'reward'"),  # token-level reward as it was scored
    "reward": ("reward", "stage IN ('reward', 'advantage')"),  # and with the KL penalty, where there is one
    "advantage": ("advantage", "stage = 'advantage'"),
    "return": ('"return"', "stage = 'advantage'"),
    "kl": ("kl", "stage = 'advantage'"),
    "entropy": ("entropy", "phase IS NULL"),
}
IN_LOSS = (
    "new_log_prob", "old_log_prob", "ref_log_prob", "advantage", "loss_mask", "ratio", "clipped", "loss_share", "kl",
    "entropy", "weight",
)  # fmt: skip


def told(ledger: Ledger) -> Told:
    """What the ledger has of tokens and samples; read once for all checks."""
    if ledger not in _KNOWN:
        manifest = ledger.directory.manifest
        steps = _steps(ledger)
        samples, sequences, of_step = _samples(ledger, steps), _sequences(ledger, steps), dict[int, list[Sample]]()
        for one in samples.values():
            of_step.setdefault(one.step, []).append(one)
        _KNOWN[ledger] = Told(
            config=manifest.config, ours=manifest.framework == "flowledger", sequences=sequences,
            passes=_passes(ledger, steps), samples=samples, of_step=of_step,
            lengths={(one.step, one.sample_id): sum(map(bool, one["loss_mask"])) for one in sequences if one.has("loss_mask")},
        )  # fmt: skip
    return _KNOWN[ledger]


def _steps(ledger: Ledger) -> list[int]:
    """The steps that are looked at: all, or spread over the run, so that neither tokens nor samples are too many."""
    rows = ledger.rows(
        f"SELECT step, count(*) FILTER (token_id IS NOT NULL) AS tokens FROM tokens WHERE step IS NOT NULL AND {WHOLE} "
        "GROUP BY step ORDER BY step"
    )
    samples = ledger.rows(
        f"SELECT step, count(DISTINCT sample_id) AS samples FROM samples WHERE step IS NOT NULL AND {WHOLE} "
        "GROUP BY step ORDER BY step"
    )
    tokens, beside = sum(row["tokens"] for row in rows), sum(row["samples"] for row in samples)
    steps = [row["step"] for row in rows] or [row["step"] for row in samples]
    part = min(1.0, MOST_TOKENS / max(1, tokens), MOST_SAMPLES / max(1, beside))
    many = min(len(steps), max(2, int(len(steps) * part)))
    return (
        steps if many == len(steps) else sorted({steps[round(k * (len(steps) - 1) / (many - 1))] for k in range(many)})
    )


def _sequences(ledger: Ledger, steps: Sequence[int]) -> list[Trace]:
    said = ", ".join(
        f'arg_max({column}, seq) FILTER ({column} IS NOT NULL AND {where}) AS "{name}"'
        for name, (column, where) in SAID.items()
    )
    lists = ", ".join(f'list("{name}" ORDER BY position) AS "{name}"' for name in SAID)
    rows = ledger.rows(
        f"WITH said AS (SELECT step, sample_id, position, {said} FROM tokens WHERE list_contains(?, step) "
        "AND source <> 'plan' GROUP BY step, sample_id, position) "
        f"SELECT step, sample_id, list(position ORDER BY position) AS positions, {lists} FROM said "
        "GROUP BY step, sample_id ORDER BY step, TRY_CAST(sample_id AS BIGINT), sample_id",
        [list(steps)],
    )
    return [
        Trace(step=row.pop("step"), sample_id=row.pop("sample_id"), positions=row.pop("positions"), columns=row)
        for row in rows
    ]


def _passes(ledger: Ledger, steps: Sequence[int]) -> list[Pass]:
    said = ", ".join(f"arg_max({name}, seq) FILTER ({name} IS NOT NULL) AS {name}" for name in IN_LOSS)
    lists = ", ".join(f"list({name} ORDER BY position) AS {name}" for name in IN_LOSS)
    place = ("step", "epoch", "mini_batch", "micro_batch", "sample_id")
    by = ", ".join(place)
    rows = ledger.rows(
        f"WITH said AS (SELECT {by}, position, {said} FROM tokens WHERE list_contains(?, step) AND stage = 'update_actor' "
        f"AND phase = 'loss' AND source <> 'plan' AND epoch IS NOT NULL AND mini_batch IS NOT NULL AND micro_batch IS NOT NULL "
        f"GROUP BY {by}, position) SELECT {by}, list(position ORDER BY position) AS positions, {lists} FROM said "
        f"GROUP BY {by} ORDER BY {by}",
        [list(steps)],
    )
    return [Pass(**{name: row.pop(name) for name in (*place, "positions")}, columns=row) for row in rows]


def _samples(ledger: Ledger, steps: Sequence[int]) -> dict[tuple[int, str], Sample]:
    names = (
        "step", "sample_id", "group_id", "prompt_length", "response_length", "finish_reason", "rewards", "reward",
        "advantage", "trained", "dropped_reason",
    )  # fmt: skip
    rows = ledger.rows(
        f"SELECT {', '.join(names)} FROM samples_merged WHERE list_contains(?, step) AND source <> 'plan'",
        [list(steps)],
    )
    return {(row["step"], row["sample_id"]): Sample(**row | {"trained": row["trained"] or ()}) for row in rows}
