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
from flowledger.show.explain_sequence import draw, together
from flowledger.show.sequence_columns import gathered, verdict
from flowledger.tables.operators import ASPECTS, operators, schemes

ROOT = Path(__file__).parents[2]
MEGATRON = str(ROOT / "examples/verl_qwen3_235b_megatron.sh")
FSDP = str(ROOT / "examples/verl_qwen3_8b_fsdp.sh")
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
        "needs global context at once", "T_compute / T_comm", "exposed [1,2,3]", "[2] needs global context at once", "Ulysses sp 2 *", "CP ring cp 2: a layer computes",
        "each: 0–4607, 13824–18431", "1: 9216–18431", "0 whole", "can hide [a]", "exposed [4,b]", "hidden [c]",
        "[c] Transformer Engine (cp_comm_type p2p): counted on, it needs no switch",
        "[d] Megatron --overlap-moe-expert-parallel-comm: not counted on, its switch is not read here", "here, together (Megatron SP + CP ring + Experts):",
        "sequence cut: Megatron SP tp 4 × CP ring cp 2", "batch cut: dp 16", "of all dp ranks: 589,824 tokens", "1024 ranks: dp 16", "the limit and not your data",
        "least exposed here: CP ring cp 2, 0 a micro-batch; this framework has it (verl's Megatron engine): yes",
        "mostly hidden: a last piece", "flowledger explain sp-vs-cp",
    ):  # fmt: skip
        assert fact in text
    assert together(document(), "en").endswith(" outside the layers: embedding")
    for row in document()["rows"]:
        assert row["operator"] in text
    for row in document()["hiding"]:
        assert row["chunk"] is None or f"{row['chunk']:,}" in text


def test_chinese_says_the_same_in_chinese() -> None:
    text = drawn("zh")
    for operator in operators():
        assert operator.needs in ("dense", "last") or operator.zh in text  # the first stage of several has no head
    for fact in (
        "能掩盖",
        "已掩盖",
        "需一次拿到全局上下文",
        "逐分块",
        "此处暴露最少：CP ring cp 2，每个 micro-batch 0；此框架有它吗（verl 的 Megatron 引擎）：是",
        "此配置未用",
        "此配置合计",
        "反向计入，无需开关",
        "切序列",
    ):
        assert fact in text
    for note in document()["notes_zh"]:
        assert note in text
    assert not any(note in text for note in document()["notes"])
    numbers = [set(re.findall(r"\[\d[\d, ]*\]", one)) for one in (text, drawn("en"))]
    assert numbers[0] == numbers[1] != set()


def test_schemes_that_do_the_same_stand_in_one_row() -> None:
    rows = list(gathered(document()["rows"]))
    assert [row["schemes"] for row in rows if row["operator"] == "norm"] == [()]
    sending = [row for row in rows if row["operator"] == "qkv projection"]
    assert [row["schemes"] for row in sending] == [("megatron_sp",), ("others",)]


def test_without_a_device_nothing_is_claimed_of_time() -> None:
    text = drawn("en", TINY, None)
    assert "no device is named" in text and "hidden" not in text.replace("hidden states", "")
    assert "3. when communication hides: left out, for times need a device" in text and "[a]" not in text
    assert (
        "least exposed here: needs --gpu; flowledger's own loop has: Megatron SP, Ulysses, CP ring, CP all-to-all"
        in text
    )


@pytest.mark.parametrize(("lang", "said"), [
    ("en", "least exposed here: CP ring cp 8, 0 a micro-batch; this framework has it (verl's FSDP engine): no; of those it has: Ulysses"),
    ("zh", "此框架有它吗（verl 的 FSDP 引擎）：否；它有的之中：Ulysses"),
])  # fmt: skip
def test_what_an_engine_does_not_have_is_not_offered(lang: Any, said: str) -> None:
    """verl's FSDP engine has Ulysses alone; its Megatron engine has no Ulysses."""
    text = drawn(lang, FSDP)
    assert said.split("CP ring cp 8, 0")[-1] in text.replace("\n    ", " ")
    assert "ring-flash-attn" in text and ("counted on, it needs no switch" not in text)
    has = {row["scheme"]: row["available"] for row in document(FSDP)["schemes"]}
    assert has == {"megatron_sp": False, "ulysses": True, "cp_ring": False, "cp_all_to_all": False}
    assert {row["scheme"] for row in document()["schemes"] if row["available"] is False} == {"ulysses"}


def test_what_it_comes_to_stands_above_the_tables() -> None:
    for gpu in ("h100", None):
        above, _, below = drawn("en", FSDP, gpu).partition("\n1. what a rank holds")
        assert "least exposed here" in above and "Ulysses sp" in above and "here, together" in above
        assert "here, together" not in below and "what it is for" not in below
    assert (
        verdict(
            {"verdict": None, "failing": [], "switched_on": False, "can_be_switched_on": False, "chunk": None}, "en"
        )
        == "?"
    )


@pytest.mark.parametrize(
    ("found", "on", "can", "said"),
    [
        ("hidden", True, False, "hidden [a]"), ("hidden", False, True, "can hide [a]"),
        ("hidden", False, False, "would hide [a]"), ("mostly hidden", True, False, "mostly hidden [a]"),
        ("mostly hidden", False, True, "can mostly hide [a]"), ("exposed", False, True, "exposed [a]"),
    ],
)  # fmt: skip
def test_what_nobody_switches_on_is_no_more_than_possible(found: str, on: bool, can: bool, said: str) -> None:
    row = {"verdict": found, "failing": [], "switched_on": on, "can_be_switched_on": can, "chunk": 8, "done_by": "us"}
    assert verdict(row, "en", {"us": "a"}) == said


@pytest.mark.parametrize(("lang", "said"), [("en", "does not run: verl.W4: "), ("zh", "不能运行：verl.W4: ")])
def test_degrees_that_cannot_run_are_refused_above_the_numbers(lang: str, said: str) -> None:
    words = ["--plan", FSDP, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=7", "--lang", lang]
    text = CliRunner().invoke(app, ["explain", "sp-vs-cp", *words]).stdout
    assert said in text.partition("1. ")[0]


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
        "here",
        "refused",
        "engine",
        "notes",
        "notes_zh",
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
