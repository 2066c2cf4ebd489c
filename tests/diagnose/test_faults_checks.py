"""The checks that make numbers again, on ledgers written by hand: right and wrong numbers worked out beside them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowledger.diagnose.checks import (
    advantages,
    contents,
    copies,
    endings,
    losses,
    masks,
    policies,
    positions,
    prompts,
    rewards,
    terms,
)
from flowledger.ledger import directory, manifest, writer
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, Row, SampleRow, SpanRow, TensorRow, TokenRow, Trained

MINE = (advantages, contents, copies, endings, losses, masks, policies, positions, prompts, rewards, terms)
SETTINGS = {
    "algorithm": {"advantage": "grpo", "policy_loss": "vanilla", "loss_aggregation": "token-mean"},
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, "stop_token_ids": [9]},
    "reward": {"components": [{"name": "right", "weight": 1.0}, {"name": "short", "weight": 0.5}]},
}


def told(
    check: ModuleType, path: Path, rows: Iterable[Row], framework: str = "flowledger", **changes: Any
) -> dict[str, Any]:
    """Finding by id of one check on these rows."""
    config = {name: value | changes.get(name, {}) for name, value in SETTINGS.items()} | {
        name: value for name, value in changes.items() if name not in SETTINGS
    }
    made = directory.create(path, manifest.Manifest(run="hand", level="tokens", config=config, framework=framework))
    ink = writer.Writer(made.part("actor", 0))
    for row in rows:
        ink.put(row)
    ink.close()
    made.close()
    with Ledger(path) as ledger:
        return {one.id: one for one in check.check(ledger)}


def group(advantage: Iterable[float], reward: Iterable[float] = (1.0, 0.0, 0.0, 0.0), **more: Any) -> list[Row]:
    """Four samples of one group."""
    pairs = zip(reward, advantage, strict=True)
    return [
        SampleRow(sample_id=str(n), group_id="0", step=0, prompt_length=2, reward=r, advantage=a, **more)
        for n, (r, a) in enumerate(pairs)
    ]


# Rewards 1 0 0 0: mean 1/4, unbiased standard deviation 1/2; the mean of the others is 0, or 1/3.
ESTIMATED = {
    "grpo": ("grpo", (1.5, -0.5, -0.5, -0.5), "pass"),
    "grpo of two samples swapped": ("grpo", (-0.5, 1.5, -0.5, -0.5), "fail"),
    "grpo with a biased deviation": ("grpo", (1.7321, -0.5774, -0.5774, -0.5774), "fail"),
    "dr_grpo": ("dr_grpo", (0.75, -0.25, -0.25, -0.25), "pass"),
    "dr_grpo that was divided": ("dr_grpo", (1.5, -0.5, -0.5, -0.5), "fail"),
    "rloo": ("rloo", (1.0, -1 / 3, -1 / 3, -1 / 3), "pass"),
    "rloo with the mean of all": ("rloo", (0.75, -0.25, -0.25, -0.25), "fail"),
    "the best two": ("grpo_passk", (2.0, 0.0, 0.0, 0.0), "pass"),
    "the best two of the wrong sample": ("grpo_passk", (0.0, 2.0, 0.0, 0.0), "fail"),
    "whitened": ("reinforce_plus_plus_baseline", (1.9, -0.4, -0.4, -0.4), "pass"),  # a line, whatever its slope
    "whitened, and one that is off it": ("reinforce_plus_plus_baseline", (1.9, -0.4, -0.4, 0.4), "fail"),
    "whitened the wrong way round": ("reinforce_plus_plus_baseline", (-1.9, 0.4, 0.4, 0.4), "fail"),
    "an estimator that nobody knows": ("mine", (5.0, 5.0, 5.0, 5.0), "skipped"),
}


@pytest.mark.parametrize("name", list(ESTIMATED))
def test_advantages_by_hand(tmp_path: Path, name: str) -> None:
    estimator, numbers, verdict = ESTIMATED[name]
    found = told(advantages, tmp_path / "run", group(numbers), algorithm={"advantage": estimator})
    assert found["advantages_wrong"].verdict == verdict


def tokens(sample: str, columns: dict[str, list[Any]], *, first: int = 0, **place: Any) -> list[Row]:
    """A row for each token of one sample, from position `first` on."""
    width = max(map(len, columns.values()))
    return [
        TokenRow(
            sample_id=sample, position=first + at, step=0, **place, **{name: row[at] for name, row in columns.items()}
        )
        for at in range(width)
    ]


def test_gae_by_hand(tmp_path: Path) -> None:
    """γ = λ = 1/2, rewards 0 and 1, values 1/2 and 1/4: δ = (0 + 1/8 - 1/2, 1 - 1/4) = (-3/8, 3/4), A = (-3/8 + 3/16, 3/4)."""
    values = {"value": [0.5, 0.25]}

    def run(path: Path, returns: list[float]) -> str:
        rows = [
            SampleRow(sample_id="0", group_id="0", step=0, advantage=0.0, reward=1.0),
            *tokens("0", {"reward": [0.0, 1.0]}, stage="reward"), *tokens("0", {"loss_mask": [1, 1]}, stage="filter"),
            *tokens("0", values, stage="values"),
            *tokens("0", {"advantage": [-1.0, 1.0], "return_": returns}, stage="advantage"),
        ]  # fmt: skip
        found = told(advantages, path, rows, algorithm={"advantage": "gae", "gamma": 0.5, "lam": 0.5})
        return str(found["advantages_wrong"].verdict)

    assert run(tmp_path / "right", [-0.1875 + 0.5, 0.75 + 0.25]) == "pass"
    assert run(tmp_path / "undiscounted", [1.0, 1.0]) == "fail"


def update(divisor: float) -> list[Row]:
    """Two samples of 3 and 1 tokens in a mini-batch, advantages 1 and -1, ratio 1: each token's share is -a / divisor."""
    rows: list[Row] = []
    for sample, length, advantage in (("0", 3, 1.0), ("1", 1, -1.0)):
        micro = int(sample)
        where = {"epoch": 0, "mini_batch": 0, "micro_batch": micro}
        rows.append(
            SampleRow(sample_id=sample, step=0, response_length=length, trained=[Trained(rank=0, **where)])  # type: ignore[arg-type]
        )
        rows += tokens(
            sample,
            {
                "new_log_prob": [-1.0] * length, "old_log_prob": [-1.0] * length, "advantage": [advantage] * length,
                "loss_mask": [1] * length, "ratio": [1.0] * length, "loss_share": [-advantage / divisor] * length,
            },
            stage="update_actor", phase="loss", **where,
        )  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("divisor", "verdict", "said"),
    [(4, "pass", ""), (2, "fail", "divided by samples, not by tokens"), (8, "fail", "0.5000 times"), (1, "fail", "nothing was divided by")],
)  # fmt: skip
def test_a_normaliser_by_hand(tmp_path: Path, divisor: float, verdict: str, said: str) -> None:
    found = told(losses, tmp_path / "run", update(divisor))
    assert (found["ratio_wrong"].verdict, found["loss_wrong"].verdict) == ("pass", "pass")
    assert found["normaliser_wrong"].verdict == verdict
    assert said in found["normaliser_wrong"].message


def test_the_divisor_of_a_mesh_is_named(tmp_path: Path) -> None:
    found = told(losses, tmp_path / "run", update(8), mesh={"cp": 2})
    assert "a divisor of cp = 2 too many" in found["normaliser_wrong"].message


def sequence(mask: list[int], *, attended: list[int], ids: list[int], reason: str = "stop") -> list[Row]:
    """Two tokens of prompt, then the response, of one sample."""
    length = sum(attended) - 2
    return [
        SampleRow(sample_id="0", group_id="0", step=0, prompt_length=2, response_length=length, finish_reason=reason),
        *tokens("0", {"token_id": ids, "attention_mask": attended, "response_mask": mask}, stage="rollout"),
        *tokens("0", {"loss_mask": mask}, stage="filter"),
    ]  # fmt: skip


MASKS = {
    "on the response": ([0, 0, 1, 1, 1], "pass"),
    "one late": ([0, 0, 0, 1, 1], "fail"),
    "one early": ([0, 1, 1, 1, 0], "fail"),
    "without its end": ([0, 0, 1, 1, 0], "fail"),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_by_hand(tmp_path: Path, name: str) -> None:
    mask, verdict = MASKS[name]
    rows = sequence(mask, attended=[1] * 5, ids=[5, 6, 1, 2, 9])
    assert told(masks, tmp_path / "run", rows)["response_mask_wrong"].verdict == verdict


ENDINGS = {
    "stopped by a stop token": ([5, 6, 1, 9], "stop", "pass"),
    "stopped at the limit by a stop token": ([5, 6, 1, 2, 3, 9], "stop", "pass"),
    "said to have stopped at the limit": ([5, 6, 1, 2, 3, 4], "stop", "fail"),
    "cut off": ([5, 6, 1, 2, 3, 4], "length", "pass"),
    "said to be cut off": ([5, 6, 1, 2], "length", "fail"),
}


@pytest.mark.parametrize("name", list(ENDINGS))
def test_endings_by_hand(tmp_path: Path, name: str) -> None:
    ids, reason, verdict = ENDINGS[name]
    rows = sequence([0, 0] + [1] * (len(ids) - 2), attended=[1] * len(ids), ids=ids, reason=reason)
    assert told(endings, tmp_path / "run", rows)["finish_reason_wrong"].verdict == verdict


def scored(reward: float, on_tokens: list[float]) -> list[Row]:
    """0.4 right and 0.6 short: 0.4 + 0.5 * 0.6 = 0.7."""
    return [
        SampleRow(sample_id="0", step=0, rewards={"right": 0.4, "short": 0.6}, reward=reward),
        *tokens("0", {"response_mask": [1, 1, 0]}, stage="rollout"), *tokens("0", {"reward": on_tokens}, stage="reward"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "on_tokens", "verdicts"),
    [
        (0.7, [0.0, 0.7, 0.0], ("pass", "pass")),
        (1.0, [0.0, 1.0, 0.0], ("fail", "pass")),
        (0.7, [0.0, 0.0, 0.7], ("pass", "fail")),
        (0.7, [0.0, 0.5, 0.0], ("pass", "fail")),
    ],
)
def test_rewards_by_hand(tmp_path: Path, reward: float, on_tokens: list[float], verdicts: tuple[str, str]) -> None:
    found = told(rewards, tmp_path / "run", scored(reward, on_tokens))
    assert (found["reward_sum_wrong"].verdict, found["reward_misplaced"].verdict) == verdicts


def test_tiled_groups_have_prompts_of_several_lengths(tmp_path: Path) -> None:
    def samples(groups: str) -> list[Row]:
        return [
            SampleRow(sample_id=str(n), group_id=of, step=0, prompt_length=3 if n < 4 else 5)
            for n, of in enumerate(groups)
        ]

    assert told(prompts, tmp_path / "right", samples("00001111"))["group_mixed"].verdict == "pass"
    assert told(prompts, tmp_path / "tiled", samples("01010101"))["group_mixed"].verdict == "fail"
    assert told(prompts, tmp_path / "uneven", samples("00000111"))["group_mixed"].verdict == "fail"


@pytest.mark.parametrize(("total", "verdict"), [(0.5 + 0.1 * 2 - 0.01 * 3, "pass"), (0.5 - 0.1 * 2 - 0.01 * 3, "fail")])
def test_terms_by_hand(tmp_path: Path, total: float, verdict: str) -> None:
    parts = {"total": total, "policy": 0.5, "kl": 2.0, "entropy": 3.0}
    rows = [
        MetricRow(
            name=f"loss_term/{name}", raw_name=name, value=value, step=0, epoch=0, mini_batch=0, micro_batch=0
        )
        for name, value in parts.items()
    ]  # fmt: skip
    found = told(terms, tmp_path / "run", rows, algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})
    assert found["loss_terms_wrong"].verdict == verdict


def test_content_that_changes_between_two_stages_is_named(tmp_path: Path) -> None:
    def rows(read: int) -> list[Row]:
        common = {"tensor_name": "old_log_prob", "local_shape": [8, 4], "step": 0}
        return [
            TensorRow(**common, stage="old_log_prob", access="write", checksum=7),  # type: ignore[arg-type]
            TensorRow(**common, stage="update_actor", access="read", checksum=read),  # type: ignore[arg-type]
        ]

    assert told(contents, tmp_path / "same", rows(7))["content_changed"].verdict == "pass"
    found = told(contents, tmp_path / "other", rows(8))["content_changed"]
    assert found.verdict == "fail"
    assert "update_actor reads a old_log_prob that differs from what old_log_prob wrote" in found.message


@pytest.mark.parametrize("framework", ["flowledger", "verl"])
def test_without_rows_every_check_says_what_it_lacks(tmp_path: Path, framework: str) -> None:
    made = directory.create(tmp_path / "run", manifest.Manifest(run="hand", config={}, framework=framework))
    made.close()
    with Ledger(tmp_path / "run") as ledger:
        found = [one for check in MINE for one in check.check(ledger)]
    assert {one.verdict for one in found} == {"skipped"}
    assert all(one.needs for one in found)


@pytest.mark.parametrize("framework", ["flowledger", "trl"])
def test_half_of_the_columns_break_nothing(tmp_path: Path, framework: str) -> None:
    """Whoever imports a foreign log may have any of them."""
    made = directory.create(tmp_path / "run", manifest.Manifest(run="hand", config=SETTINGS, framework=framework))
    ink = writer.Writer(made.part("actor", 0))
    in_loss = {"stage": "update_actor", "phase": "loss", "epoch": 0, "mini_batch": 0, "micro_batch": 0}
    for row in (
        SampleRow(sample_id="a", step=0), SampleRow(sample_id="b", step=1, reward=1.0, rewards={"x": None}),
        TokenRow(sample_id="a", position=0, step=0), TokenRow(sample_id="b", position=3, step=1, loss_mask=1),
        TokenRow(sample_id="c", position=3, step=None, advantage=1.0),
        TokenRow(sample_id="b", position=3, step=1, loss_mask=1, **in_loss),  # type: ignore[arg-type]
        TensorRow(tensor_name="loss_mask", stage="update_actor", access="read", checksum=1),
        MetricRow(name="loss_term/total", raw_name="x", value=1.0), MetricRow(name="kl_coef", raw_name="x", special="nan"),
    ):  # fmt: skip
        ink.put(row)
    ink.close()
    made.close()
    with Ledger(tmp_path / "run") as ledger:
        assert not [one for check in MINE for one in check.check(ledger) if one.verdict == "fail"]


def two_steps(log_probs: list[float], *, sequence: tuple[int, int] = (1, 2), moved: float = 0.1) -> Iterator[Row]:
    """A sample in two steps whose log-probs are alike bit for bit; `sequence`: the checksum of its tokens in each."""
    common = {"stage": "rollout", "access": "write", "local_shape": [1, 2]}
    for step in (0, 1):
        yield TensorRow(tensor_name="rollout_log_prob", step=step, checksum=7, **common)  # type: ignore[arg-type]
        yield TensorRow(tensor_name="full_sequence", step=step, checksum=sequence[step], **common)  # type: ignore[arg-type]
        yield MetricRow(name="update_ratio", raw_name="update_ratio", value=moved, step=step)
        for at, log_prob in enumerate(log_probs):
            yield TokenRow(
                sample_id=f"{step}", position=at, step=step, token_id=5, response_mask=1, rollout_log_prob=log_prob
            )


@pytest.mark.parametrize(("story", "rows", "verdict"), [
    ("stale", two_steps([-0.5, -0.25]), "fail"),
    ("stale for the same samples", two_steps([-0.5, -0.25], sequence=(1, 1)), "fail"),
    ("certain of every token", two_steps([0.0, 0.0]), "pass"),
    ("the same samples of the same weights", two_steps([-0.5, -0.25], sequence=(1, 1), moved=0.0), "pass"),
    ("other samples of the same weights", two_steps([-0.5, -0.25], moved=0.0), "fail"),
])  # fmt: skip
def test_a_policy_that_has_collapsed_makes_the_same_by_right(
    tmp_path: Path, story: str, rows: Iterator[Row], verdict: str
) -> None:
    assert told(contents, tmp_path / "run", rows)["content_repeated"].verdict == verdict


@pytest.mark.parametrize(("recorded", "made", "rate", "says"), [
    ((), (), 1e-3, "rows of `tokens`: record.level = tokens"),
    ((0,), (0,), 1e-3, "ratios after an optimizer step: several mini-batches or epochs a step"),
    ((0,), (0, 1), 1e-3, "ratios of a later mini-batch, whose samples were not recorded: record.groups as many as a step has"),
    ((0, 1), (0, 1), 0.0, "a step whose update moves the weights"),
    ((0, 1), (0, 1), 1e-3, None),
])  # fmt: skip
def test_what_a_ratio_that_is_always_1_could_not_be_seen_for_is_told(
    tmp_path: Path, recorded: tuple[int, ...], made: tuple[int, ...], rate: float, says: str | None
) -> None:
    """Four tokens in each mini-batch whose tokens were recorded; an update of so many mini-batches, at some learning rate."""
    place = {"step": 0, "stage": "update_actor", "epoch": 0}
    rows: list[Row] = [
        TokenRow(sample_id=str(mini), position=at, phase="loss", mini_batch=mini, micro_batch=0, ratio=1.0, loss_mask=1, **place)
        for mini in recorded for at in range(4)
    ]  # fmt: skip
    rows += [
        SpanRow(id=mini, event="whole", name="mini_batch", span_kind="compute", start_ns=mini, end_ns=mini + 1, mini_batch=mini, **place)
        for mini in made
    ]  # fmt: skip
    rows += [
        MetricRow(name=name, raw_name=name, value=value, step=0) for name, value in (("grad_norm", 1.0), ("lr", rate))
    ]
    found = told(policies, tmp_path / "run", rows)["ratio_is_always_1"]
    assert found.needs == ([says] if says else None)
    assert found.verdict == ("skipped" if says else "fail")  # where nothing is lacking all of them are exactly 1
