"""`flowledger plan` and `check` as a user types them: answers, exit codes, and one clear line for bad input."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowledger.cli.plan import read_source
from flowledger.ledger.rows import TensorRow, columns

EXAMPLES = Path(__file__).parents[2] / "examples"
FSDP, MEGATRON, TINY = (
    EXAMPLES / "verl_qwen3_8b_fsdp.sh",
    EXAMPLES / "verl_qwen3_235b_megatron.sh",
    EXAMPLES / "tiny.yaml",
)
GPU = ("--gpu", "h100-80g")

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "words",
    [[TINY], [EXAMPLES / "smollm2.yaml"], [FSDP, *GPU], [MEGATRON, *GPU], [FSDP, *GPU, "--table", "all", "--wide"]],
)
def test_the_examples_are_planned(call: Call, words: list[object]) -> None:
    code, out, err = call("plan", *words)
    assert (code, err) == (0, "")
    assert "peak" in out and "starts" in out


def test_json_is_one_document_with_everything(call: Call) -> None:
    code, out, _ = call("plan", FSDP, *GPU, "--json")
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (code, found["schema"], found["verb"], found["run"]) == (0, 1, "plan", "qwen3_8b_fsdp")
    assert {
        "rows",
        "chain",
        "checks",
        "shapes",
        "lifetimes",
        "estimates",
        "engine",
        "communication",
        "summary",
        "reading",
    } <= found.keys()
    assert (set(columns(TensorRow)) - {"seq", "t_ns"}) <= found["shapes"][0].keys()
    assert found["summary"]["fits"] is True and found["summary"]["starts"] is True


def test_the_summary_in_json_is_what_the_terminal_says(call: Call) -> None:
    _, out, _ = call("plan", MEGATRON, *GPU, "--json")
    summary = json.loads(out)["summary"]
    assert (summary["world"], summary["mesh"]["pp"], summary["mesh"]["dp"]) == (1024, 8, 16)
    _, text, _ = call("plan", MEGATRON, *GPU)
    assert f"in {summary['peak_stage']} at {summary['peak_instant']}" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "code"),
    [([], 0), (["--fail-on", "warn"], 1), (["actor_rollout_ref.rollout.tensor_model_parallel_size=3"], 1)],
)
def test_check_exits_with_one_where_a_rule_is_broken(call: Call, words: list[str], code: int) -> None:
    found, out, err = call("check", FSDP, *GPU, *words)
    assert (found, err) == (code, "")
    assert "checks: " in out
    found, out, _ = call("check", FSDP, *GPU, *words, "--json")
    assert found == code
    assert {"id", "verdict", "message", "fires_at"} <= json.loads(out)["rows"][0].keys()


@pytest.mark.parametrize(
    "words",
    [
        [MEGATRON, "trainer.nnodes=3"],  # 24 GPUs and tp*pp*cp = 64
        [MEGATRON, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"],
        [FSDP, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
        [FSDP, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"],
        [TINY, "mesh.tp=3"],
    ],
)
def test_degrees_that_contradict_each_other_are_broken_rules_and_still_planned(call: Call, words: list[object]) -> None:
    code, out, err = call("plan", *words, *GPU)
    assert (code, err) == (0, "")
    assert "will not run" in out
    assert "divi" in out  # divide, divisible
    assert call("check", *words, *GPU)[0] == 1


def test_a_plan_is_a_ledger_that_every_table_is_shown_of(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "planned"
    assert call("plan", FSDP, *GPU, "-o", run)[0] == 0
    for table, word in (
        ("shapes", "full_sequence"),
        ("memory", "update_actor"),
        ("lifetimes", "old_log_prob"),
        ("findings", "memory.fits"),
    ):
        code, out, err = call("show", run, table)
        assert (code, err) == (0, ""), table
        assert word in out, table
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["level"], manifest["state"], manifest["framework"], manifest["mesh"]["dp"]) == (
        "plan",
        "closed",
        "verl",
        8,
    )
    _, out, _ = call("plan", FSDP, *GPU, "--json")
    _, shown, _ = call("sql", run, "SELECT max(peak) AS peak FROM peaks", "--json")
    assert json.loads(shown)["rows"][0]["peak"] == max(row["allocated"] for row in json.loads(out)["rows"])
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*"))
    code, _, err = call("plan", TINY, "-o", run)
    assert code == 2 and "planned" in one_line(err)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_second_plan_stands_beside_the_first(call: Call) -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    _, out, _ = call("plan", FSDP, *GPU, "--set", f"{key}=9216", "--json")
    compare = json.loads(out)["compare"]
    rows = {row["stage"]: row for row in compare["rows"]}
    _, alone, _ = call("plan", FSDP, *GPU, f"{key}=9216", "--json")
    assert compare["after"] == json.loads(alone)["summary"]
    assert rows["update_actor"]["change"] < 0 == rows["reward"]["change"]
    assert f"with {key}=9216" in call("plan", FSDP, *GPU, "--set", f"{key}=9216")[1]


def test_advice_is_ranked_and_named_in_the_words_of_the_framework(call: Call) -> None:
    _, out, _ = call("plan", FSDP, *GPU, "--advise", "--json")
    advice = json.loads(out)["advice"]
    assert [one["saves"] for one in advice] == sorted((one["saves"] for one in advice), reverse=True) != []
    assert all("actor_rollout_ref" in one["key"] for one in advice)


def test_the_largest_budget_really_fits_and_one_more_does_not(call: Call) -> None:
    usual = ("actor.micro_batch.samples=null", "actor.micro_batch.max_tokens=100", "memory.limit_bytes=4000000")
    _, out, _ = call("plan", TINY, *usual, "--max-tokens", "--json")
    largest = {one["what"]: one["largest"] for one in json.loads(out)["largest"]}

    def fits(*overrides: str) -> bool:
        _, out, _ = call("plan", TINY, *usual, *overrides, "--json")
        return bool(json.loads(out)["summary"]["fits"])

    assert fits(f"actor.micro_batch.max_tokens={largest['token budget']}")
    assert not fits(f"actor.micro_batch.max_tokens={largest['token budget'] + 1}")
    assert largest["response length"] == 100 - 32  # a sample of prompt and response has to go into the budget
    assert fits(f"rollout.max_response_tokens={largest['response length']}")


def test_real_lengths_make_fewer_micro_batches(call: Call, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([300] * 900 + [900] * 100))
    found = []
    for words in ([], ["--lengths", "p50=300,p99=900,max=900"], ["--lengths", tmp_path / "lengths.json"]):
        code, out, _ = call("plan", FSDP, *GPU, *words, "--json")
        assert code == 0
        found.append(
            next(row["value"] for row in json.loads(out)["chain"] if row["quantity"] == "update: micro-batches")
        )
    worst, named, measured = (float(str(one).partition(" ")[0]) for one in found)
    assert worst == 32 and max(named, measured) < 16


def test_what_a_script_leaves_open_is_assumed_and_said(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=$MODEL\n"
    )
    code, out, _ = call("plan", script, "--assume", "MODEL=Qwen/Qwen3-8B", *GPU, "--json")
    found = json.loads(out)
    assert code == 0 and found["summary"]["model"] == "Qwen3-8B"
    assert found["reading"]["assumed"] == ["MODEL=Qwen/Qwen3-8B"]


def one_line(err: str) -> str:
    assert "Traceback" not in err
    (line,) = [line for line in err.strip().splitlines() if line.startswith("flowledger: ")]
    assert err.strip() == line
    return line


BAD = {
    "unknown device": ([FSDP, "--gpu", "h1000"], ["h1000"]),
    "unknown model": ([FSDP, "--model", "Qwen3-8C"], ["Qwen3-8C", "did you mean Qwen3-8B"]),
    "unknown framework": ([FSDP, "--framework", "verll"], ["verll", "did you mean verl"]),
    "unknown version": ([FSDP, "--verl", "9.9"], ["9.9", "head"]),
    "unknown table": ([FSDP, "--table", "shape"], ["did you mean shapes"]),
    "unknown key": ([FSDP, "data.train_batch_siz=3"], ["data.train_batch_siz", "did you mean data.train_batch_size"]),
    "unknown key to set": ([FSDP, *GPU, "--set", "data.train_batch_siz=3"], ["did you mean data.train_batch_size"]),
    "unknown own key": ([TINY, "rollout.max_respons_tokens=3"], ["did you mean rollout.max_response_tokens"]),
    "missing script": (["nowhere.sh"], ["nowhere.sh", "o such file"]),
    "missing file": (["nowhere.yaml"], ["nowhere.yaml", "no such file"]),
    "directory": ([EXAMPLES], ["examples"]),
    "no pair to assume": ([FSDP, "--assume", "foo"], ["'foo'", "KEY=VALUE"]),
    "no override": ([FSDP, "--set", "foo"], ["'foo'"]),
    "no lengths": ([FSDP, "--lengths", "p50=abc"], ["abc"]),
    "missing lengths": ([FSDP, "--lengths", "gone.json"], ["gone.json"]),
    "no such launch": ([FSDP, "--launch", "4"], ["--launch 4"]),
    "mini-batch": ([TINY, "actor.mini_batch_prompts=3"], ["mini_batch_prompts = 3", "use 2"]),
    "unknown option": ([FSDP, "--gpus", "h100"], ["--gpus"]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_clear_line_and_exit_code_2(call: Call, name: str) -> None:
    words, hints = BAD[name]
    code, out, err = call("plan", *words)
    assert (code, out) == (2, "")
    assert all(hint in one_line(err) for hint in hints), err


@pytest.mark.parametrize(
    ("file", "text", "hint"),
    [
        ("a.sh", "if [ ; then\n", "a.sh:1"),
        ("a.sh", "echo hi\n", "starts no program"),
        ("a.sh", "python prepare.py\n", "starts no training"),
        ("a.yaml", "a: [\n", "a.yaml:"),
        ("a.yaml", "zebra: 1\n", "no framework is recognised"),
        ("a.json", "{", "a.json"),
        ("a.sh", "\x00\x01\n", "a.sh"),
    ],
)
def test_files_that_cannot_be_planned_say_where_and_why(
    call: Call, tmp_path: Path, file: str, text: str, hint: str
) -> None:
    (tmp_path / file).write_text(text)
    for verb in ("plan", "check"):
        code, out, err = call(verb, tmp_path / file)
        assert (code, out) == (2, "")
        assert hint in one_line(err)


def test_check_says_what_may_fail_on(call: Call) -> None:
    code, _, err = call("check", FSDP, "--fail-on", "maybe")
    assert code == 2 and "fail nor warn" in one_line(err)


def test_a_job_that_nobody_named_has_the_name_of_its_file(call: Call, tmp_path: Path) -> None:
    unnamed = "".join(
        line for line in (EXAMPLES / "tiny.yaml").read_text().splitlines(keepends=True) if not line.startswith("name:")
    )
    for file, more, name in (
        ("my job.yaml", [], "my-job"),
        ("a.yaml", ["name=run"], "run"),
        ("b.yaml", ["name=mine"], "mine"),
    ):
        (tmp_path / file).write_text(unnamed.replace("path: classes.jsonl", f"path: {EXAMPLES / 'classes.jsonl'}"))
        code, out, _ = call("plan", tmp_path / file, *more)
        assert code == 0 and out.startswith(f"plan {name} ")
        assert json.loads(call("plan", tmp_path / file, *more, "--json")[1])["run"] == name


def test_a_job_whose_launch_gives_it_no_name_has_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"
    )
    assert read_source(str(path), [], None, None, None, None, None).config.name == "mine"
    given = read_source(str(path), ["trainer.experiment_name=my_own"], None, None, None, None, None)
    assert given.config.name == "my_own"
