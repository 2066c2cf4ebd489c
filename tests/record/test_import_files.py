"""Files that trainers and trackers write: the numbers and samples in them, steps after a resume, several files of one run."""

import csv
import gzip
import json
import math
from pathlib import Path

import pytest

from flowledger.cli.imports import document, import_, imported, lines
from flowledger.diagnose import laws
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SampleRow, TokenRow
from flowledger.record.importers import formats, samples, tables, trl
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.show.tables import table

LOGS = Path(__file__).parents[1] / "data" / "logs"


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def form(path: Path) -> str:
    return formats.format_of(Source(path)).name


def metrics(run: Path) -> dict[tuple[int, str], float | None]:
    rows = [json.loads(line) for file in run.glob("parts/*/metrics-*.jsonl") for line in file.read_text().splitlines()]
    assert len({(row["step"], row["raw_name"]) for row in rows}) == len(rows)
    return {(row["step"], row["raw_name"]): row.get("value", row.get("special")) for row in rows}


def test_verls_file_logger_with_a_resume_and_a_torn_end(tmp_path):
    steps = [{"step": step, "data": {"actor/pg_loss": step / 10, "critic/score/mean": None}} for step in range(1, 6)]
    again = [
        {"step": step, "data": {"actor/pg_loss": float(step), "critic/score/mean": float("nan")}} for step in (4, 5, 6)
    ]
    path = write(tmp_path / "metrics.jsonl", *steps, *again, '{"step": 7, "da')
    assert form(path) == "verl_file"
    summary = imported([path], tmp_path / "run")
    assert metrics(tmp_path / "run") == {
        **{(step, "actor/pg_loss"): step / 10 for step in (1, 2, 3)}, **{(step, "actor/pg_loss"): float(step) for step in (4, 5, 6)},
        **{(step, "critic/score/mean"): "nan" for step in range(1, 7)},
    }  # fmt: skip
    assert summary.resumed == [(5, 4)] and summary.rows == {"findings": 2, "metrics": 12}
    assert sum(summary.notes.skipped.values()) == 1
    with Ledger(tmp_path / "run") as ledger:
        found = {row["id"]: row for row in ledger.rows("FROM findings")}
    assert found["import_resumed"]["step"] == 4 and found["import_skipped"]["verdict"] == "skipped"


def test_a_console_beside_its_file_says_nothing_twice_and_adds_what_only_it_has(tmp_path):
    file = write(tmp_path / "metrics.jsonl", {"step": 1, "data": {"actor/pg_loss": 0.123456789}})
    log = write(tmp_path / "job.log", "step:1 - actor/pg_loss:0.1235 - actor/lr:1e-06")
    summary = imported([file, log], tmp_path / "run")
    assert metrics(tmp_path / "run") == {(1, "actor/pg_loss"): 0.123456789, (1, "actor/lr"): 1e-06}
    assert summary.repeated == 1


def test_the_same_step_printed_again_replaces_that_number_alone(tmp_path):
    log = write(tmp_path / "job.log", "step:1 - a:1 - b:1", "step:1 - a:2 - c:3", "step:2 - a:5")
    imported([log], tmp_path / "run")
    assert metrics(tmp_path / "run") == {(1, "a"): 2.0, (1, "b"): 1.0, (1, "c"): 3.0, (2, "a"): 5.0}


def test_trainer_states_of_two_checkpoints_are_one_history(tmp_path):
    first = {"log_history": [{"step": 1, "loss": 1.0, "epoch": 0.1}], "global_step": 1}
    second = {
        "log_history": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5, "text": "x"}, {"loss": 3}],
        "global_step": 2,
    }
    for number, state in ((1, first), (2, second)):
        write(tmp_path / "grpo" / f"checkpoint-{number}" / "trainer_state.json", state)
    summary = imported([tmp_path / "grpo"], tmp_path / "run")
    assert metrics(tmp_path / "run") == {(1, "loss"): 1.0, (2, "loss"): 0.5, (1, "epoch"): 0.1}
    assert (
        not summary.resumed and summary.files.keys() == {"trainer_state"} and len(summary.files["trainer_state"]) == 2
    )


def test_the_state_that_trl_wrote():
    source = Source(LOGS / "trainer_state.json")
    state = json.loads(source.path.read_text())["log_history"]
    rows = list(trl.read_state(source, Notes()))
    expected = {(e["step"], key): value for e in state for key, value in e.items() if key != "step"}
    assert {(row.step, row.raw_name): row.value for row in rows} == expected
    assert {row.name for row in rows if row.raw_name == "completions/clipped_ratio"} == {"truncation_ratio"}


def test_the_completions_that_trl_wrote():
    source = Source(LOGS / "completions_00004.parquet")
    assert form(source.path) == "trl_completions"
    rows = list(samples.read_trl(source, Notes()))
    found = [row for row in rows if isinstance(row, SampleRow)]
    assert [(row.sample_id, row.group_id, row.step) for row in found] == [(f"4-{at}", "4-g0", 4) for at in range(4)]
    assert [row.reward for row in found] == [23.0, 19.0, 23.0, 13.0]  # what its console prints beside them
    assert [round(row.advantage, 2) for row in found] == [0.74, -0.11, 0.74, -1.38]
    texts = [row.text for row in rows if isinstance(row, TokenRow) and row.sample_id == "4-1"]
    assert texts == ["7 =", "q ? 8 0 e m 1 9 y w"]


def test_verls_rollouts_and_validations(tmp_path):
    def rows(step: int) -> list[object]:
        return [
            {
                "input": f"question {at // 2}",
                "output": "a" * at,
                "gts": "1",
                "score": at % 2,
                "step": step,
                "acc": at == 3,
                "note": "x",
            }
            for at in range(4)
        ]

    for step in (2, 10):
        write(tmp_path / "dump" / "rollout" / f"{step}.jsonl", *rows(step))
    write(tmp_path / "dump" / "validation" / "10.jsonl", *rows(10))
    summary = imported([tmp_path / "dump"], tmp_path / "run")
    assert (summary.steps, summary.first_step, summary.last_step) == (2, 2, 10)
    with Ledger(tmp_path / "run") as ledger:
        shown = table(ledger, "samples").rows
        found = ledger.rows("FROM samples_merged WHERE step = 10")
        checks = {row.id: row.verdict for row in laws.check(ledger)}
    assert len(shown) == 12
    assert [(row["sample_id"], row["group_id"], row["reward"], row["rewards"]["acc"]) for row in found] == [
        ("10-0", "10-g0", 0.0, 0.0), ("10-1", "10-g0", 1.0, 0.0), ("10-2", "10-g1", 0.0, 0.0), ("10-3", "10-g1", 1.0, 1.0)
    ]  # fmt: skip
    assert set(checks.values()) == {"skipped"}  # a dump has nothing that a law could be held against


def test_nemo_rls_tokens(tmp_path):
    row = {
        "content": "q a", "rewards": 1.0, "input_lengths": 3, "token_ids": [5, 6, 7, 0], "token_loss_mask": [0, 1, 1, 0],
        "generation_logprobs": [0.0, -0.5, -0.25, 0.0], "prev_logprobs": [0.0, -0.5, -0.2, 0.0], "advantages": [0.5, 0.5, 0.5, 0.5], "idx": 0,
    }  # fmt: skip
    path = write(tmp_path / "train_data_step7.jsonl", row)
    assert form(path) == "nemo_rl_samples"
    sample, *tokens = samples.read_nemo(Source(path), Notes())
    assert (sample.step, sample.reward, sample.prompt_length, sample.response_length, sample.advantage) == (
        7,
        1.0,
        1,
        2,
        0.5,
    )
    assert [(row.token_id, row.loss_mask, row.rollout_log_prob, row.old_log_prob) for row in tokens] == [
        (5, 0, None, None), (6, 1, -0.5, -0.5), (7, 1, -0.25, -0.2)
    ]  # fmt: skip


def test_areals_trajectories(tmp_path):
    row = {
        "task_id": 3,
        "sample_idx": 0,
        "seqlen": 9,
        "prompt_len": 4,
        "head_version": 1,
        "tail_version": 2,
        "reward": 0.5,
        "prompt": "p",
        "completion": "c",
    }
    path = write(tmp_path / "2" / "3.jsonl", row)
    assert form(path) == "areal_samples"
    sample, *_ = samples.read_areal(Source(path), Notes())
    assert (
        sample.step,
        sample.group_id,
        sample.versions,
        sample.prompt_length,
        sample.response_length,
        sample.reward,
    ) == (2, "3", [1, 2], 4, 5, 0.5)


TABLE = [{"_step": 0, "_runtime": 3.5, "train/global_step": 10, "train/reward": 0.5, "train/completions/mean_length": 12, "note": "x"},
         {"_step": 1, "_runtime": 4.5, "train/global_step": 20, "train/reward": "NaN", "train/completions/mean_length": 13.5, "note": "y"}]  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet", "csv.gz"])
def test_exported_tables_in_any_form(tmp_path, ending):
    path = tmp_path / f"history.{ending}"
    if ending == "parquet":
        import duckdb

        write(tmp_path / "rows.json", *TABLE)
        duckdb.execute(f"COPY (FROM read_json('{tmp_path / 'rows.json'}')) TO '{path}' (FORMAT parquet)")
    elif ending == "json":
        path.write_text(json.dumps(TABLE, indent=1))
    elif ending == "jsonl":
        write(path, *TABLE)
    else:
        with gzip.open(path, "wt") if ending.endswith("gz") else path.open("w") as file:
            writer = csv.DictWriter(file, list(TABLE[0]), delimiter="\t" if ending == "tsv" else ",")
            writer.writeheader()
            writer.writerows(TABLE)
    one = formats.format_of(Source(path))
    notes = Notes()
    rows = list(one.read(Source(path), notes))
    got = {(row.step, row.raw_name, row.name): row.value for row in rows}
    nan = got.pop((20, "train/reward", "reward/mean"))
    assert nan is not None and math.isnan(nan)
    assert got == {
        (10, "train/reward", "reward/mean"): 0.5,
        (10, "train/completions/mean_length", "response_length/mean"): 12.0,
        (20, "train/completions/mean_length", "response_length/mean"): 13.5,
    }
    assert notes.framework == "trl" and not notes.skipped


def test_a_chart_that_was_exported_names_its_run_before_each_column(tmp_path):
    path = write(
        tmp_path / "chart.csv",
        '"Step","my-run - actor/entropy","my-run - actor/entropy__MIN","my-run - actor/entropy__MAX"',
        "3,0.5,0.5,0.5",
    )
    assert [(row.step, row.raw_name, row.value) for row in tables.read_csv(Source(path), Notes())] == [
        (3, "actor/entropy", 0.5)
    ]


def test_what_is_said_of_an_import_is_the_same_for_people_and_programs(tmp_path):
    path = write(tmp_path / "job.log", "step:1 - actor/pg_loss:0.5", "step:2 - actor/pg_loss:x")
    summary = imported([path], tmp_path / "run")
    told = document(summary)
    assert told["tables"] == {"findings": 1, "metrics": 1} and told["steps"] == {"first": 1, "last": 1, "count": 1}
    text = "\n".join(lines(summary))
    assert "1 file of verl, step 1" in text and "1 findings, 1 metrics" in text and "job.log:2" in text


def test_an_unknown_format_is_refused_with_the_nearest(tmp_path):
    path = write(tmp_path / "job.log", "step:1 - a:1")
    with pytest.raises(BadInput, match="did you mean verl_file"):
        imported([path], tmp_path / "run", format="verl_fil")


def names(path, notes):
    """What each column of a table became."""
    return {row.raw_name: row.name for row in tables.read_csv(Source(path), notes)}


@pytest.mark.parametrize(
    ("header", "framework", "expected"),
    [
        (
            "Step,r-1 - actor/kl_loss,r-1 - actor/kl_loss__MIN,r-1 - actor/kl_loss__MAX,r-1 - _step,r-1 - critic/score/mean",
            "verl", {"actor/kl_loss": "ref_kl", "critic/score/mean": "reward/mean"},
        ),
        ("Step,actor/kl_loss,critic/rewards/mean", "verl", {"actor/kl_loss": "ref_kl", "critic/rewards/mean": "critic/rewards/mean"}),
        ("step,rollout/raw_reward,rollout/response_len/mean", "slime",
         {"rollout/raw_reward": "reward/mean", "rollout/response_len/mean": "response_length/mean"}),
        ("step,kl,reward,response_len", None, {"kl": "kl", "reward": "reward/mean", "response_len": "response_length/mean"}),
        ("step,train/reward,train/grad_norm", None, {"train/reward": "reward/mean", "train/grad_norm": "grad_norm"}),
    ],
)  # fmt: skip
def test_columns_are_read_under_the_framework_whose_names_they_are(tmp_path, header, framework, expected):
    path = write(tmp_path / "export.csv", header, ",".join("1" for _ in header.split(",")))
    notes = Notes()
    assert names(path, notes) == expected and notes.framework == framework


def test_columns_of_no_framework_are_those_of_the_one_that_is_named(tmp_path):
    path = write(tmp_path / "export.csv", "step,ppo_kl,kl", "1,0.5,0.25")
    assert names(path, Notes())["ppo_kl"] == "ppo_kl"
    summary = imported([path], tmp_path / "run", framework="openrlhf")
    assert summary.notes.columns == {"ppo_kl": "policy_kl", "kl": "kl"} and summary.notes.framework == "openrlhf"


def test_how_many_columns_have_canonical_names_is_said_with_those_that_have_none(tmp_path):
    own = [f"mine{n}" for n in range(12)]
    path = write(tmp_path / "export.csv", ",".join(["step", "reward", *own]), ",".join(["1"] * 14))
    text = "\n".join(lines(imported([path], tmp_path / "run")))
    assert "1 of 13 columns have canonical names" in text and "mine9 and 2 more" in text and "mine10" not in text


def test_runs_side_by_side_are_told_to_be_exported_alone(tmp_path):
    path = write(tmp_path / "export.csv", "Step,a - actor/kl_loss,b - actor/kl_loss", "1,0.5,0.25")
    assert any("2 runs stand side by side" in remark for remark in imported([path], tmp_path / "run").notes.remarks)


def test_a_run_is_none_to_import(tmp_path):
    summary = imported([write(tmp_path / "job.log", "step:1 - a:1")], tmp_path / "run")
    with pytest.raises(BadInput, match=r"is a run already.*flowledger diagnose"):
        imported([summary.path], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_rewards_that_are_no_numbers_are_kept_as_told_and_named(tmp_path):
    told = [0.5, float("nan"), float("inf"), "abc", "0.25", None, 10**400]
    rows = [{"input": f"q{at}", "output": "a", "score": one, "step": 3, "acc": 1.0} for at, one in enumerate(told)]
    summary = imported([write(tmp_path / "3.jsonl", *rows)], tmp_path / "run")
    assert summary.notes.odd_rewards == {
        "nan": 1,
        "inf": 1,
        "text": 1,
        "nothing": 1,
        "a number too large for a float": 1,
    }
    said = "\n".join(lines(summary))
    assert (
        "5 rewards are told and no finite numbers (1 nan, 1 inf, 1 text" in said and "sample 3-1: score = nan" in said
    )
    with Ledger(tmp_path / "run") as ledger:
        kept = {row["sample_id"]: (row["reward"], row["rewards"]) for row in ledger.rows("FROM samples_merged")}
        (found,) = ledger.rows("FROM findings WHERE id = 'rewards_not_numbers'")
    assert {name: reward for name, (reward, _) in kept.items()} == {
        "3-0": 0.5, "3-1": None, "3-2": None, "3-3": None, "3-4": 0.25, "3-5": None, "3-6": None,
    }  # fmt: skip
    assert kept["3-1"][1] == {"score": None, "acc": 1.0} and kept["3-0"][1] == {"acc": 1.0}
    assert found["verdict"] == "fail" and len(found["evidence"]) == 5


def test_a_part_of_a_reward_that_does_not_apply_is_a_remark_and_no_failure(tmp_path):
    rows = [
        {"input": "q", "output": "a", "score": 1.0, "step": 1, "accuracy": float("nan"), "format": 1.0}
        for _ in range(3)
    ]
    summary = imported([write(tmp_path / "1.jsonl", *rows)], tmp_path / "run")
    assert summary.notes.odd_rewards == {}
    assert summary.notes.remarks == [
        "values of accuracy that are nan or infinite are kept without a value (the first at sample 1-0)"
    ]
    with Ledger(tmp_path / "run") as ledger:
        assert {str(row["rewards"]) for row in ledger.rows("FROM samples_merged")} == {
            "{'accuracy': None, 'format': 1.0}"
        }
        assert not ledger.rows("FROM findings WHERE verdict IN ('warn', 'fail')")


def test_whole_numbers_that_no_float_holds_are_counted(tmp_path):
    path = write(tmp_path / "metrics.jsonl", '{"step": 1, "data": {"a": 1' + "0" * 400 + ', "b": 2}}')
    summary = imported([path], tmp_path / "run")
    assert metrics(tmp_path / "run") == {(1, "b"): 2.0}
    assert summary.notes.skipped == {"a whole number larger than a float can hold": 1}


def test_rows_that_cannot_be_written_are_told(tmp_path):
    row = (
        '{"input": "q", "output": "\\ud800", "score": 1, "acc": NaN, "step": 1}'  # half a character: no UTF-8 holds it
    )
    summary = imported([write(tmp_path / "1.jsonl", row, row)], tmp_path / "run")
    assert summary.lost == 2 and summary.rows["samples"] == 2
    assert any(line == "  lost: 2 rows that could not be written, so tables lack them" for line in lines(summary))
    assert document(summary)["lost"] == 2


def test_an_import_writes_what_the_detectors_find_as_a_runs_end_does(tmp_path, capsys):
    rows = [{"step": step, "data": {"actor/pg_loss": float("nan") if step > 1 else 0.1}} for step in (1, 2, 3)]
    import_([write(tmp_path / "metrics.jsonl", *rows)], tmp_path / "run", format="verl_file", json=True)
    told = json.loads(capsys.readouterr().out)
    with Ledger(tmp_path / "run") as ledger:
        kept = ledger.rows("SELECT id, verdict, source FROM findings")
    assert ("metric_not_finite", "fail", "import") in [tuple(row.values()) for row in kept]
    assert "skipped" not in {
        row["verdict"] for row in kept
    }  # what a log cannot say is counted, and not listed one by one
    assert (
        told["verdicts"]["fail"] == sum(row["verdict"] == "fail" for row in kept) and told["verdicts"]["skipped"] > 20
    )
    import_([tmp_path / "metrics.jsonl"], tmp_path / "again", json=False)
    said = capsys.readouterr().out
    assert "findings: 1 fail (metric_not_finite); " in said and "need a recorded run" in said
