"""Expressions of the tables give what Python gives, and nothing that is no arithmetic is ever run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.plan.arithmetic import MissingNameError, evaluate, integer, names_in

SMALL = st.integers(1, 1000)


@given(SMALL, SMALL, SMALL)
def test_it_computes_as_python_does(a: int, b: int, c: int) -> None:
    names = {"a": a, "b": b, "c": c}
    assert evaluate("(a * b) % c == 0 and a > b or not b <= c", names) == (((a * b) % c == 0 and a > b) or not b <= c)
    assert integer("ceil(a * b, c)", names) == -(-(a * b) // c)
    assert integer("a if b > c else lcm(a, c)", names) == (a if b > c else __import__("math").lcm(a, c))


def test_a_name_that_nobody_gave_is_said_by_its_name() -> None:
    with pytest.raises(MissingNameError) as found:
        evaluate("mini * n % dp == 0", {"mini": 5, "n": 4})
    assert found.value.name == "dp"
    assert names_in("mini * n % dp == 0") == ("mini", "n", "dp")


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "[x for x in a]", "lambda: 1", "open('f')", "a[0]", "f'{a}'", "(a := 1)"]
)
def test_what_is_no_arithmetic_is_refused_before_it_runs(text: str) -> None:
    with pytest.raises(ValueError, match=r"no arithmetic|calls what is none"):
        evaluate(text, {"a": 1})


def test_numbers_are_rounded_up_and_other_values_refused() -> None:
    assert integer("a / 2", {"a": 3}) == 2
    with pytest.raises(ValueError, match="no number"):
        integer("a", {"a": "three"})
