"""The override grammar against what hydra-core 1.3.8 itself parsed (tests/data/verl/overrides.json), and its laws."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.verl.overrides import parse
from flowledger.config.verl.values import ValueSyntaxError, parse_value
from flowledger.flow.errors import BadInput

RECORDED = json.loads((Path(__file__).parent.parent / "data/verl/overrides.json").read_text(encoding="utf-8"))
CASES = RECORDED["overrides"]


@pytest.mark.parametrize("case", [case for case in CASES if "refused" not in case], ids=lambda case: case["text"])
def test_parses_as_hydra_does(case: dict[str, Any]) -> None:
    override = parse(case["text"])
    expected = dict(map(tuple, case["pairs"])) if case["pairs"] is not None else case["value"]
    assert (override.kind, override.key, override.package) == (case["kind"], case["key"], case["package"])
    assert override.value == expected
    assert type(override.value) is type(expected)


@pytest.mark.parametrize("text", [case["text"] for case in CASES if "refused" in case])
def test_refuses_what_hydra_refuses(text: str) -> None:
    with pytest.raises(BadInput, match=r"^run\.sh:3: "):
        parse(text, "run.sh:3")


def test_says_where_and_what_to_do() -> None:
    with pytest.raises(
        BadInput, match=r"^run\.sh:7: trainer\.note = a=b: unexpected '=' at character 2; put the value in quotes$"
    ):
        parse("trainer.note=a=b", "run.sh:7")
    with pytest.raises(BadInput, match=r"sweep over several values"):
        parse("data.train_batch_size=1,2")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="\\")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def written(value: Any) -> str:
    """A value in the grammar's own words."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return '"' + value.replace('"', '\\"') + '"'
        case list():
            return f"[{', '.join(map(written, value))}]"
        case dict():
            return "{" + ",".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
        case _:
            return repr(value)


@given(VALUES)
def test_a_value_written_in_the_grammar_is_read_back(value: Any) -> None:
    def plain(item: Any) -> Any:  # true, null and numbers as keys of a dictionary are typed too
        if isinstance(item, dict):
            return {parse_value(key): plain(inner) for key, inner in item.items()}
        return [plain(inner) for inner in item] if isinstance(item, list) else item

    assert parse_value(written(value)) == plain(value)


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_a_clear_refusal(text: str) -> None:
    try:
        parse_value(text)
    except ValueSyntaxError as error:
        assert str(error)
