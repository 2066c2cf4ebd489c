"""The pages on planning name every option, key and finding that there is, and the commands in them run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import typer.main
from tests.docs.terminal import typed
from tests.docs.test_readme import DOCS, PAGES, ROOT, commands

from flowledger.cli import app
from flowledger.ledger.rows import FindingRow, MemoryRow, columns
from flowledger.tables.constants import constants
from flowledger.tables.gpus import gpus
from flowledger.tables.models import models
from flowledger.tables.rules import FIRES_AT, FRAMEWORKS, table

PLANS = ("plan.md", "plan.zh-CN.md")
TABLES = ("plan-tables.md", "plan-tables.zh-CN.md")
# Their keys are columns of `tensors`, keys of RunConfig, axes and stages, which are described where they belong.
ELSEWHERE = ("shapes", "sources", "mesh", "survives")


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def planned(words: str) -> CompletedProcess[str]:
    """A flowledger command, typed in the root of the repository."""
    return typed(words, ROOT)


def keys_of(value: Any, name: str = "") -> Iterator[str]:
    """Every key of a document, at any depth, save where its keys are values of the run."""
    if isinstance(value, dict) and name not in ELSEWHERE:
        for key, inner in value.items():
            yield key
            yield from keys_of(inner, key)
    elif isinstance(value, list) and name not in ELSEWHERE:
        for inner in value:
            yield from keys_of(inner, name)


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    """Plans with everything that can be asked for, as `--json` prints them. The largest values are searched for with a small
    model: each try is a plan."""
    asked = (
        "examples/verl_qwen3_8b_fsdp.sh --gpu h100-80g --advise --set actor_rollout_ref.rollout.n=4",
        "examples/tiny.yaml memory.limit_bytes=4000000 --max-tokens",
    )
    found = [planned(f"plan {words} --json") for words in asked]
    assert [done.returncode for done in found] == [0, 0], [done.stderr for done in found]
    return [json.loads(done.stdout) for done in found]


@pytest.mark.parametrize("name", PLANS)
def test_every_key_of_the_json_is_described(name: str, documents: list[dict[str, Any]]) -> None:
    text = text_of(name).partition("## `--json`")[2]
    keys = dict.fromkeys(key for document in documents for key in keys_of(document))
    positions = set(columns(FindingRow)) & set(columns(MemoryRow))  # of every row of the ledger
    assert {"summary", "peak_instant", "kv_blocks", "arithmetic", "saves", "limited_by", "deviation", "assumed"} <= {
        *keys
    }
    assert not [key for key in keys if f"`{key}`" not in text and key not in positions]


@pytest.mark.parametrize("name", PLANS)
def test_every_option_is_named(name: str) -> None:
    text = text_of(name)
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {
        word for verb in ("plan", "check") for one in verbs[verb].params for word in one.opts if word.startswith("-")
    } - {"--help"}
    assert {"--gpu", "--max-tokens", "--fail-on", "-o"} <= options
    assert not [option for option in sorted(options) if f"`{option}`" not in text and f"`{option} " not in text]


@pytest.mark.parametrize("name", PLANS)
def test_moments_tables_and_findings_are_named(name: str) -> None:
    text = text_of(name)
    assert not [moment for moment in FIRES_AT if f"| `{moment}` |" not in text]
    files = {file.name for file in (ROOT / "src/flowledger/tables").glob("*.toml")}
    named = {file for file in files if file.startswith(("activations", "constants"))} | {
        "models.toml",
        "gpus.toml",
        "advice.toml",
    }
    assert not [file for file in sorted(named) if f"`{file}`" not in text]
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src/flowledger/plan").rglob("*.py")]
    found = {word for source in sources for word in re.findall(r'id="(memory\.\w+)"', source)}
    assert "memory.fits" in found
    assert not [word for word in sorted(found) if f"`{word}`" not in text]


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_device_model_and_constant_stands_in_the_tables(name: str) -> None:
    text = text_of(name)
    rules = {rule.id for framework in FRAMEWORKS for rule in table(framework).rules}
    assert not [rule for rule in sorted(rules) if f"\n| `{rule}` |" not in text]
    assert not [row for row in (*gpus(), *models()) if f"\n| {row} |" not in text]
    assert not [row for row in constants() if f"\n| `{row}` |" not in text]


def asked() -> list[str]:
    """Each plan and check of the pages, once, whose output is not printed below it (that one is held against the page)."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    with_output = {
        words for text in pages for words in re.findall(r"^flowledger (.*)\n```\n<!-- output:", text, re.MULTILINE)
    }
    lines = [line for page in PAGES for line in commands(page)]
    found = [line.removeprefix("flowledger ") for line in lines if re.match(r"flowledger (plan|check) ", line)]
    return [words for words in dict.fromkeys(found) if words not in with_output]


@pytest.mark.parametrize("words", asked())
def test_plans_of_the_pages_run(words: str) -> None:
    done = planned(words)
    assert done.returncode == 0, done.stderr
    assert "checks:" in done.stdout or "peak" in done.stdout


def test_a_plan_written_down_is_a_ledger(tmp_path: Path) -> None:
    """What the page says of `-o`: views, tables and SQL work on it, and steps 0 and 1 are there."""
    place = tmp_path / "planned"
    assert planned(f"plan examples/verl_qwen3_8b_fsdp.sh --gpu h100-80g -o {place}").returncode == 0
    assert "update_actor" in planned(f"show {place} memory").stdout
    counted = planned(
        f'sql {place} --json "select step, count(*) as n, max(rank_count) as ranks from memory group by step order by step"'
    )
    rows = json.loads(counted.stdout)["rows"]
    assert [row["step"] for row in rows] == [0, 1]
    assert {row["ranks"] for row in rows} == {8}
    warned = planned(f"sql {place} --json \"select id, message from findings where verdict = 'warn'\"")
    assert json.loads(warned.stdout)["rows"]
