"""Metrics of tokens: by hand, against numpy on random tokens, and the laws that they keep whatever the tokens are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowledger.diagnose import agreement
from flowledger.diagnose.measures import micro_batches, series_of
from flowledger.diagnose.measures.absent import needs
from flowledger.diagnose.measures.policy import COLUMNS as OF_UPDATE
from flowledger.diagnose.measures.rollout_gap import COLUMNS as OF_GAP
from flowledger.ledger.rows import MetricRow, Row, SampleRow, TokenRow
from tests.diagnose.measured import CLIPS, book

CONFIG: dict[str, Any] = {"algorithm": CLIPS, "model": {"dtype": "bfloat16"}}
SHARES = [name for name, _ in (*OF_UPDATE, *OF_GAP) if "effective_sample_size" in name]


@dataclass(frozen=True)
class Pass:
    """One sample on its way through the update in one epoch, all [n] but `sample`, `epoch` and `micro_batch`."""

    sample: int
    epoch: int
    micro_batch: int
    mask: np.ndarray
    rollout: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    new: np.ndarray
    entropy: np.ndarray
    advantage: float


def rows(step: int, passes: Sequence[Pass], *, padding: int = 0, garbage: float = -99.0) -> list[Row]:
    """What the stages say of passes, first epochs before later ones; with padding, as many columns after each response that no mask keeps."""
    found: list[Row] = []
    for number, one in enumerate(passes):
        name, at = f"{step}-{one.sample}", {"epoch": one.epoch, "mini_batch": 0, "micro_batch": one.micro_batch}
        if one.epoch == 0:
            found.append(SampleRow(step=step, sample_id=name))
        for place in range(len(one.mask) + padding):
            real = place < len(one.mask)
            kept = int(one.mask[place]) if real else 0
            r, o, f, w, e = (
                (float(x[place]) if real else garbage) for x in (one.rollout, one.old, one.ref, one.new, one.entropy)
            )
            token = {"step": step, "sample_id": name, "position": place, "t_ns": number}
            if one.epoch == 0:
                found.append(TokenRow(**token, stage="rollout", rollout_log_prob=r, response_mask=1))
                found.append(TokenRow(**token, stage="old_log_prob", old_log_prob=o, loss_mask=kept))
                found.append(TokenRow(**token, stage="ref_log_prob", ref_log_prob=f))
                found.append(TokenRow(**token, stage="advantage", advantage=one.advantage))
            found.append(TokenRow(**token, **at, stage="update_actor", phase="forward", new_log_prob=w, entropy=e))
            found.append(TokenRow(**token, **at, stage="update_actor", phase="loss", loss_mask=kept))
    return found


def drawn(seed: int, *, epochs: int = 2) -> list[Pass]:
    """Random passes; at least one token is in the loss."""
    rng = np.random.default_rng(seed)
    found = []
    for sample in range(int(rng.integers(1, 5))):
        n = int(rng.integers(1, 6))
        mask = rng.random(n) < 0.7
        mask[0] |= sample == 0
        rollout = -rng.exponential(1.5, n)
        old = rollout + rng.normal(0, 0.1, n)
        ref, advantage = rollout + rng.normal(0, 0.4, n), float(rng.normal())
        found += [
            Pass(
                sample,
                epoch,
                sample % 2,
                mask,
                rollout,
                old,
                ref,
                old + rng.normal(0, 0.5, n),
                rng.random(n),
                advantage,
            )
            for epoch in range(epochs)
        ]
    return found


def ess(weights: np.ndarray) -> float:
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def by_numpy(passes: Sequence[Pass]) -> dict[str, float]:
    """The second implementation: over all unmasked tokens at once."""
    first = [one for one in passes if one.epoch == 0]

    def flat(of: Sequence[Pass], what: str) -> np.ndarray:
        return np.concatenate([getattr(one, what)[one.mask] for one in of])

    new, old, ref = (flat(passes, what) for what in ("new", "old", "ref"))
    a = np.concatenate([np.full(one.mask.sum(), one.advantage) for one in passes])
    w, delta = np.exp(new - old), new - ref
    lower, upper, dual = (a < 0) & (w < 0.8), (a > 0) & (w > 1.28), (a < 0) & (w > 3)
    r, o = flat(first, "rollout"), flat(first, "old")
    g = np.exp(o - r)
    some = [one for one in passes if one.mask.any()]
    begun = [one for one in first if one.mask.any()]
    return {
        "clip_ratio": (lower | upper | dual).mean(), "clip_ratio/lower": lower.mean(), "clip_ratio/upper": upper.mean(),
        "clip_ratio/dual": dual.mean(), "policy_kl": (old - new).mean(), "policy_kl/k3": (w - 1 - (new - old)).mean(),
        "ref_kl": (np.exp(-delta) - 1 + delta).mean(), "ref_kl/k1": delta.mean(),
        "ref_kl/k3": (np.exp(-delta) - 1 + delta).mean(), "ratio/mean": w.mean(), "ratio/min": w.min(),
        "ratio/max": w.max(), "ratio/effective_sample_size": ess(w),
        "ratio/effective_responses": ess(np.exp([(x.new - x.old)[x.mask].sum() for x in some])),
        "entropy": flat(passes, "entropy").mean(), "rollout_gap/mean": np.abs(r - o).mean(),
        "rollout_gap/max": np.abs(r - o).max(), "rollout_gap/k1": (r - o).mean(),
        "rollout_gap/k3": (g - 1 - (o - r)).mean(), "rollout_gap/prob_mean": np.abs(np.exp(r) - np.exp(o)).mean(),
        "rollout_gap/ppl_ratio": np.mean([np.exp(x.rollout[x.mask].mean() - x.old[x.mask].mean()) for x in begun]),
        "rollout_gap/effective_sample_size": ess(g),
        "rollout_gap/effective_responses": ess(np.exp([(x.old - x.rollout)[x.mask].sum() for x in begun])),
        **({"rollout_gap/pearson": np.corrcoef(np.exp(r), np.exp(o))[0, 1]} if len(r) > 1 else {}),
    }  # fmt: skip


def made(path: Path, rows_of_steps: Sequence[Sequence[Row]]) -> list[dict[str, float]]:
    """Every metric of tokens, a mapping a step."""
    with book(path, [row for of_step in rows_of_steps for row in of_step], config=CONFIG) as ledger:
        series = series_of(ledger)
        names = [*(name for name, _ in (*OF_UPDATE, *OF_GAP)), "ref_kl"]
        numbers = {name: series.by_step(name) for name in names}
    return [{name: of[step] for name, of in numbers.items() if step in of} for step in range(len(rows_of_steps))]


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=8, max_size=12, unique=True), padding=st.integers(1, 3),
    garbage=st.sampled_from([0.0, -99.0, 50.0]), at=st.randoms(use_true_random=False),
)  # fmt: skip
def test_random_tokens_come_to_what_numpy_says_however_they_are_padded_and_cut(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int], padding: int, garbage: float, at: Any
) -> None:
    """Each case is a step; and once more a later one, with padding, other micro-batches, and these in another order."""
    cases = [drawn(seed) for seed in seeds]
    plain = [rows(step, passes) for step, passes in enumerate(cases)]
    other = [
        rows(
            len(cases) + step,
            [replace(one, micro_batch=at.randrange(5)) for one in at.sample(passes, len(passes))],
            padding=padding,
            garbage=garbage,
        )
        for step, passes in enumerate(cases)
    ]
    found = made(tmp_path_factory.mktemp("random") / "run", [*plain, *other])
    for passes, one, two in zip(cases, found[: len(cases)], found[len(cases) :], strict=True):
        expected = by_numpy(passes)
        assert expected.keys() <= one.keys() == two.keys()
        for name, value in expected.items():
            assert math.isclose(one[name], value, rel_tol=1e-9, abs_tol=1e-9), name
            assert math.isclose(two[name], value, rel_tol=1e-9, abs_tol=1e-9), name
        assert all(0 < one[name] <= 1 + 1e-12 for name in SHARES)
        assert one["policy_kl/k3"] >= 0 and one["rollout_gap/k3"] >= 0


def one_token(new: float, advantage: float, *, mask: bool = True, sample: int = 0) -> Pass:
    """A pass of one token whose old log-prob is -1."""
    value = np.array([-1.0])
    return Pass(sample, 0, sample, np.array([mask]), value, value, value, np.array([new]), value, advantage)


def test_each_side_of_the_clip_by_hand(tmp_path: Path) -> None:
    """Ratios 2 (good), ½ (bad), 4 (bad), 2 (bad), 1 (good), and 2 (good) outside of the loss."""
    ratios = [(2, 1), (0.5, -1), (4, -1), (2, -1), (1, 1)]
    passes = [one_token(-1 + math.log(ratio), a, sample=n) for n, (ratio, a) in enumerate(ratios)]
    (found,) = made(tmp_path / "run", [rows(0, [*passes, one_token(-1 + math.log(2), 1, mask=False, sample=9)])])
    sides = {side: found[f"clip_ratio/{side}"] for side in ("upper", "lower", "dual")}
    assert sides == {"upper": 1 / 5, "lower": 1 / 5, "dual": 1 / 5}
    assert found["clip_ratio"] == 3 / 5
    assert found["ratio/effective_sample_size"] == pytest.approx(9.5**2 / (5 * (4 + 0.25 + 16 + 4 + 1)))


def test_a_loss_that_judges_something_else_than_tokens_is_taken_at_its_word(tmp_path: Path) -> None:
    told = {"step": 0, "sample_id": "0", "stage": "update_actor", "epoch": 0, "mini_batch": 0, "micro_batch": 0}
    said = [
        TokenRow(**told, position=n, new_log_prob=-1.0, old_log_prob=-2.0, advantage=0.0, loss_mask=1, ratio=1.1, clipped=n < 1)
        for n in range(4)
    ]  # fmt: skip
    with book(tmp_path / "run", said, config={"algorithm": {**CLIPS, "policy_loss": "gspo"}}) as ledger:
        series = series_of(ledger)
        assert series.by_step("clip_ratio") == {0: 1 / 4} and series.by_step("ratio/max") == {0: 1.1}
        assert series.by_step("clip_ratio/lower") == {}
        assert series.by_step("policy_kl") == {0: -1.0}


def test_tokens_of_a_few_groups_are_an_estimate_and_do_not_stand_before_what_was_recorded(tmp_path: Path) -> None:
    whole, part = rows(0, drawn(1)), rows(1, drawn(2))
    unseen = SampleRow(step=1, sample_id="unseen")  # nobody wrote its tokens
    told = [MetricRow(step=step, name="entropy", raw_name="entropy", value=7.0) for step in (0, 1)]
    with book(tmp_path / "run", [*whole, *part, unseen, *told], config=CONFIG) as ledger:
        series = series_of(ledger)
        assert series.by_step("entropy")[0] == pytest.approx(by_numpy(drawn(1))["entropy"])
        assert series.by_step("entropy")[1] == 7.0
        assert series.by_step("policy_kl")[1] == pytest.approx(by_numpy(drawn(2))["policy_kl"])  # better than nothing
        assert series.by_step("rollout_gap/noise_floor") == {0: 0.25, 1: 0.25}  # bfloat16
        moved, unsure = (micro_batches.bounds(ledger, name)[0] for name in ("policy_kl", "entropy"))
    means = means_of_micro_batches(drawn(1))
    assert moved == pytest.approx((min(means), max(means)))
    of_responses = [float(one.entropy[one.mask].mean()) for one in drawn(1) if one.mask.any()]
    assert unsure == pytest.approx((min(of_responses), max(of_responses)))


def means_of_micro_batches(passes: Sequence[Pass]) -> list[float]:
    """Of old - new, over the unmasked tokens of each that has any."""
    found = []
    for place in {(one.epoch, one.micro_batch) for one in passes}:
        of = [one for one in passes if (one.epoch, one.micro_batch) == place]
        moved = np.concatenate([(one.old - one.new)[one.mask] for one in of])
        found += [float(moved.mean())] if len(moved) else []
    return found


def test_what_the_loss_itself_rejects_is_not_guessed(tmp_path: Path) -> None:
    rejects = {**CLIPS, "policy_loss": "bypass_mode", "rollout_correction": {"rejections": [{"kind": "token_k1"}]}}
    with book(tmp_path / "run", rows(0, drawn(3)), config={"algorithm": rejects}) as ledger:
        series = series_of(ledger)
        assert series.by_step("clip_ratio") == {} and "bypass_mode" in needs(ledger, series.made, "clip_ratio")
        assert series.by_step("rollout_gap/mean")  # which is of what was there before


def test_a_mean_of_means_agrees_where_it_lies_between_those_of_its_parts(tmp_path: Path) -> None:
    """One response of 1 token with entropy 0, one of 3 with entropy 1: ¾ over tokens, ½ over responses, never 2."""
    long, short = np.ones(3), np.zeros(1)
    passes = [
        Pass(n, 0, n, x == x, x - 1, x - 1, x - 1, x - 1, x, 1.0)
        for n, x in enumerate((short, long))
    ]  # fmt: skip
    steps = [row for step in (0, 1, 2) for row in rows(step, passes)]
    told = [
        MetricRow(step=step, name="entropy", raw_name="actor/entropy", value=value)
        for step, value in enumerate((0.5, 0.75, 2.0))
    ]
    for framework, differing in (("verl", {2}), ("flowledger", {0, 2})):
        with book(tmp_path / framework, [*steps, *told], config=CONFIG, framework=framework) as ledger:
            assert agreement.differing(ledger) == {(step, "entropy") for step in differing}
