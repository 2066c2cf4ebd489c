"""Console logs of every framework give the numbers that they print, under both names and at their steps."""

import ast
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.cli.imports import import_, imported
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow
from flowledger.record.importers import console, logs
from flowledger.record.importers.formats import FORMATS
from flowledger.record.importers.imported import Summary
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.place import Place
from flowledger.record.importers.source import Source
from flowledger.record.importers.speakers import split

LOGS = Path(__file__).parents[1] / "data" / "logs"
GIB = 1 << 30


def read(name: str) -> tuple[list, Notes]:
    notes = Notes()
    return list(logs.read(Source(LOGS / name), notes)), notes


def numbers(rows: list) -> dict[tuple[int, str], float]:
    return {(row.step, row.name): row.value for row in rows if isinstance(row, MetricRow)}


def written(folder: Path, text: str) -> Source:
    path = folder / "console.log"
    path.write_text(text, encoding="utf-8")
    return Source(path)


def test_verl_step_lines_keep_their_names_and_gain_canonical_ones():
    rows, notes = read("verl_console.log")
    got = numbers(rows)
    assert got[1, "entropy"] == 6.0186 and got[1, "grad_norm"] == 0.512 and got[1, "lr"] == 1e-6
    assert got[1, "val-core/openai/gsm8k/reward/mean@8"] == 0.25
    assert math.isnan(got[1, "val-aux/a=b:c/acc/best@8/std"]) and got[1, "training/filter"] == 1.0
    assert got[2, "actor/pg_loss"] == math.inf and got[3, "step_time_s"] == 12.0
    assert {row.raw_name for row in rows if isinstance(row, MetricRow) and row.name == "reward/mean"} == {
        "critic/score/mean"
    }
    assert notes.skipped == {"a value of a step line that is no number": 1}
    assert "oops" in notes.examples[0] and "verl_console.log:16" in notes.examples[0]


def test_readings_of_memory_belong_to_the_step_that_goes_on():
    rows, _ = read("verl_console.log")
    got = [
        (row.step, row.stage, row.instant, row.allocated, row.device_used) for row in rows if isinstance(row, MemoryRow)
    ]
    assert got == [
        (None, None, "After FSDP", GIB // 2, 8 * GIB),
        (1, "update_actor", "Before update_actor", 17 * GIB // 4, 10 * GIB),  # stood before the line of step 1
        (3, "weight_sync", "After resume kv_cache", 2 * GIB, 20 * GIB),  # behind the line of step 2
    ]


def test_an_exception_after_the_training_ended_is_no_crash():
    rows, _ = read("verl_console.log")
    found = [row for row in rows if isinstance(row, FindingRow)]
    assert [(row.id, row.verdict) for row in found] == [("exception", "pass")]
    assert found[0].message.startswith("RuntimeError: DataLoader worker (pid 14802)")


def test_the_printed_configuration_is_kept_and_fixes_sizes(tmp_path):
    imported([LOGS / "verl_console.log"], tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["raw"]["actor_rollout_ref"]["rollout"]["prompt"] == "a {b"
    assert manifest["bindings"] == {"B_prompt": 64, "G": 8, "S_prompt": 512, "S_resp": 1024}
    assert (manifest["framework"], manifest["state"]) == ("verl", "closed")


@pytest.mark.parametrize(
    ("name", "framework", "expected"),
    [
        ("openrlhf.log", "openrlhf", {(3, "reward/mean"): 0.375, (3, "grad_norm"): 1.5, (1, "stage_time_s/rollout"): 33.25, (2, "timing/ppo_train"): 20.5}),
        ("slime.log", "slime", {(0, "reward/mean"): 0.5, (1, "step_time_s"): 41.0, (2, "stage_time_s/old_log_prob"): 3.25, (2, "response_length/mean"): 513.0}),
        ("areal.log", "areal", {(1, "reward/mean"): 0.25, (2, "grad_norm"): 0.62, (2, "stage_time_s/rollout"): 31.5, (1, "ppo_actor/n_seqs"): 512.0}),
        ("nemo_rl.log", "nemo_rl", {(1, "reward/mean"): 0.26, (4, "reward/mean"): 0.52, (3, "stage_time_s/update_actor"): 39.34, (2, "Loss"): -0.0246}),
        ("trl_console.log", "trl", {(2, "loss"): -0.02778, (4, "loss"): -0.09618, (4, "train_loss"): -0.09903}),
    ],
)  # fmt: skip
def test_other_frameworks(name, framework, expected):
    rows, notes = read(name)
    got = numbers(rows)
    assert {key: got.get(key) for key in expected} == expected
    assert notes.framework == framework and not notes.skipped


def test_the_console_of_trl_says_what_its_state_says():
    state = json.loads((LOGS / "trainer_state.json").read_text())["log_history"]
    rows, _ = read("trl_console.log")
    printed = {(row.step, row.raw_name): row.value for row in rows if isinstance(row, MetricRow)}
    for entry in state[:4]:
        told = {key: value for key, value in entry.items() if key != "step"}
        assert {key: printed[entry["step"], key] for key in told} == pytest.approx(told, rel=1e-3)


def test_slime_says_whose_memory_it_is():
    rows, _ = read("slime.log")
    memory = [row for row in rows if isinstance(row, MemoryRow)]
    assert {(row.rank, row.allocated, row.host_used) for row in memory} == {(0, round(40.25 * GIB), 200 * GIB)}
    assert [row.step for row in memory] == [None, 1, 2]


def test_trl_steps_come_from_the_progress_bar_even_where_it_skips_some(tmp_path):
    text = "  0%|          | 0/500 [00:00<?, ?it/s]\r  2%|▏         | 10/500 [00:10<08:10,  1.00s/it]\r{'loss': '0.5', 'epoch': '0.1'}\n"
    text += "\r  2%|▏         | 10/500 [00:10<08:10,  1.00s/it]\r  4%|▏         | 20/500 [00:20<08:10,  1.00s/it]{'loss': '0.25', 'epoch': '0.2'}\n"
    text += "\r  4%|▏         | 20/500 [00:20<08:10,  1.00s/it]\r 10%|█         | 10/100 [00:01<00:09, 10.00it/s]\r{'eval_loss': 0.75, 'epoch': 0.2}\n"
    rows = list(logs.read(written(tmp_path, text), Notes()))
    assert [(row.step, row.raw_name, row.value) for row in rows if row.raw_name != "epoch"] == [
        (10, "loss", 0.5), (20, "loss", 0.25), (20, "eval_loss", 0.75)
    ]  # fmt: skip


def test_trl_without_a_progress_bar_is_numbered_and_says_so(tmp_path):
    notes = Notes()
    rows = list(logs.read(written(tmp_path, "{'loss': 0.5, 'epoch': 0.1}\n{'loss': nan, 'epoch': 0.2}\n"), notes))
    assert [row.step for row in rows if row.raw_name == "loss"] == [1, 2]
    assert any("numbered" in remark for remark in notes.remarks)


KEYS = st.text("abcdefgXYZ019_/@=.:- ", min_size=1, max_size=20).filter(
    lambda key: " - " not in f" {key} " and key == key.strip() and not key.endswith(":") and ":tensor(" not in key
)
VALUES = st.one_of(st.floats(), st.integers(-(10**18), 10**18))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**9),
    st.dictionaries(KEYS, VALUES, max_size=12),
    st.sampled_from(["{}", "np.float64({})", "tensor({})", "tensor({}, device='cuda:0')"]),
)
def test_a_console_line_of_a_dict_reads_back_the_same_numbers(step, data, printed):
    line = " - ".join([f"step:{step}", *(f"{key}:{printed.format(repr(value))}" for key, value in data.items())])
    rows = list(console.verl(Place("x", Notes()), f"(TaskRunner pid=7) {line}"))
    if not data:
        return
    assert {row.raw_name: row.value for row in rows} == pytest.approx(
        {key: float(value) for key, value in data.items()}, nan_ok=True, rel=0
    )
    assert {row.step for row in rows} == {step}


@pytest.mark.parametrize(
    ("line", "who", "said"),
    [
        ("\x1b[36m(WorkerDict pid=12, ip=192.0.2.1)\x1b[0m   File", ("WorkerDict", 12, "192.0.2.1", None), "  File"),
        ("(pid=12) x", ("", 12, "", None), "x"),
        ("[rank3]:[E1129 16:15:21.859 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog", ("", 0, "", 3), "Watchdog"),
        (
            "(EngineCore_DP0 pid=99) ERROR 09-01 12:00:00 [core.py:700]   raise",
            ("EngineCore_DP0", 99, "", None),
            "  raise",
        ),
        ("2026-08-21T10:11:12.123456789Z stdout F hello", ("", 0, "", None), "hello"),
        ("    indented code", ("", 0, "", None), "    indented code"),
    ],
)
def test_prefixes_are_taken_off_and_indentation_stays(line, who, said):
    speaker, text = split(line)
    assert (tuple(speaker), text) == (who, said)


def test_the_canonical_steps_are_looked_at_like_any_others(tmp_path):
    summary: Summary = imported([LOGS / "nemo_rl.log"], tmp_path / "run")
    assert (summary.first_step, summary.last_step, summary.steps) == (1, 4, 4)
    with Ledger(tmp_path / "run") as ledger:
        got = ledger.rows("SELECT step, value FROM metrics WHERE name = 'reward/mean' ORDER BY step")
        sources = ledger.rows("SELECT DISTINCT source FROM metrics")
    assert [row["value"] for row in got] == [0.26, 0.27, 0.51, 0.52]
    assert sources == [{"source": "import"}]


def test_a_megatron_list_and_a_namespace_are_configurations(tmp_path):
    listed = "------------------------ arguments ------------------------\n  lr .............................. 1e-06\n  rollout_num_gpus ................ 8\n  n_samples_per_prompt ............ 4\n-------------------- end of arguments ---------------------\n"
    notes = Notes()
    list(logs.read(written(tmp_path, listed), notes))
    assert (
        notes.config == {"lr": 1e-06, "rollout_num_gpus": 8, "n_samples_per_prompt": 4} and notes.framework == "slime"
    )
    notes = Notes()
    list(
        logs.read(
            written(tmp_path, "args: Namespace(rollout_num_gpus=8, dtype=torch.bfloat16, paths=['a', 'b'])\n"), notes
        )
    )
    assert notes.config == {"rollout_num_gpus": 8, "dtype": "torch.bfloat16", "paths": ["a", "b"]}


def test_the_launch_that_a_shell_echoes_is_kept(tmp_path):
    notes = Notes()
    list(logs.read(written(tmp_path, "+ set -x\n+ python3 -m verl.trainer.main_ppo data.train_batch_size=64\n"), notes))
    assert notes.command == "python3 -m verl.trainer.main_ppo data.train_batch_size=64"


def test_a_printed_dict_is_read_as_a_literal_and_never_run(tmp_path):
    text = "{'actor_rollout_ref': __import__('os').getcwd(),\n 'a': 1, 'b': 2, 'c': 3, 'd': 4}\n"
    notes = Notes()
    list(logs.read(written(tmp_path, text), notes))
    assert notes.config == {}
    with pytest.raises(ValueError, match="malformed"):
        ast.literal_eval(text.replace("\n", ""))


@pytest.mark.parametrize("page", ["importing.md", "importing.zh-CN.md"])
def test_the_pages_show_what_an_import_says(tmp_path, monkeypatch, capsys, page):
    root = Path(__file__).parents[2]
    text = (root / "docs" / page).read_text(encoding="utf-8")
    shown = re.search(r"<!-- imported -->\n```text\n\$ flowledger import (\S+) -o (\S+)\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / shown[1]).parent.mkdir(parents=True)
    (tmp_path / shown[1]).symlink_to(root / shown[1])
    import_([Path(shown[1])], Path(shown[2]))
    assert capsys.readouterr().out == shown[3]
    assert {form.name for form in FORMATS} <= set(re.findall(r"`(\w+)`", text))
