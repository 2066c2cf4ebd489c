"""TRL's own trainers, recorded: nothing of them changes, and the ledger has every tensor, stage and sample of their two steps."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import launch
import metrics
import pytest

from flowledger.ledger.reader import Ledger

RECORD = (sys.executable, "-m", "flowledger", "record")
B, G, MICRO, S_RESP = 16, 4, 8, launch.RESPONSE_TOKENS  # samples of a process, of a prompt, of a micro-batch
TENSORS = {
    ("prompt", "prompt_ids"), ("prompt", "attention_mask"), ("rollout", "response_ids"), ("rollout", "response_mask"),
    ("reward", "reward_components"), ("ref_log_prob", "full_sequence"), ("ref_log_prob", "ref_log_prob"),
    ("advantage", "advantage"), ("update_actor", "full_sequence"), ("update_actor", "advantage"),
    ("update_actor", "prompt_ids"), ("update_actor", "response_ids"), ("update_actor", "response_mask"),
    ("update_actor", "new_log_prob"), ("update_actor", "entropy"), ("update_actor", "policy_loss"),
    ("update_actor", "grad_norm"),
}  # fmt: skip
LAWS = ["shapes_conserved", "tokens_conserved", "masks_nest", "lifetimes_close", "memory_adds_up"]
CANONICAL = {
    "reward/mean", "reward/ascii_share/mean", "response_length/mean", "truncation_ratio", "entropy", "grad_norm", "lr",
    "step_time_s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a trainer has of its own."""

    stages: tuple[str, ...] = ("rollout", "ref_log_prob", "reward", "update_actor")
    tensors: frozenset[tuple[str, str]] = frozenset({("update_actor", "ref_log_prob")})
    metrics: frozenset[str] = frozenset({"ref_kl", "clip_ratio"})
    levels: tuple[str, ...] = ("tokens",)


KINDS = {
    "grpo": Kind(levels=("tensors", "tokens")),
    "rloo": Kind(
        stages=("rollout", "old_log_prob", "ref_log_prob", "reward", "update_actor"),
        tensors=frozenset({("old_log_prob", "old_log_prob"), ("update_actor", "old_log_prob")}), metrics=frozenset(),
    ),
    "peft": Kind(),  # its reference is the policy without the adapter, and no old policy
    "fsdp": Kind(),
}  # fmt: skip


@pytest.mark.timeout(3 * launch.TIMEOUT_S)
@pytest.mark.parametrize(("kind", "processes"), [("grpo", 1), ("grpo", 2), ("rloo", 1), ("peft", 1), ("fsdp", 2)])
def test_recording_changes_nothing_and_the_ledger_has_all_of_it(
    folder: Path, tmp_path: Path, kind: str, processes: int
) -> None:
    job = launch.trl(folder, processes=processes, kind=kind)
    plain = metrics.timeless(launch.run(job, tmp_path / "plain.txt"))
    for level in KINDS[kind].levels:
        run = tmp_path / level
        printed = launch.run(
            job, tmp_path / f"{level}.txt", prefix=(*RECORD, "-o", str(run), "--level", level, "--ops-every", "1", "--")
        )
        assert metrics.timeless(printed) == plain and len(plain) == launch.STEPS
        with Ledger(run) as ledger:
            for rank in range(processes):
                for step in range(launch.STEPS):
                    _is_whole(ledger, KINDS[kind], rank, step)
            _follows_its_samples(ledger, processes)
            _agrees_with_what_was_printed(ledger, KINDS[kind], plain)
            if processes > 1:
                assert ledger.query("SELECT count(*) > 0 FROM spans WHERE span_kind = 'comm'")[1] == [(True,)]
    assert _passport(tmp_path / "tokens", sample="5").startswith("sample 5  group 1  step 0")
    with Ledger(tmp_path / "tokens") as ledger:
        _scores_each_sample_alike(ledger)
        held = ledger.query("SELECT id FROM findings WHERE verdict = 'pass'")[1]
        assert {(law,) for law in LAWS} <= set(held)


def _is_whole(ledger: Ledger, kind: Kind, rank: int, step: int) -> None:
    """Every stage, tensor and micro-batch of one step on one rank."""

    def rows(query: str) -> list[tuple[object, ...]]:
        return ledger.query(query)[1]

    here = f"rank = {rank} AND step = {step}"
    assert rows("SELECT message FROM findings WHERE verdict IN ('fail', 'warn')") == []
    assert set(rows(f"SELECT DISTINCT stage, tensor_name FROM tensors WHERE {here}")) >= TENSORS | kind.tensors
    stages = rows(
        f"SELECT stage FROM spans WHERE event = 'end' AND stage IS NOT NULL AND span_kind = 'stage' AND {here} ORDER BY seq"
    )
    assert stages == [(stage,) for stage in kind.stages]
    phases = rows(
        f"SELECT micro_batch, phase FROM spans WHERE phase IS NOT NULL AND event <> 'begin' AND {here} ORDER BY seq"
    )
    phases = [row for row in phases if row[1] in ("forward", "backward", "step")]
    assert list(dict.fromkeys(phases)) == [
        (0, "forward"), (0, "backward"), (1, "forward"), (1, "backward"), (None, "step")
    ]  # fmt: skip
    shapes = rows(
        f"SELECT DISTINCT tensor_name, dims, local_shape[1] FROM tensors WHERE stage = 'rollout' AND micro_batch IS NULL"
        f" AND dims IS NOT NULL AND kind = 'batch' AND {here} ORDER BY ALL"
    )
    assert shapes == [("response_ids", "B_prompt*G, S_resp", B), ("response_mask", "B_prompt*G, S_resp", B)]
    prompts = rows(
        f"SELECT DISTINCT tensor_name, dims, local_shape[1] FROM tensors WHERE stage = 'prompt' AND {here} ORDER BY ALL"
    )
    assert prompts == [("attention_mask", "B_prompt*G, S_prompt", B), ("prompt_ids", "B_prompt*G, S_prompt", B)]
    new = rows(f"SELECT DISTINCT dims, local_shape[1] FROM tensors WHERE tensor_name = 'new_log_prob' AND {here}")
    assert new == [("B_micro, S_resp", MICRO)]


def _follows_its_samples(ledger: Ledger, processes: int) -> None:
    """Every sample of every step: its group, and the one micro-batch that it went through, on the rank that made it."""
    total = B * processes
    found = ledger.query(
        "SELECT sample_id::INT, group_id::INT, step, versions, len(trained), trained[1].rank, trained[1].micro_batch,"
        " prompt_length > 0 AND response_length BETWEEN 1 AND 24 AND reward IS NOT NULL AND advantage IS NOT NULL"
        " FROM samples_merged ORDER BY 1"
    )[1]
    assert [row[:6] for row in found] == [
        (n, n // G, n // total, [n // total], 1, n % total // B) for n in range(launch.STEPS * total)
    ]
    assert all(row[7] for row in found)
    sizes = ledger.query("SELECT count(*) FROM samples_merged GROUP BY step, trained[1].rank, trained[1].micro_batch")[
        1
    ]
    assert sizes == [(MICRO,)] * (launch.STEPS * processes * B // MICRO)
    bound = ledger.directory.manifest.bindings
    assert (bound["B"], bound["G"], bound["B_prompt"], bound["L"]) == (total, G, total // G, 2)


def _agrees_with_what_was_printed(ledger: Ledger, kind: Kind, plain: Sequence[dict[str, float]]) -> None:
    """TRL's metrics under canonical names, and the same worked out from the samples."""
    for step, printed in enumerate(plain):
        told = dict(ledger.query(f"SELECT name, value FROM metrics WHERE step = {step} AND rank = 0")[1])
        assert told.keys() >= CANONICAL | kind.metrics
        assert told["loss"] == pytest.approx(printed["loss"], rel=1e-3, abs=1e-9)
        assert told["lr"] == printed["learning_rate"]
        counted = ledger.query(
            "SELECT avg(reward), avg(rewards.ascii_share), avg(response_length), max(response_length),"
            f" avg((finish_reason = 'length')::INT) FROM samples_merged WHERE step = {step}"
        )[1]
        names = (
            "reward/mean", "reward/ascii_share/mean", "response_length/mean", "response_length/max", "truncation_ratio",
        )  # fmt: skip
        assert counted[0] == pytest.approx(tuple(told[name] for name in names), rel=1e-5)


def _scores_each_sample_alike(ledger: Ledger) -> None:
    """Before the first update policy and reference are one: what was scored before the shuffle is what comes after it."""
    found = ledger.query(
        "SELECT count(*) > 20, max(abs(new_log_prob - ref_log_prob)) < 1e-4, stddev(new_log_prob) > 0.05,"
        " coalesce(max(abs(new_log_prob - old_log_prob)), 0) < 1e-4 FROM tokens_merged"
        " WHERE step = 0 AND response_mask = 1"
    )[1]
    assert found == [(True, True, True, True)]
    later = ledger.query("SELECT max(abs(new_log_prob - ref_log_prob)) > 1e-4 FROM tokens_merged WHERE step = 1")[1]
    assert later == [(True,)]


def _passport(run: Path, *, sample: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flowledger", "sample", str(run), sample], capture_output=True, text=True, check=True
    )
    return done.stdout
