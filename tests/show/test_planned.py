"""A plan on a terminal: nothing is cut, nothing is wider than the screen, and the answers are said."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from flowledger.flow.errors import BadInput
from flowledger.plan.ask import Question, answer
from flowledger.plan.document import document
from flowledger.show import fitting, planned
from flowledger.show.words import human_bytes
from tests.plan.conftest import planned as plan_of

FSDP = plan_of("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")
DOCUMENTS = {
    "tiny": document(plan_of("tiny.yaml")),
    "fsdp": answer(FSDP, Question(gpu="h100-80g", advise=True, tables=True), lambda sets: FSDP.reading),
    "megatron": document(plan_of("verl_qwen3_235b_megatron.sh", gpu="h100-80g")),
}


def drawn(
    found: dict[str, Any], width: int = 100, tables: tuple[str, ...] = planned.DEFAULT, *, wide: bool = False
) -> str:
    out = io.StringIO()
    planned.draw(found, Console(file=out, width=width, highlight=False), tables, wide=wide)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 130, 160])
@pytest.mark.parametrize("name", list(DOCUMENTS))
@pytest.mark.parametrize("tables", [("chain", "checks", "memory"), ("lifetimes",)])
def test_nothing_is_wider_than_the_screen_and_nothing_is_cut(width: int, name: str, tables: tuple[str, ...]) -> None:
    text = drawn(DOCUMENTS[name], width, tables)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace("@=…", "")  # the ellipsis of a cut cell; `--assume @=…` is a hint of ours


@pytest.mark.parametrize("width", [80, 100, 130, 160])
def test_every_figure_of_the_memory_table_stands_in_its_row(width: int) -> None:
    found = DOCUMENTS["fsdp"]
    lines = drawn(found, width, ("memory",)).splitlines()
    for row in found["rows"]:
        if row["step"] == "later":
            (line,) = [one for one in lines if one.startswith(f" {row['stage']} ")]
            cells = line.split()
            assert human_bytes(row["allocated"]) in cells and human_bytes(row["param"]) in cells


def test_columns_of_nothing_but_zeros_are_left_out() -> None:
    head = next(line for line in drawn(DOCUMENTS["tiny"], 130, ("memory",)).splitlines() if " stage " in line)
    assert "comm" not in head and "kv" in head  # one rank sends nothing


@pytest.mark.parametrize("width", [80, 100, 130, 160])
def test_advice_names_its_knob_in_full_and_what_it_costs(width: int) -> None:
    text = drawn(DOCUMENTS["fsdp"], width, ("memory",))
    joined = "".join(text.split())
    for one in DOCUMENTS["fsdp"]["advice"]:
        assert human_bytes(one["saves"]) in text
        assert all(word in text or word in joined for word in one["costs"].split())
    for one in DOCUMENTS["fsdp"]["advice"]:
        assert all(piece in text for piece in re.split(r"[^A-Za-z0-9]+", one["key"]))


def test_it_answers_whether_it_starts_fits_and_where_the_peak_is() -> None:
    text = drawn(DOCUMENTS["fsdp"], 160)
    summary = DOCUMENTS["fsdp"]["summary"]
    assert "starts: no rule is broken" in text and "fits: " in text
    assert f"in {summary['peak_stage']} at {summary['peak_instant']}" in text
    assert "8.19 B parameters" in text and "8 × H100-SXM5-80GB" in text
    assert "no device is named" in drawn(DOCUMENTS["tiny"])


def test_what_does_not_fit_or_start_is_said_so() -> None:
    over = document(plan_of("verl_qwen3_8b_fsdp.sh", gpu="a100-40g"))
    text = drawn(over, 160)
    assert "does not fit" in text and "will not run" in text
    assert not over["summary"]["fits"] and not over["summary"]["starts"]


def test_checks_that_hold_are_counted_and_listed_only_when_asked_for() -> None:
    checks = DOCUMENTS["fsdp"]["checks"]
    holding = next(row for row in checks if row["verdict"] == "pass")
    assert f" {holding['id']} " not in drawn(DOCUMENTS["fsdp"], 160, ("checks",))
    assert f" {holding['id']} " in drawn(DOCUMENTS["fsdp"], 200, ("checks",), wide=True)
    count = sum(row["verdict"] == "pass" for row in checks)
    assert f"{count} hold" in drawn(DOCUMENTS["fsdp"], 160, ("checks",))


def test_the_shape_table_has_a_line_a_tensor_and_place_and_all_of_them_when_wide() -> None:
    found = DOCUMENTS["tiny"]
    usual, wide = (drawn(found, 240, ("shapes",), wide=wide) for wide in (False, True))
    assert usual.count("optimizer_state") < wide.count("optimizer_state")
    assert "[[" not in usual  # dims are written with one pair of brackets
    assert "[B_prompt*G, S_resp]" in usual


def test_after_each_stage_it_says_what_survives() -> None:
    text = drawn(DOCUMENTS["tiny"], 200, ("lifetimes",))
    for stage, names in DOCUMENTS["tiny"]["survives"].items():
        line = next(one for one in text.splitlines() if one.startswith(f"after {stage}: "))
        assert all(name in line or len(line) > 150 for name in names)


def test_tables_are_chosen_by_name() -> None:
    assert planned.chosen([]) == planned.DEFAULT
    assert planned.chosen(["shapes", "chain", "shapes"]) == ("shapes", "chain")
    assert planned.chosen(["all"]) == planned.TABLES
    with pytest.raises(BadInput, match="did you mean lifetimes"):
        planned.chosen(["lifetime"])


@pytest.mark.parametrize(
    ("name", "width", "due"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 18, ["actor_rollout_ref.", "actor.ppo_mini_", "batch_size"]),
        ("update_actor/forward", 13, ["update_actor/", "forward"]),
        ("short", 18, ["short"]),
        ("[12059152..77791488]", 12, ["[12059152..", "77791488]"]),  # a range, between its numbers
        ("abcdefghij", 4, ["abcdefghij"]),  # no place to break at: left to the terminal
    ],
)
def test_long_names_break_between_words(name: str, width: int, due: list[str]) -> None:
    assert fitting.folded(name, width).split("\n") == due
