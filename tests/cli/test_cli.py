"""The front door: what a user types, exit codes, and that bad input is one clear line and never loses what was recorded."""

import json
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from flowledger import cli
from flowledger.ledger.reader import Ledger
from tests.cli.forked import forked, in_step

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def small(tmp_path):
    """A config file of a run of a second; sections given are merged into it."""

    def write(**changes: object) -> Path:
        made = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text())
        made["data"]["path"] = str(EXAMPLES / "classes.jsonl")
        made["reward"]["components"][0]["path"] = f"{EXAMPLES / 'rewards.py'}:in_class"
        made |= {
            "steps": 2,
            "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
            "record": {"level": "tokens"},
        }
        for key, value in changes.items():
            made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(made))
        return path

    return write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """One run that many tests read."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    sys.argv = [
        "flowledger",
        "run",
        str(EXAMPLES / "tiny.yaml"),
        "steps=2",
        "record.level=tokens",
        "-o",
        str(path),
        "-q",
    ]
    cli.main()
    return path


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert "Traceback" not in err
    errors = [line for line in lines if line.startswith("flowledger: ")]
    assert len(errors) == 1, err
    return errors[0]


TABLES = ("shapes", "memory", "lifetimes", "stages", "metrics", "samples", "log", "findings")


@pytest.mark.parametrize("table", TABLES)
def test_every_table_prints_and_speaks_json_and_csv(call, recorded, table: str) -> None:
    code, out, _ = call("show", recorded, table)
    assert (code, bool(out.strip())) == (0, True)
    code, out, _ = call("show", recorded, table, "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["verb"]) == (0, 1, "show")
    assert document["rows"]
    code, out, _ = call("show", recorded, table, "--csv")
    assert out.splitlines()[0].split(",")[: len(document["rows"][0])] == list(document["rows"][0])
    assert len(out.splitlines()) > len(document["rows"]) - 1


def test_log_has_exactly_the_thirteen_fields_in_their_order(call, recorded) -> None:
    fields = "stage rank tensor_name logical_shape local_shape dtype numel bytes mask_ratio lifetime comm_type latency_ms owner"
    _, out, _ = call("show", recorded, "log", "--csv")
    assert out.splitlines()[0].split(",") == fields.split()


def test_a_sample_shows_every_stage_it_went_through_and_its_tokens(call, recorded) -> None:
    code, out, _ = call("sample", recorded, "0")
    assert code == 0
    for hop in (
        "prompt",
        "rollout",
        "reward",
        "old_log_prob",
        "ref_log_prob",
        "advantage",
        "update_actor",
        "weight_sync",
    ):
        assert hop in out
    _, out, _ = call("sample", recorded, "0", "--json")
    document = json.loads(out)
    prompt = document["sample"]["prompt_length"]
    tokens = [t for t in document["tokens"] if t["attention_mask"]]
    assert len(tokens) == prompt + document["sample"]["response_length"]
    assert sum(t["loss_mask"] or 0 for t in tokens) == document["sample"]["response_length"]


def test_every_law_holds_on_a_run_at_level_tokens_and_nothing_else_is_said_of_it(call, recorded) -> None:
    _, out, _ = call("show", recorded, "findings", "--json")
    told = json.loads(out)["rows"]
    assert {row["id"]: row["verdict"] for row in told if row["order"] == "laws"} == dict.fromkeys(
        ["shapes_conserved", "tokens_conserved", "masks_nest", "lifetimes_close", "memory_adds_up", "identities"],
        "pass",
    )
    assert {row["verdict"] for row in told} <= {"pass", "skipped"}


def test_sql_answers_and_only_reads(call, recorded) -> None:
    code, out, _ = call("sql", recorded, "select count(*) as n from tensors", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["n"] > 100
    code, _, err = call("sql", recorded, "drop table tensors")
    assert code == 2
    assert "only read" in one_line(err)
    code, _, err = call("sql", recorded, "select nothing from nowhere")
    assert code == 2
    one_line(err)


@pytest.mark.parametrize("word", ["advantages", "rollout", "B_prompt", "kv_cache", "reward/mean"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_explain_knows_every_kind_of_word(call, word: str, lang: str) -> None:
    code, out, _ = call("explain", word, "--lang", lang)
    assert code == 0
    assert len(out) > 50


BAD_CONFIGS = {
    "unknown key": (
        {"rollout": {"max_respons_tokens": 4}},
        ["max_respons_tokens", "max_response_tokens", "small.yaml:"],
    ),
    "unknown section": ({"rolout": {"top_k": 4}}, ["rolout", "rollout"]),
    "impossible batch": ({"actor": {"mini_batch_prompts": 3}}, ["mini_batch_prompts = 3", "use 2"]),
    "wrong type": ({"steps": "many"}, ["steps", "many"]),
    "missing prompt file": ({"data": {"path": "nowhere.jsonl"}}, ["nowhere.jsonl"]),
    "reward import": (
        {"reward": {"components": [{"name": "x", "kind": "function", "path": "no_such_module:f"}]}},
        ["no_such_module"],
    ),
    "unknown model": ({"model": {"path": "/no/such/model"}}, ["/no/such/model"]),
    "prompt too long": ({"data": {"max_prompt_tokens": 2}}, ["classes.jsonl:", "max_prompt_tokens = 2"]),
    "all aborted": ({"rollout": {"timeout_s": 0.0}}, ["all 12 samples", "timeout"]),
    "kl without reference": ({"ref": None, "algorithm": {"kl_coef": 0.1}}, ["kl_coef", "ref"]),
}


@pytest.mark.parametrize("name", list(BAD_CONFIGS))
def test_bad_configurations_are_one_clear_line_and_exit_code_2(call, small, tmp_path, name: str) -> None:
    changes, words = BAD_CONFIGS[name]
    config = small(**changes)
    if changes.get("ref", 0) is None:
        made = yaml.safe_load(config.read_text())
        del made["ref"]
        config.write_text(yaml.safe_dump(made))
    code, _, err = call("run", config, "-o", tmp_path / "run")
    assert code == 2
    line = one_line(err)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("content", "words"), [("", ["no prompts"]), ('{"prompt": "a", "answer": "lower"}\n{"prompt"\n', [":2"])]
)
def test_prompt_files_that_cannot_be_read_name_the_line(call, small, tmp_path, content: str, words: list[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    code, _, err = call("run", small(data={"path": str(prompts)}), "-o", tmp_path / "run")
    assert code == 2
    assert all(word in one_line(err) for word in ["prompts.jsonl", *words])


def test_a_reward_that_is_nan_ends_the_run_and_what_was_recorded_stays_readable(call, small, tmp_path) -> None:
    rewards = tmp_path / "odd.py"
    rewards.write_text("def odd(sample_id):\n    return float('nan') if sample_id > 15 else float(sample_id % 2)\n")
    run = tmp_path / "run"
    code, _, err = call(
        "run", small(reward={"components": [{"name": "odd", "kind": "function", "path": f"{rewards}:odd"}]}), "-o", run
    )
    assert code == 2
    assert "odd" in one_line(err)
    assert "nan" in one_line(err).lower()
    with Ledger(run) as ledger:
        assert (
            ledger.rows("SELECT max(step) AS s FROM spans WHERE stage = 'update_actor' AND event = 'end'")[0]["s"] == 0
        )
        assert ledger.directory.state == "crashed"
    assert call("show", run, "shapes")[0] == 0


def test_a_reward_that_raises_or_takes_too_long_marks_its_sample_and_the_run_goes_on(call, small, tmp_path) -> None:
    rewards = tmp_path / "odd.py"
    rewards.write_text(
        "import time\n"
        "def odd(sample_id):\n"
        "    if sample_id == 1: raise RuntimeError('no')\n"
        "    if sample_id == 2: time.sleep(60)\n"
        "    return float(sample_id % 3)\n"
    )
    run = tmp_path / "run"
    settings = {"timeout_s": 0.5, "components": [{"name": "odd", "kind": "function", "path": f"{rewards}:odd"}]}
    code, _, err = call("run", small(reward=settings, steps=1), "-o", run)
    assert code == 0, err
    with Ledger(run) as ledger:
        dropped = ledger.rows(
            "SELECT sample_id, dropped_reason, trained FROM samples_merged WHERE dropped_reason IS NOT NULL ORDER BY 1"
        )
    assert [(row["sample_id"], row["dropped_reason"], row["trained"]) for row in dropped] == [
        ("1", "reward_error", None), ("2", "reward_timeout", None)
    ]  # fmt: skip


def test_an_existing_run_is_never_overwritten_and_a_free_name_is_offered(call, small, recorded) -> None:
    before = (recorded / "manifest.json").read_bytes()
    code, _, err = call("run", small(), "-o", recorded)
    assert code == 2
    assert "tiny-2" in one_line(err)
    assert (recorded / "manifest.json").read_bytes() == before


def test_a_run_directory_that_cannot_be_made_is_said_before_anything_is_loaded(call, small, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("run", small(), "-o", tmp_path / "file" / "run")
    assert code == 2
    one_line(err)


def test_a_full_disk_ends_the_run_with_one_line_and_what_was_written_is_readable(call, small, tmp_path) -> None:
    run = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # any file that grows past 60 kB fails, as on a full disk
    try:
        code, _, err = call("run", small(steps=30), "-o", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert "cannot write to run" in one_line(err)
    with Ledger(run) as ledger:
        assert ledger.rows("SELECT count(*) AS n FROM tensors")[0]["n"] > 100


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["show", "RUN", "shape"], "did you mean shapes"),
        (["show", "RUN", "shapes", "--step", "99"], "has no step 99"),
        (["show", "RUN", "shapes", "--stage", "rolout"], "did you mean rollout"),
        (["sample", "RUN", "100000"], "no sample"),
        (["explain", "advantges"], "did you mean advantage"),
        (["show", "/no/such/run", "shapes"], "no run at"),
        (["run", "/no/such.yaml"], "/no/such.yaml"),
        (["show", "RUN", "shapes", "--stp", "1"], "--stp"),
        (["shwo", "RUN"], "shwo"),
    ],
)
def test_other_bad_input_names_the_way_out(call, recorded, words: list[str], hint: str) -> None:
    code, _, err = call(*(recorded if word == "RUN" else word for word in words))
    assert code == 2
    assert hint in one_line(err)


def test_a_run_without_a_name_of_its_own_takes_the_next_free_one(call, small, tmp_path) -> None:
    for expected in ("tiny", "tiny-2"):
        assert call("run", small(steps=1, record={"level": "steps"}), "--dir", tmp_path / "runs", "-q")[0] == 0
        assert (tmp_path / "runs" / expected / "report.html").exists()


def test_level_off_trains_and_writes_nothing(call, small, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", small(record={"level": "off"}), "-q")[0] == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_closes_its_book_and_exits_with_130(tmp_path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    words = ("run", EXAMPLES / "tiny.yaml", "steps=10000", "record.ops_every=0", "-o", run, "-q")
    with forked(tmp_path, *words) as child:
        child.until(lambda: in_step(run, 2))
        child.send(number)
        assert (child.ended(), child.err.strip()) == (130, "flowledger: interrupted")
        assert " broken" not in child.out
    assert (run / "report.html").exists()
    with Ledger(run) as ledger:
        assert ledger.directory.state == "interrupted"


def test_an_endless_query_ends_on_ctrl_c(tmp_path, recorded) -> None:
    endless = "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t"
    with forked(tmp_path, "sql", recorded, endless) as child:
        used = psutil.Process(child.process.pid).cpu_times
        child.until(lambda: used().user > 2)  # more than it takes to open the ledger: the query is being answered
        child.send(signal.SIGINT)
        assert (child.ended(), child.err.strip()) == (130, "flowledger: interrupted")


def test_text_that_came_from_a_run_is_shown_and_never_obeyed(call, recorded, small, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    hostile = "[/red][bold]\u001b[31m<script>alert(1)</script>"
    prompts.write_text(json.dumps({"prompt": hostile, "answer": "lower"}) + "\n")
    run = tmp_path / "run"
    settings = {"path": str(prompts), "max_prompt_tokens": 99}
    assert call("run", small(data=settings, steps=1), "-o", run)[0] == 0
    for words in (
        ["sample", run, "0"],
        ["show", run, "samples"],
        ["sql", run, "select text, chr(27) || '[31m' as e from tokens"],
    ):
        code, out, _ = call(*words)
        assert code == 0
        assert "\u001b[31m" not in out
    assert "<script>alert" not in (run / "report.html").read_text()
