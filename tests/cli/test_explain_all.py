"""Whatever a table, a finding or a metric prints, `explain` knows: headings as they are drawn, and ids as sources and tables have them."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from flowledger.diagnose import ids
from flowledger.diagnose.alarms.rules import built_in
from flowledger.diagnose.laws import LAWS
from flowledger.diagnose.orders.table import orders
from flowledger.flow.errors import BadInput
from flowledger.show import selftest, terminal
from flowledger.show.explain import explain, meanings
from flowledger.tables.metrics import name_tables
from flowledger.tables.rules import FRAMEWORKS, table
from tests.cli.conftest import Call
from tests.ledger.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flowledger"
HAN = re.compile(r"[\u4e00-\u9fff]")
MAKERS = ("FindingRow", "Question", "answer", "told", "_said", "_finding", "_row")  # what is given the id of a finding


def texts(node: ast.expr) -> Iterator[str]:
    """The constants that an expression may come to."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))


def ids_in_sources() -> set[str]:
    """Ids that stand in the code: `FindingRow(id="hang", …)`, `answer("kl_wrong", …)`."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                named = [word.value for word in node.keywords if word.arg == "id"]
                first = node.args[:1] if node.func.id != "FindingRow" else []
                found.update(text for value in (*named, *first) for text in texts(value))
    return {name for name in found if re.fullmatch(r"[a-z][\w.]*", name)}


def ids_in_tables() -> set[str]:
    """Ids of alarms, laws, rules and steps of orders, told by their tables."""
    steps = {step.id for order in orders().values() for step in order.steps}
    rules = {rule.id for framework in FRAMEWORKS for rule in table(framework).rules}
    return steps | rules | {one.id for one in built_in()} | {name for name, *_ in LAWS}


def test_every_id_of_a_finding_is_explained_in_both_languages() -> None:
    found = ids_in_sources()
    assert {"hang", "crash", "ratio_is_always_1", "memory.kv_pool", "graph_retained", "out_of_memory"} <= found
    assert {"verl.I1", "rollout_gap_high", "shapes_conserved", "imbalance.waits"} <= ids_in_tables()
    for name in sorted(found | ids_in_tables()):
        assert name in explain(name, "en", lambda: ids), name
        assert HAN.search(explain(name, "zh", lambda: ids)), name


def test_what_findings_say_of_their_ids_stands_in_both_languages_and_holds_no_values() -> None:
    for sort in ("law", "check", "finding", "alarm", "rule", "order step", "fault"):
        for name, tell in ids.SORTS[sort]().items():
            english, chinese = tell("en"), tell("zh")
            told = [key for key in ("meaning", "holds", "message") if chinese.get(key)]
            assert told and all(HAN.search(chinese[key]) for key in told), name
            assert not any(re.search(r"\{\w*\}|\{\{", str(english.get(key))) for key in told), name


def test_ids_are_asked_for_by_sort_and_a_wrong_one_is_told_the_nearest(call: Call) -> None:
    code, out, _ = call("explain", "rule:verl.I1")
    assert code == 0 and out.startswith("verl.I1  [rule]") and "first update" in out
    code, out, _ = call("explain", "ratio-is-always-1", "--lang", "zh")
    assert code == 0 and "ratio" in out and HAN.search(out)
    code, out, _ = call("explain", "masks_nest", "--json")
    assert code == 0 and json.loads(out)["rows"][0]["what"] == "law"
    code, _, err = call("explain", "ratio_is_always_2")
    assert code == 2 and "did you mean ratio_is_always_1?" in err
    code, _, err = call("explain", "alarm:verl.I1")
    assert code == 2


@pytest.fixture
def headings(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every heading that is drawn from now on."""
    seen: set[str] = set()
    add_column = Table.add_column

    def added(self: Table, header: str = "", *args: object, **more: object) -> None:
        seen.add(str(header).replace("-\n", "-").replace("/\n", " / ").replace("\n", " "))
        add_column(self, header, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Table, "add_column", added)
    return seen


SHOWN = ("shapes", "memory", "lifetimes", "stages", "balance", "metrics", "samples", "log", "findings", "mesh")


def test_every_heading_that_is_drawn_is_explained(
    headings: set[str], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, script = synthetic_run(tmp_path / "run"), ROOT / "examples" / "verl_qwen3_8b_fsdp.sh"
    for width in ("100", "170"):
        monkeypatch.setenv("COLUMNS", width)
        for name in SHOWN:
            call("show", run, name)
        call("show", run, "mesh", "--sample", "0")
    call("show", run, "metrics", "--step", "0")
    call("sample", run, "0")
    for more in (["--advise", "--max-tokens", "--wide"], ["--set", "data.train_batch_size=512"]):
        assert call("plan", script, "--gpu", "h100-80g", "--table", "all", *more)[0] == 0
    call("explain", "sp-vs-cp", "--plan", ROOT / "examples" / "shards.yaml")
    selftest.draw([dict.fromkeys(("goal", "id", "what", "zh", "step", "after"), "x") | {"status": "caught", "fired": [], "caught_by": []}],
                  [{"id": "x", "status": "silent"}], dict.fromkeys(("missed", "false_alarms", "caught", "faults", "clean_runs", "waiting"), ()), terminal.console())  # fmt: skip
    assert {
        "resid",
        "trend",
        "unhealthy",
        "hop",
        "A R L",
        "of batch",
        "rough estimate",
        "T_compute",
        "noticed by",
        "arithmetic",
        "saves",
    } <= headings
    for heading in sorted(headings - {""}):
        assert all(HAN.search(explain(heading, "zh")) for _ in meanings(heading)), heading


def test_frameworks_own_names_of_metrics_and_those_of_the_progress_line_lead_to_ours() -> None:
    assert meanings("perf/throughput")[0]["name"] == "tokens_per_s_per_gpu" and "verl" in name_tables()
    assert {one["name"] for one in meanings("tok/s")} == {"tokens_per_s"}
    assert "grad_norm" in {one["name"] for one in meanings("grad")}
    assert "ref_kl" in {one["name"] for one in meanings("kl")}


def test_the_three_speeds_are_told_apart() -> None:
    whole, device, stage = (explain(word) for word in ("tokens_per_s", "tokens_per_s_per_gpu", "valid/s"))
    assert "end-to-end throughput" in whole and "valid/s" in whole
    assert "one device" in device
    assert "this stage alone" in stage and "generation throughput" in stage and "tokens_per_s" in stage


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("passport", "passport"), ("watched", "watched"), ("heat map", "heat"), ("e0 m1 µ2", "e0"), ("e3", "e0"), ("the batch", "of batch"),
        ("rank classes", "rank class"), ("skipped", "verdict"), ("Megatron SP tp 4 *", "Megatron SP"), ("loss share", "loss_share"),
        ("first rank has sample: tokens", "first rank has sample: tokens"), ("laws", "law"),
    ],
)  # fmt: skip
def test_words_that_tables_and_the_page_print_are_explained(asked: str, name: str) -> None:
    assert name in [facts["name"] for facts in meanings(asked)]
    assert HAN.search(explain(asked, "zh"))


def test_a_word_that_nobody_prints_is_refused() -> None:
    with pytest.raises(BadInput):
        explain("nobody_prints_this_9", "en", lambda: ids)
