"""A diagnosis in Chinese: every sentence of the orders, laws and checks has one, and what is somebody else's stays as it is."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from flowledger.diagnose import orders
from flowledger.diagnose.findings import findings
from flowledger.diagnose.orders.chinese import chinese, spoken
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger

ROWS = {
    key: value for part in tomllib.loads(files(orders).joinpath("chinese.toml").read_text(encoding="utf-8")).values()
    for key, value in part.items()
}  # fmt: skip
HAN = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("english", ROWS)
def test_a_row_has_the_same_values_in_both_languages(english: str) -> None:
    assert HAN.search(ROWS[english])
    assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", ROWS[english]))


def sentences() -> Iterator[str]:
    """What the steps of the orders answer with, 7 in the place of each value; none where that is a value too."""
    for file in sorted(Path(orders.__file__ or "").parent.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                not isinstance(call, ast.Call)
                or getattr(call.func, "id", "") not in ("passed", "failed", "warned")
                or not call.args
            ):
                continue
            said = ""
            for part in getattr(call.args[0], "values", [call.args[0]]):
                if isinstance(part, ast.Constant):
                    said += str(part.value)
                elif isinstance(part, ast.FormattedValue):  # what follows a word at once is a part that may be missing
                    said += "" if said[-1:].isalpha() or "'s'" in ast.unparse(part) else "7"
            if re.search(r"[a-z]{3}", said):
                yield said


def test_every_answer_of_a_step_has_a_chinese_sentence() -> None:
    found = list(sentences())
    assert len(found) > 35
    assert [one for one in found if not HAN.search(chinese(one))] == []


def test_every_check_that_lacks_its_rows_says_so_in_chinese(tmp_path: Path) -> None:
    create(tmp_path / "run", Manifest(run="nothing", framework="flowledger")).close()
    with Ledger(tmp_path / "run") as ledger:
        said = {one.id: chinese(one.message) for one in findings(ledger)}
    assert len(said) > 40 and [name for name, text in said.items() if "未检查" not in text] == []


def test_sentences_in_sentences_are_said_too_and_others_words_are_not() -> None:
    assert chinese("memory ran out in update_actor on rank 3: asked for 2.00 GiB, free 1.00 GiB") == (
        "显存在 update_actor（位于 rank 3） 耗尽：申请 2.00 GiB，空闲 1.00 GiB"
    )
    assert chinese("grad_norm 0.9 (0.9 to 1.1 over 3 steps); lr 1 (1 to 1 over 3 steps)") == (
        "grad_norm 0.9（3 步中 0.9 到 1.1） lr 1（3 步中 1 到 1）"
    )
    theirs = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert chinese(theirs) == theirs and chinese("") == ""
    long = "x" * 1000
    assert chinese(f"{long}: not checked") == f"{long}: not checked"


def test_ids_and_numbers_of_a_document_stay() -> None:
    told = {
        "rows": [{"id": "one rank", "message": "one rank", "step": 3, "evidence": None, "fix": {"key": "one rank"}}],
        "parts": {"walked": 1},
    }
    assert spoken(told, {}) == {
        "rows": [{"id": "one rank", "message": "只有一个 rank", "step": 3, "evidence": None, "fix": {"key": "one rank"}}], "parts": {"walked": 1},
    }  # fmt: skip
    assert spoken({"message": "a rule fails"}, {"a rule fails": "规则不成立"}) == {"message": "规则不成立"}
