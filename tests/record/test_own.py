"""A loop of one's own tells the recorder where it stands; the ledger says the same, and a wrong word is a finding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowledger
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger

BINDINGS = {"B_prompt": 2, "G": 2, "B": 4}


def sampled(first: int) -> dict[str, torch.Tensor]:
    """What a rollout of four samples makes: 4 prompt tokens, 5 of response."""
    return {
        "sample_id": torch.arange(first, first + 4), "group_id": torch.tensor([0, 0, 1, 1]),
        "full_sequence": torch.ones(4, 9, dtype=torch.int64), "attention_mask": torch.ones(4, 9, dtype=torch.int64),
        "response_mask": torch.ones(4, 5, dtype=torch.int64),
    }  # fmt: skip


def train(path: Path, **settings: object) -> None:
    with flowledger.recorder(path, bindings=BINDINGS, **settings) as rec:
        for step in range(2):
            with rec.stage("rollout", policy_version=step):
                rec.tensors(**sampled(4 * step))
            with rec.stage("update_actor"):
                for half in (slice(0, 2), slice(2, 4)):
                    with rec.within("micro_batch"):
                        rec.tensors("read", **{name: value[half] for name, value in sampled(4 * step).items()})
                rec.metrics(policy_loss=0.5 + step)


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with Ledger(path) as ledger:
        return ledger.query(query)[1]


def test_three_lines_are_a_ledger(tmp_path):
    train(tmp_path / "run")
    spans = rows(
        tmp_path / "run",
        "SELECT step, name, micro_batch FROM spans WHERE event <> 'begin' ORDER BY step, end_ns, id DESC",
    )
    assert spans == [
        (step, *span)
        for step in (0, 1)
        for span in (
            ("rollout", None), ("micro_batch", 0), ("micro_batch", 1), ("update_actor", None), ("step", None)
        )
    ]  # fmt: skip
    shapes = rows(
        tmp_path / "run",
        "SELECT stage, micro_batch, dims, local_shape FROM tensors WHERE tensor_name = 'response_mask' AND step = 1"
        " ORDER BY seq",
    )
    assert shapes == [
        ("rollout", None, "B_prompt*G, S_resp", [4, 5]),
        ("update_actor", 0, "B_micro, S_resp", [2, 5]),
        ("update_actor", 1, "B_micro, S_resp", [2, 5]),
    ]
    assert rows(tmp_path / "run", "SELECT step, value FROM metrics WHERE name = 'policy_loss' ORDER BY step") == [
        (0, 0.5), (1, 1.5)
    ]  # fmt: skip
    trained = rows(tmp_path / "run", "SELECT sample_id, trained[1].micro_batch FROM samples WHERE len(trained) > 0")
    assert sorted(trained) == [(str(i), i % 4 // 2) for i in range(8)]


def test_a_stage_that_does_not_follow_begins_the_next_step_and_one_can_say_so_oneself(tmp_path):
    with flowledger.recorder(tmp_path / "run") as rec:
        with rec.stage("reward"):
            pass
        with rec.stage("advantage"):
            pass
        with rec.stage("reward"):
            pass
        with rec.step(7), rec.stage("advantage"):
            pass
        with rec.step():
            for name in ("reward", "rollout"):  # within a step any order will do
                with rec.stage(name):
                    pass
    found = rows(
        tmp_path / "run", "SELECT step, stage FROM spans WHERE event = 'end' AND stage IS NOT NULL ORDER BY seq"
    )
    assert found == [(0, "reward"), (0, "advantage"), (1, "reward"), (7, "advantage"), (8, "reward"), (8, "rollout")]


def test_a_wrong_word_is_a_finding_and_the_loop_goes_on(tmp_path):
    with flowledger.recorder(tmp_path / "run") as rec:
        with rec.stage("rolout"):
            rec.tensors(old_log_porb=torch.ones(2), old_logprob=torch.ones(2))  # the last is what others call it
            rec.tensors(torch.ones(2))
        with rec.stage("rollout"), rec.within("microbatch"):
            rec.tensors("written", full_sequence=torch.ones(2, 3))
    said = rows(tmp_path / "run", "SELECT message FROM findings ORDER BY seq")
    assert said == [
        ("no stage is called 'rolout', and it is not recorded; did you mean rollout?",),
        ("no tensor is called 'old_log_porb', and it is not recorded; did you mean old_log_prob?",),
        ("no access is called 'a Tensor', and it is not recorded",),
        ("no part of a stage is called 'microbatch', and it is not recorded; did you mean micro_batch?",),
        ("no access is called 'written', and it is not recorded; did you mean write?",),
    ]
    assert rows(tmp_path / "run", "SELECT tensor_name FROM tensors") == [("old_log_prob",)]


def test_an_exception_passes_and_the_run_says_where(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        flowledger.recorder(tmp_path / "run") as rec,
        rec.stage("reward"),
    ):
        rec.metrics(reward=1 / 0)
    assert rows(tmp_path / "run", "SELECT stage, message FROM findings") == [
        ("reward", "reward raised ZeroDivisionError: division by zero")
    ]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["state"] == "crashed"


def test_a_place_that_is_taken_is_one_line_and_the_loop_goes_on(tmp_path, capsys):
    train(tmp_path / "run")
    capsys.readouterr()
    train(tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flowledger: run ") and line.endswith("nothing is recorded")
    assert rows(tmp_path / "run", "SELECT count(DISTINCT process) FROM spans") == [(1,)]


@pytest.mark.parametrize(
    ("settings", "said"), [({"level": "all"}, "steps, tensors, tokens"), ({"groups": -1}, "0 or more")]
)
def test_a_wrong_setting_is_refused(tmp_path, settings, said):
    with pytest.raises(BadInput, match=said), flowledger.recorder(tmp_path / "run", **settings):
        pass
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys, flowledger; print(sorted(m for m in sys.modules if m.startswith(('flowledger.', 'msgspec', 'torch'))))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
    with pytest.raises(AttributeError, match="recordr"):
        flowledger.recordr  # noqa: B018


@pytest.mark.parametrize(
    ("stages", "steps"),
    [
        ("rollout reward ref_log_prob old_log_prob advantage update_actor", [0] * 6),
        ("rollout reward advantage old_log_prob update_actor rollout update_actor", [0] * 5 + [1] * 2),
        ("prompt rollout update_actor weight_sync prompt rollout", [0] * 4 + [1] * 2),
        ("update_actor update_actor", [0, 1]),
    ],
)
def test_a_step_begins_with_what_the_one_before_has_had(tmp_path, stages, steps):
    with flowledger.recorder(tmp_path / "run") as rec:
        for name in stages.split():
            with rec.stage(name):
                pass
    found = rows(tmp_path / "run", "SELECT step FROM spans WHERE event = 'end' AND stage IS NOT NULL ORDER BY seq")
    assert [step for (step,) in found] == steps


@pytest.mark.parametrize("bindings", [{"G": "4"}, {"G": 0}, {1: 4}, {"G": 1.5}])
def test_a_size_that_is_none_is_refused_at_once(tmp_path, bindings):
    with (
        pytest.raises(BadInput, match="must be a symbol and a whole number"),
        flowledger.recorder(tmp_path / "run", bindings=bindings),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_tensor_of_another_kind_does_not_hide_the_others_of_its_call(tmp_path):
    odd = torch.ones(2, 3).to_sparse()
    with flowledger.recorder(tmp_path / "run") as rec, rec.stage("rollout"):
        rec.tensors(rollout_log_prob=odd, response_ids=torch.ones(2, 3, dtype=torch.int64))
    assert rows(tmp_path / "run", "SELECT tensor_name FROM tensors") == [("response_ids",)]
    assert rows(tmp_path / "run", "SELECT id FROM findings") == [("recorder_error",)]


def test_a_kind_of_memory_that_was_never_met_is_unknown_not_nothing(tmp_path):
    train(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT DISTINCT kind FROM memory") == [("total",)]
