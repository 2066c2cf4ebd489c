"""`explain sp-vs-cp`: words in two languages, numbers of a configuration on a terminal and as JSON, and bad input."""

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flowledger.cli import app
from flowledger.config.detect import Asked, read
from flowledger.flow.errors import BadInput
from flowledger.plan.ask import Question, make
from flowledger.plan.sp_vs_cp import compare
from flowledger.show.explain import explain, explain_rows
from flowledger.show.explain_sequence import draw
from flowledger.show.sequence_columns import gathered, verdict
from flowledger.tables.operators import ASPECTS, operators, schemes

ROOT = Path(__file__).parents[2]
MEGATRON = str(ROOT / "examples/verl_qwen3_235b_megatron.sh")
TINY = str(ROOT / "examples/tiny.yaml")


@cache
def document(source: str = MEGATRON, gpu: str | None = "h100") -> dict[str, Any]:
    return compare(make(read(source, Asked()), Question(gpu=gpu)))


def drawn(lang: Any, source: str = MEGATRON, gpu: str | None = "h100") -> str:
    out = io.StringIO()
    draw(document(source, gpu), Console(file=out, width=200, color_system=None), lang)
    return out.getvalue()


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_scheme_and_aspect_is_explained_without_a_configuration(lang: Any) -> None:
    text = explain("sp-vs-cp", lang)
    for scheme in schemes():
        for aspect in ASPECTS:
            assert scheme.texts[aspect][lang == "zh"] in text
    assert explain("SP_vs_CP", lang) == text
    assert explain_rows("sp-vs-cp")["what"] == "comparison"


def test_the_three_answers_stand_on_the_terminal_with_the_numbers_of_the_document() -> None:
    text = drawn("en")
    for fact in (
        "[1, 4608, 4096]", "0–4607, 13824–18431", "all_gather tp before", "by block", "at once", "hidden",
        "needs global context at once", "T_compute / T_comm", "differences", "exposed [1, 2, 3]", "[2] needs global context at once", "Ulysses sp 2 *", "CP ring cp 2: a layer computes",
    ):  # fmt: skip
        assert fact in text
    for row in document()["rows"]:
        assert row["operator"] in text
    for row in document()["hiding"]:
        assert row["chunk"] is None or f"{row['chunk']:,}" in text


def test_chinese_says_the_same_in_chinese() -> None:
    text = drawn("zh")
    for operator in operators():
        assert operator.needs == "dense" or operator.zh in text
    for fact in ("能掩盖", "需一次拿到全局上下文", "逐块", "差异", "此配置未用"):
        assert fact in text
    numbers = [set(re.findall(r"\[\d[\d, ]*\]", one)) for one in (text, drawn("en"))]
    assert numbers[0] == numbers[1] != set()


def test_schemes_that_do_the_same_stand_in_one_row() -> None:
    rows = list(gathered(document()["rows"]))
    assert [row["schemes"] for row in rows if row["operator"] == "norm"] == [()]
    sending = [row for row in rows if row["operator"] == "qkv projection"]
    assert [row["schemes"] for row in sending] == [("megatron_sp",), ("others",)]


def test_without_a_device_nothing_is_claimed_of_time() -> None:
    text = drawn("en", TINY, None)
    assert "no device is named" in text and "hidden" not in text.partition("differences")[0]
    assert verdict({"verdict": None, "failing": []}, "en") == "?"


def test_the_command_prints_json_and_text() -> None:
    run = CliRunner().invoke
    done = run(app, ["explain", "sp-vs-cp", "--plan", TINY, "--gpu", "h100", "--json", "mesh.cp=2"])
    made = json.loads(done.stdout)
    assert {
        "schema",
        "verb",
        "run",
        "rows",
        "shapes",
        "schemes",
        "hiding",
        "chunks",
        "sizes",
        "hardware",
    } <= made.keys()
    assert made["sizes"]["cp"] == 2 and made["hardware"]["gpu"] == "H100-SXM5-80GB"
    assert "what a rank holds" in run(app, ["explain", "sp-vs-cp", "--plan", TINY]).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["advantages", "--plan", TINY], "only sp-vs-cp is explained with a configuration"),
        (["advantages", "--gpu", "h100"], "--gpu belongs to a configuration; name it with --plan CONFIG"),
        (["sp-vs-cp", "mesh.cp=2"], "key=value belongs to a configuration"),
        (["sp-vs-cp", "--plan", TINY, "--gpu", "h1000"], "no device is called 'h1000'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["explain", *words])
    assert isinstance(done.exception, BadInput) and said in str(done.exception)
