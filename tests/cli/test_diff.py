"""`flowledger diff PLAN RUN` as a user types it: the answer, its exit code, and one clear line for bad input."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from flowledger import cli
from flowledger.show.diff import TITLES

EXAMPLES = Path(__file__).parents[2] / "examples"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


class Job(NamedTuple):
    """A configuration, its plan as JSON, and its run."""

    config: Path
    plan: Path
    run: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One step of a small configuration, and what was planned of it."""
    place = tmp_path_factory.mktemp("diff")
    made = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text())
    made["data"]["path"] = str(EXAMPLES / "classes.jsonl")
    made["reward"]["components"][0]["path"] = f"{EXAMPLES / 'rewards.py'}:in_class"
    made |= {"steps": 1, "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6}}
    found = Job(place / "small.yaml", place / "plan.json", place / "run")
    found.config.write_text(yaml.safe_dump(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flowledger", "run", str(found.config), "-o", str(found.run), "--quiet"])
        cli.main()
        patch.setattr(sys, "argv", ["flowledger", "plan", str(found.config), "--json"])
        with found.plan.open("w") as out:
            patch.setattr(sys, "stdout", out)
            cli.main()
    return found


def test_a_run_agrees_with_the_plan_of_its_configuration_and_with_the_json_of_that(call: Call, job: Job) -> None:
    code, out, err = call("diff", job.config, job.run)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    text = " ".join(out.split())
    assert "plan and run agree: " in text and "shapes are equal; --wide lists them" in text
    assert "samples have at most" in text and "update_actor first all planned" in text
    assert call("diff", job.plan, job.run) == (code, out, err)


def test_every_table_has_a_heading_that_says_what_it_is(call: Call, job: Job) -> None:
    lines = call("diff", job.config, job.run)[1].splitlines()
    tables = [at for at, line in enumerate(lines) if line.strip().startswith("───")]
    assert len(tables) >= 3
    above = [
        "shapes, planned and recorded",
        "planned, and not seen in the run",
        "memory of a rank at the peak of each stage",
    ]
    assert [title for title in above if title in lines] == above
    titled = [at for at, line in enumerate(lines) if line.rstrip() in TITLES.values()]
    assert len(titled) == len(tables) and all(title < table for title, table in zip(titled, tables, strict=True))


def test_wide_lists_every_form(call: Call, job: Job) -> None:
    _, out, _ = call("diff", job.config, job.run, "--wide")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.endswith("returns [12, 6] [12, 6] equal · [B_prompt*G, S_resp] float32") for line in lines)
    assert "--wide lists them" not in out


def test_the_json_says_what_the_terminal_says(call: Call, job: Job) -> None:
    code, out, _ = call("diff", job.config, job.run, "--json")
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (code, found["schema"], found["verb"], found["run"]) == (0, 1, "diff", "run")
    assert found["summary"]["verdict"] in " ".join(call("diff", job.config, job.run)[1].split())
    # 4 prompts of 3 samples with 6 tokens each
    (response,) = [row for row in found["rows"] if (row["stage"], row["tensor_name"]) == ("rollout", "response_ids")]
    assert (response["planned_local_shape"], response["local_shape"], response["outcome"]) == (
        [12, 6],
        [12, 6],
        "equal",
    )


@pytest.mark.parametrize("words", [["rollout.samples_per_prompt=2"], ["--", "rollout.samples_per_prompt=2"]])
def test_another_configuration_differs_with_exit_code_1(call: Call, job: Job, words: list[str]) -> None:
    code, out, err = call("diff", job.config, job.run, *words)
    assert (code, err) == (1, "")
    assert "plan and run differ: B_prompt*G 8 planned and 12 in the run, G 2 planned and 3 in the run" in " ".join(
        out.split()
    )


def test_bad_input_is_one_clear_line(call: Call, job: Job, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    whole = json.loads(job.plan.read_text())
    (tmp_path / "newer.json").write_text(json.dumps(whole | {"schema": 2}))
    (tmp_path / "torn.json").write_text(json.dumps({key: value for key, value in whole.items() if key != "shapes"}))
    call("plan", job.config, "-o", tmp_path / "planned")
    for words, told in (
        ((job.plan, tmp_path / "none"), f"no run at {tmp_path / 'none'}: there is no such directory"),
        ((job.plan, tmp_path / "planned"), "planned is a plan that was written down, not a run"),
        ((tmp_path / "broken.json", job.run), "broken.json is no JSON: "),
        ((tmp_path / "newer.json", job.run), "newer.json has schema 2, and this flowledger reads 1"),
        ((tmp_path / "torn.json", job.run), "torn.json is not a whole plan: Object missing required field `shapes`"),
        ((job.plan, job.run, "steps=2"), "is a plan already: key=value belongs to the configuration"),
        ((tmp_path / "none.yaml", job.run), "none.yaml: no such file"),
        ((EXAMPLES / "verl_qwen3_8b_fsdp.sh", job.run), "the plan is of verl and "),
        ((job.config, job.run, "model.tiny.layers=3"), "plan and run are of different models: L is 3 in the plan and 2 in the run"),
    ):  # fmt: skip
        code, out, err = call("diff", *words)
        assert (code, out) == (2, "") and err.startswith("flowledger: ") and err.count("\n") == 1, words
        assert told in err, words


def test_it_needs_no_torch(job: Job) -> None:
    asked = (
        f"import sys; from flowledger import cli; sys.argv = ['flowledger', 'diff', {str(job.config)!r}, {str(job.run)!r}]; "
        "cli.main(); print('torch:', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("torch: False\n")
