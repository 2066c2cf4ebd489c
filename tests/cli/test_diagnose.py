"""The verb `diagnose`, as a user types it: runs, logs, configurations, reports, and whatever else is fed in."""

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowledger.cli import source_kinds
from flowledger.diagnose import alarms
from flowledger.diagnose import findings as detecting
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import open_run
from flowledger.ledger.rows import FindingRow, TokenRow
from flowledger.ledger.writer import Writer
from tests.cli.conftest import Call
from tests.diagnose import sick
from tests.diagnose.alarm_stories import metric, written

ROOT = Path(__file__).parents[2]
OOM = (
    "Traceback (most recent call last):\n"
    '  File "/app/verl/workers/actor/dp_actor.py", line 210, in update_policy\n'
    "    entropy, log_prob = self._forward_micro_batch(data)\n"
    '  File "/app/verl/utils/torch_functional.py", line 140, in entropy_from_logits\n'
    "    pd = torch.nn.functional.softmax(logits, dim=-1)\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.43 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "2.21 GiB is free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated.\n"
)


def prompt_in_the_loss() -> TokenRow:
    return TokenRow(sample_id="0", position=0, step=0, attention_mask=1, response_mask=0, loss_mask=1)


@pytest.fixture(autouse=True)
def fewer_detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need no metrics: the others take most of the time, and are tested where they are."""
    few = {detector.__name__.rpartition(".")[2]: detector.check for detector in sick.DETECTORS}
    monkeypatch.setattr(detecting, "detectors", lambda: few)


@pytest.fixture
def sickly(tmp_path: Path) -> Path:
    return sick.run(tmp_path / "sickly", [[prompt_in_the_loss()]], level="tokens")


def document(call: Call, *words: object) -> dict[str, Any]:
    code, out, err = call("diagnose", *words, "--json")
    assert code in (0, 1), err
    found = json.loads(out)
    assert (found["schema"], found["verb"]) == (1, "diagnose")
    return found


def test_a_run_is_told_with_step_evidence_cause_and_next(call: Call, sickly: Path) -> None:
    code, out, err = call("diagnose", sickly)
    out = " ".join(out.split())  # however wide the terminal is
    assert (code, err) == (0, "")
    assert (
        "First question that fails" in out
        and "Shape mismatch, question 3 of 4: Then look at mask / broadcast / reshape." in out
    )
    assert "sample 0 position 0: attention 1, response 0, loss 1" in out
    assert "Likeliest cause" in out and "Next" in out
    assert "Not checked" in out and "record.level" in out


def test_the_same_in_chinese_with_the_words_of_the_mission(call: Call, sickly: Path) -> None:
    _, out, _ = call("diagnose", sickly, "--lang", "zh")
    assert "第一个不通过的问题" in out and "再看 mask / broadcast / reshape。" in out and "最可能的原因" in out
    assert "First question" not in out


def test_json_has_findings_in_order_and_the_summary(call: Call, sickly: Path) -> None:
    found = document(call, sickly, "--order", "shape_mismatch")
    assert [row["id"] for row in found["rows"]] == [
        f"shape_mismatch.{name}" for name in ("logical", "local", "mask", "operator")
    ]
    row = found["rows"][2]
    assert (row["verdict"], row["severity"], row["order"], row["position"]) == ("fail", "error", "shape_mismatch", 3)
    summary = found["summary"]
    assert (summary["first"], summary["verdict"], summary["fail"]) == ("shape_mismatch.mask", "fail", 1)
    assert {one["id"] for one in summary["not_checked"]} >= {"shape_mismatch.operator"}
    assert all(one["needs"] for one in summary["not_checked"])
    assert found["sources"][0]["source"] == str(sickly) and not found["unread"]


def test_only_asked_for_does_a_failure_fail(call: Call, sickly: Path) -> None:
    """Without being asked for it does not: above."""
    assert call("diagnose", sickly, "--order", "shape_mismatch", "--fail-on", "fail")[0] == 1
    assert call("diagnose", sickly, "--order", "imbalance", "--fail-on", "warn")[0] == 0


def test_a_traceback_with_its_configuration_names_tensor_and_value(call: Call, tmp_path: Path) -> None:
    """18432 tokens (the budget of the example) * 151936 * 4 bytes = 10.43 GiB."""
    crash = tmp_path / "crash.log"
    crash.write_text(OOM, encoding="utf-8")
    script = ROOT / "examples/verl_qwen3_8b_fsdp.sh"
    found = document(call, crash, script, "--gpu", "h100-80g")
    summary = found["summary"]
    assert summary["orders"][0] == "oom" and summary["first"] == "oom.peak_stage"
    assert "update_actor" in summary["shown"]
    assert "logits [T_logit, V] in float32" in summary["cause"] and "18,432 * 151,936 * 4 bytes" in summary["cause"]
    assert summary["change"]["key"].startswith("actor_rollout_ref.") and summary["change"]["to"]
    assert {re.split(" of |,", one["what"])[0] for one in found["sources"]} == {"a configuration", "read as a run"}


def test_a_crash_alone_is_caused_by_the_surest_of_what_such_crashes_are_known_for(call: Call) -> None:
    """10.43 GiB / (151,936 * 4 bytes) = 18,427 tokens: no other cause has a number of the crash that fits."""
    found = document(call, ROOT / "examples/crash.log")
    known = [row["confidence"] for row in found["rows"][found["parts"]["walked"] :]]
    assert len(known) > 1 and known == sorted(known, reverse=True)
    assert "logits" in found["summary"]["cause"] and "18,427 tokens" in found["summary"]["cause"]
    assert found["summary"]["confidence"] == 0.45  # beside what this run shows it stays a guess


@pytest.mark.parametrize(("lang", "stops", "named"), [
    ("en", "OOM memory stops at question 1 of 3", "OOM, question 1 of 3: Find the stage"),
    ("zh", "OOM 显存 停在第 1 问（共 3 问）", "OOM 第 1 问（共 3 问）：先找峰值阶段"),
])  # fmt: skip
def test_an_order_says_at_which_of_its_questions_it_stops(call: Call, lang: str, stops: str, named: str) -> None:
    """Of questions, for a run has steps of its own: the log of this one ends after its third."""
    out = " ".join(call("diagnose", ROOT / "examples/crash.log", "--lang", lang)[1].split())
    assert stops in out and named in out


def test_a_setting_beside_the_configuration_counts(call: Call) -> None:
    script = ROOT / "examples/verl_qwen3_8b_fsdp.sh"
    found = document(call, script, "trainer.n_gpus_per_node=7")
    assert found["summary"]["verdict"] == "fail" and found["summary"]["first"].startswith("shape_mismatch.")
    assert found["summary"]["change"]


HYDRA = (
    "Error executing job with overrides: ['data.train_batch_size=100', 'actor_rollout_ref.rollout.n=5', 'trainer.n_gpus_per_node=8', "
    "'actor_rollout_ref.actor.ppo_mini_batch_size=100', 'actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct', "
    "'actor_rollout_ref.rollout.tensor_model_parallel_size=2']\n"
)


def test_the_line_in_which_hydra_repeats_the_overrides_is_not_the_fault(call: Call, tmp_path: Path) -> None:
    """It stands above every exception of a job that Hydra has launched, and its settings are the job's."""
    said = "AssertionError: real_train_batch_size (500) must be divisible by minimal possible batch size (8)"
    log = write(tmp_path / "job.log", f"{HYDRA}Traceback (most recent call last):\n{said}\n".encode())
    summary = document(call, log)["summary"]
    assert summary["ended"] == said and "500 is not divisible by 8" in summary["cause"]
    assert summary["change"] == {"key": "the dividend", "from": "500", "to": "504"}
    assert "overrides" not in summary["cause"]


def test_a_pasted_line_that_is_too_long_to_be_a_file_is_words(call: Call) -> None:
    assert len(HYDRA.strip()) > 255  # what file systems take as a name
    assert document(call, HYDRA.strip())["sources"] == [{"source": f"{HYDRA[:57]}…", "what": "a report"}]
    code, _, err = call("diagnose", "x" * 400)
    assert code == 2 and "no such file" in err


def test_words_of_hydra_change_the_configuration(call: Call) -> None:
    """`~key` takes one away, which no path is taken for; what Hydra refuses is said in its place."""
    script = ROOT / "examples/verl_qwen3_8b_fsdp.sh"
    words = ("++actor_rollout_ref.actor.ppo_mini_batch_size=60", "~actor_rollout_ref.actor.optim.lr_warmup_steps")
    found = document(call, script, *words)
    assert not found["unread"] and "mini-batch) = 480" in found["summary"]["cause"]  # lcm(8, 60 * 8)
    code, _, err = call("diagnose", script, "~data.no_such_key")
    assert code == 2 and "no_such_key" in err and "home directory" not in err


def test_old_log_probs_that_are_the_new_ones_are_named_where_the_ratio_is_said_to_be_1(call: Call) -> None:
    said = "PPO in verl with ppo_epochs=4: the ratio is always exactly 1.0, nothing is ever clipped, old log-probs are recomputed after each update"
    found = document(call, said)
    first = found["rows"][0]
    assert (first["id"], first["verdict"], first["severity"]) == ("old_is_new", "fail", "error")
    assert "old log-probs are those of the current weights" in found["summary"]["cause"]
    assert first["next_step"] == "compute old log-probs before the first mini-batch, and detach them"
    moves = document(
        call,
        said.replace("always exactly 1.0, nothing is ever clipped", "0.8 to 1.2").replace(
            "old log-probs are recomputed after each update", "one node"
        ),
    )
    assert all(row["id"] != "old_is_new" for row in moves["rows"])


def test_standard_input_is_a_source(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(OOM.encode())))
    found = document(call, "-")
    assert found["sources"][0]["source"] == "-" and found["summary"]["first"] == "oom.peak_stage"


def test_a_run_that_is_well_has_no_failing_step(call: Call, tmp_path: Path) -> None:
    fine = [
        TokenRow(sample_id="0", position=at, step=0, attention_mask=1, response_mask=1, loss_mask=1) for at in range(3)
    ]
    path = sick.run(tmp_path / "well", [fine], level="tokens")
    code, out, _ = call("diagnose", path, "--fail-on", "warn", "--order", "shape_mismatch", "--all")
    assert code == 0 and "no question fails" in out and "First question" not in out


# ---------------------------------------------------------------------------------------------------- what is fed in


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


WRONG = {
    "nothing there": (lambda at: "no-such-run", "no such file"),
    "empty": (lambda at: write(at / "empty.log", b""), "empty"),
    "binary": (lambda at: write(at / "core.bin", bytes(range(256)) * 40), "core.bin"),
    "python": (lambda at: write(at / "train.py", b"\x00\x01print(1)"), "train.py"),
    "a directory of nothing": (lambda at: at, ""),
    "a manifest that is none": (lambda at: write(at / "manifest.json", b"{]").parent, "manifest"),
    "a newer run": (lambda at: write(at / "manifest.json", b'{"run": "x", "schema": 99}').parent, "schema 99"),
    "a script without a launch": (lambda at: write(at / "run.sh", b"echo hello\n"), "run.sh"),
    "a yaml of nothing": (lambda at: write(at / "x.yaml", b": : :\n- ["), "x.yaml"),
    "a gzip that is damaged": (lambda at: write(at / "log.gz", b"\x1f\x8b\x08\x00garbage"), "log.gz"),
    "a plan of another version": (lambda at: write(at / "plan.json", b'{"schema": 7, "verb": "plan"}'), "schema 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_what_cannot_be_read_is_a_line_and_exit_code_2(call: Call, tmp_path: Path, name: str) -> None:
    make, said = WRONG[name]
    code, out, err = call("diagnose", make(tmp_path))
    assert (code, out) == (2, ""), out
    assert said in err and "Traceback" not in err
    assert all(line.startswith("flowledger: ") for line in err.splitlines())


@pytest.mark.parametrize("words", [("--order", "shapes"), ("--fail-on", "error"), ("--lang", "de")])
def test_options_that_are_none_are_told_with_those_that_are(call: Call, sickly: Path, words: tuple[str, str]) -> None:
    code, out, err = call("diagnose", sickly, *words)
    assert (code, out) == (2, "") and words[1] in err
    assert any(word in err for word in ("shape_mismatch", "warn", "zh"))


def test_only_settings_are_nothing_to_look_at(call: Call) -> None:
    code, _, err = call("diagnose", "trainer.nnodes=2")
    assert code == 2 and "nothing to look at" in err


def test_one_source_that_cannot_be_read_hides_no_other(call: Call, sickly: Path, tmp_path: Path) -> None:
    found = document(call, sickly, "no-such.log", write(tmp_path / "empty.log", b""), "--order", "shape_mismatch")
    assert found["summary"]["first"] == "shape_mismatch.mask"
    assert {Path(one["source"]).name: one["why"] for one in found["unread"]} == {
        "no-such.log": "no such file or directory", "empty.log": "empty",
    }  # fmt: skip


def test_what_a_run_says_reaches_the_terminal_harmless(call: Call, tmp_path: Path) -> None:
    rows = [FindingRow(id="rank_died", verdict="fail", message="rank 1 died \x1b[2J[bold]in reward[/bold]")]
    _, out, _ = call("diagnose", sick.run(tmp_path / "run", [rows], state="crashed"))
    assert "\x1b[2J" not in out and "[bold]in reward[/bold]" in out


def test_what_says_nothing_of_how_it_ran_is_left_out_and_an_exception_after_the_end_is_told(
    call: Call, tmp_path: Path
) -> None:
    log = write(
        tmp_path / "job.log",
        b"step:1 - actor/pg_loss:0.5\nFinal validation metrics: {}\nTraceback (most recent call last):\n"
        b'  File "/v/torch/utils/data/_utils/signal_handling.py", line 73, in handler\n    _error_if_any_worker_fails()\n'
        b"RuntimeError: DataLoader worker (pid 14802) is killed by signal: Killed.\n",
    )
    script = write(tmp_path / "train_grpo.py", b"from trl import GRPOTrainer  # CUDA out of memory\n")
    page = write(tmp_path / "report.html", b"<html><style>td {color: red}</style>CUDA out of memory</html>")
    found = document(call, log, script, page)
    (read,) = found["sources"]
    assert read["source"] == str(log) and read["what"].startswith("read as a run of verl")
    assert "after the last step, an exception: RuntimeError: DataLoader worker" in read["what"]
    why = {one["source"]: one["why"] for one in found["unread"]}
    assert "a Python script, which is neither run nor read" in why[str(script)]
    assert "web page" in why[str(page)] and "run's directory" in why[str(page)]
    assert found["summary"]["first"] is None


def test_ranks_that_wait_in_different_collectives_are_told(call: Call, tmp_path: Path) -> None:
    said = [
        f"[rank{rank}]:[E1129 16:15:21.859 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=1, NumelOut=8, Timeout(ms)=600000) ran for 600042 milliseconds before "
        "timing out.\n"
        for rank, number, kind in ((2, 48211, "_ALLGATHER_BASE"), (5, 48213, "ALLREDUCE"))
    ]
    logs = [write(tmp_path / f"{at}.log", text.encode()) for at, text in enumerate(said)]
    summary = document(call, *logs)["summary"]
    assert summary["first"] == "hang.who_waits"
    assert "rank 2 is at 48211 ALLGATHER, rank 5 is at 48213 ALLREDUCE: rank 2 is 2 behind" in json.dumps(summary)


def test_a_framework_that_is_none_is_told_with_the_nearest(call: Call, tmp_path: Path) -> None:
    table = write(tmp_path / "metrics.csv", b"step,kl\n1,0.5\n")
    code, _, err = call("diagnose", table, "--framework", "verll")
    assert code == 2 and "--framework 'verll'" in err and "did you mean verl?" in err


def test_a_pipe_is_read_and_one_into_which_nobody_writes_is_not_waited_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(source_kinds, "PATIENCE_S", 0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    other = os.open(pipe, os.O_RDWR)  # somebody has it open
    with pytest.raises(BadInput, match="nobody has written"):
        source_kinds.drained(pipe, tmp_path / "none")
    os.close(other)
    reader, end = os.pipe()
    os.write(end, b"step:1 - a:1\n")
    os.close(end)
    assert source_kinds.drained(Path(f"/dev/fd/{reader}"), tmp_path / "log").read_bytes() == b"step:1 - a:1\n"
    os.close(reader)


def test_settings_that_no_configuration_takes_are_told(call: Call, tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text(OOM)
    found = document(call, tmp_path / "crash.log", "actor_rollout_ref.rollout.n=8", "--assume", "WORLD_SIZE=8")
    left = {one["source"]: one["why"] for one in found["unread"]}
    assert left.keys() == {"actor_rollout_ref.rollout.n=8", "--assume WORLD_SIZE=8"}
    assert all("no CONFIG among the sources" in why for why in left.values())


def test_a_model_beside_a_traceback_names_the_tensor_with_its_tokens(call: Call, tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text(OOM)
    found = document(call, tmp_path / "crash.log", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "h100")
    tokens = round(10.43 * 2**30 / (152_064 * 4))  # rows of its embedding in float32: what 10.43 GiB are
    assert f"{tokens:,} * 152,064 * 4 bytes" in found["summary"]["cause"] and not found["unread"]


@pytest.mark.parametrize(("words", "says"), [
    (("--model", "qwen2.5-7"), "did you mean Qwen2.5-7B?"), (("--gpu", "h10"), "did you mean"), (("--rules", "none.yaml"), "cannot read none.yaml"),
])  # fmt: skip
def test_a_model_device_or_rules_that_are_none_are_refused(
    call: Call, sickly: Path, words: tuple[str, str], says: str
) -> None:
    code, _, err = call("diagnose", sickly, *words)
    assert code == 2 and says in err


def test_alarms_of_ones_own_are_judged_and_take_the_place_of_ours(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detecting, "detectors", lambda: {"alarms": alarms.check})
    run = written(tmp_path / "run", [(0, metric(step, "grad_norm", 0.0)) for step in range(5)])
    with directory_writer(run) as ink:  # as the run's end has written it
        ink.put(FindingRow(id="dead_gradient", order="alarms", verdict="fail", severity="error", message="as of old"))
    row = {"goal": "stability", "severity": "error", "next_step": "look"}
    (tmp_path / "mine.yaml").write_text(json.dumps([
        {"id": "mine", "when": 'grad_norm < 1 and m["my/metirc"] < 1 or grad_norm == 0', "message": "it is {grad_norm}", "zh": "为 {grad_norm}", **row},
        {"id": "dead_gradient", "when": "grad_norm > 100", "message": "never", **row},
    ]))  # fmt: skip
    words = {one["id"]: one["message"] for one in document(call, run)["rows"]}
    assert "instability.optimizer" in words and "gradient norm is 0" in words["instability.optimizer"]
    found = document(call, run, "--rules", tmp_path / "mine.yaml")
    assert "it is 0" in [one["message"] for one in found["rows"]]
    assert not any("gradient norm is 0" in one["message"] or "as of old" in one["message"] for one in found["rows"])
    assert [one["why"] for one in found["unread"]] == ["alarm mine: this run has no metric 'my/metirc' so far"]
    assert "为 0" in [
        one["message"] for one in document(call, run, "--rules", tmp_path / "mine.yaml", "--lang", "zh")["rows"]
    ]


@contextmanager
def directory_writer(run: Path) -> Iterator[Writer]:
    ink = Writer(open_run(run).part("actor", 0))
    yield ink
    ink.close()


@pytest.mark.parametrize(("name", "text", "says"), [
    ("a.json", '{"a":' * 300 + '{"symptom of it": "loss is nan", "x": [1, 2', "breaks off at line 1, column"),
    ("b.txt", '[{"a":' * 30 + '{"why": "the loss is nan with grpo", "x": 1', "breaks off at line 1, column"),
    ("c.json", '{"a":' * 100_000, "nested too deep"),
])  # fmt: skip
def test_half_a_json_document_is_no_report(call: Call, tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    code, _, err = call("diagnose", tmp_path / name)
    assert code == 2 and says in err


def test_a_configuration_that_leaves_the_engine_open_is_read_all_the_same(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo data.train_batch_size=100 actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=100 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4\n"
    )
    found = document(call, script)
    assert "actor_rollout_ref.rollout.name=vllm" in found["sources"][0]["what"] and not found["unread"]
    assert found["summary"]["change"]["to"] == "96 or 104"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=nobody/knows-this-model\n")
    code, _, err = call("diagnose", script)
    assert (
        code == 2 and "knows-this-model" in err
    )  # what more than the engine is open or wrong stays a fault of the source
