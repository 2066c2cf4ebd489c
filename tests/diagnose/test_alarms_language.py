"""The language of alarms: it computes as Python does, looks back as statistics say, and takes nothing else."""

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.diagnose.alarms.evaluation import Evaluation
from flowledger.diagnose.alarms.expressions import Scope, read
from flowledger.diagnose.alarms.functions import EARLY, LEAST, SHARE, TO_SIGMA, WARM_UP, WINDOW
from flowledger.diagnose.alarms.moments import Facts, Moment, Value
from flowledger.diagnose.alarms.program import Program
from flowledger.flow.errors import BadInput
from tests.diagnose.alarm_stories import rule

FACTS = Facts(
    config={"optim": {"lr": 0.5, "name": "adam"}, "flag": True}, sizes={"V": 100}, planned={"memory_allocated": 7.0}
)


def course(
    text: str, columns: dict[str, Sequence[float | None]], ranks: dict[str, Sequence[dict[int, float]]] | None = None
) -> list[Value]:
    """The value of an expression at each step."""
    program = Program()
    node = read(program, text, Scope("here", [*columns, *(ranks or {})]))
    program.settle([node], FACTS)
    steps = max([len(column) for column in columns.values()] + [len(one) for one in (ranks or {}).values()])
    found = []
    for step in range(steps):
        job = {name: value for name, column in columns.items() if (value := column[step]) is not None}
        of_ranks = {name: one[step] for name, one in (ranks or {}).items()}
        found.append(program.advance(Moment(step, job, of_ranks, FACTS))[node])
    return found


def value(text: str, **numbers: float | None) -> Value:
    return course(text, {"x": [None], **{name: [one] for name, one in numbers.items()}})[0]


# ------------------------------------------------------------------------------------------- it computes as Python

leaves = st.sampled_from(["a", "b", "c", "1.5", "2", "0.25"])


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    calls = st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
    return pairs | calls | inner.map(lambda text: f"abs({text})") | inner.map(lambda text: f"-{text}")


sums = st.recursive(leaves, compound, max_leaves=8)
tests = st.tuples(sums, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), sums).map(
    lambda t: f"({t[0]} {t[1]} {t[2]})"
)
conditions = st.recursive(
    tests,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda one: f"(not {one})")
    ),
    max_leaves=5,
)
few = st.integers(-3, 3).map(float)


@settings(max_examples=60, deadline=None)
@given(text=sums | conditions, a=few, b=few, c=few)
def test_a_value_is_what_python_gives(text: str, a: float, b: float, c: float) -> None:
    names = {"a": a, "b": b, "c": c}
    try:
        expected = eval(text, {"__builtins__": {}, "min": min, "max": max, "abs": abs}, names)
    except ZeroDivisionError:
        return  # not said by a part of it, perhaps by the whole
    assert value(text, **names) == expected


def test_what_is_not_known_spreads_as_in_kleenes_logic() -> None:
    for text, expected in {
        "x + 1": None, "x > 1": None, "not x": None, "x > 1 and 1 > 2": False, "x > 1 and 2 > 1": None,
        "x > 1 or 2 > 1": True, "x > 1 or 1 > 2": None, "1 / 0": None, "1 / 0 > 3 or 2 > 1": True, "first(x, 4)": 4.0,
        "count(x > 1, 2 > 1, 1 > 2)": 1, "count(x > 1, x > 2)": None, "max(x, 1)": None, "isnan(x)": None,
        'config("optim.lr") * 2': 1.0, 'config("optim.lt", 3)': 3.0, 'config("optim.lt")': None, 'config("optim")': None,
        'config("optim.name") == "adam"': True, 'config("flag")': True, 'size("V")': 100, 'size("W")': None,
        'planned("memory_allocated")': 7.0, "log(0)": None, "1 < 2 < 3": True, "1 < 2 > 3": False, 'config("optim.name") > 1': None,
    }.items():  # fmt: skip
        assert value(text) == expected, text


def test_nan_and_infinity_are_told_and_satisfy_no_bound() -> None:
    assert value("isnan(a)", a=math.nan) is True
    assert value("isnan(a)", a=math.inf) is True
    assert value("isnan(a)", a=1e300) is False
    assert value("a > 1 or a <= 1", a=math.nan) is False


# --------------------------------------------------------------------------------------------------- it looks back

series = st.lists(st.none() | st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(column=series, k=st.integers(1, 5))
def test_windows_are_what_statistics_say_of_the_last_numbers(column: list[float | None], k: int) -> None:
    told = {
        "mean": statistics.fmean, "median": statistics.median, "low": min, "high": max,
        "mad": lambda kept: statistics.median([abs(one - statistics.median(kept)) for one in kept]),
    }  # fmt: skip
    for name, expected in told.items():
        found = course(f"{name}(a, {k})", {"a": column})
        for step, one in enumerate(column):
            known = [v for v in column[: step + 1] if v is not None and math.isfinite(v)]
            if one is None or not math.isfinite(one) or len(known) < k:
                assert found[step] is None
            else:
                assert found[step] == pytest.approx(expected(known[-k:]), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(column=series)
def test_the_usual_is_the_median_of_the_steps_before_and_its_spread_their_mad(column: list[float | None]) -> None:
    usual, spread = course("usual(a)", {"a": column}), course("spread(a)", {"a": column})
    for step in range(len(column)):
        before = [v for v in column[:step] if v is not None and math.isfinite(v)][WARM_UP:][-WINDOW:]
        if len(before) < LEAST:
            assert usual[step] is None and spread[step] is None
            continue
        middle = statistics.median(before)
        off = statistics.median([abs(one - middle) for one in before])
        assert usual[step] == pytest.approx(middle)
        assert spread[step] == pytest.approx(max(TO_SIGMA * off, SHARE * abs(middle)))


def test_slope_rising_falling_steady_fraction_prev_and_early() -> None:
    up = [1.0, 2.0, 4.0, 4.0, 3.0, 2.0]
    assert course("slope(a, 3)", {"a": [5.0, 7.0, 9.0, 11.0]}) == [None, None, 2.0, 2.0]
    assert course("slope(a, 3)", {"a": [0.0, 1.0, 5.0]})[2] == pytest.approx(
        statistics.linear_regression([0, 1, 2], [0, 1, 5]).slope
    )
    assert course("rising(a, 2)", {"a": up}) == [None, None, True, False, False, False]
    assert course("falling(a, 2)", {"a": up}) == [None, None, False, False, False, True]
    assert course("steady(a, 2)", {"a": up}) == [None, False, False, True, False, False]
    assert course("fraction(a > 2, 4)", {"a": up}) == [None, None, None, 0.5, 0.75, 0.75]
    assert course("prev(a, 2)", {"a": up}) == [None, None, 1.0, 2.0, 4.0, 4.0]
    assert course("prev(a)", {"a": [1.0, None, 3.0]}) == [None, 1.0, 1.0]
    assert course("early(a)", {"a": [float(n) for n in range(EARLY + 4)]})[-1] == 3.0  # of 1 to 5


def test_one_history_serves_all_who_ask_for_it() -> None:
    program = Program()
    scope = Scope("here", ["a"])
    nodes = [read(program, text, scope) for text in ("a > 3 * usual(a)", "a > usual(a) + 8 * spread(a)")]
    assert sum(part.kind == "past" for part in program.parts) == 1
    assert read(program, "a > 3 * usual(a)", scope) == nodes[0]


def test_ranks_are_compared_and_one_rank_is_never() -> None:
    two = {"t": [{0: 1.0, 1: 4.0, 2: 2.5}, {0: 3.0}, {0: 1.0, 1: math.nan, 2: 2.0}]}
    for text, expected in {
        "ranks_max(t)": [4.0, None, 2.0], "ranks_min(t)": [1.0, None, 1.0], "ranks_mean(t)": [2.5, None, 1.5],
        "ranks_median(t)": [2.5, None, 1.5], "ranks_spread(t)": [3.0, None, 1.0], "worst(t)": [1, 0, 2],
        "ranks_others(t)": [1.75, None, 1.0],
    }.items():  # fmt: skip
        assert course(text, {}, two) == expected, text


# --------------------------------------------------------------------------------------------- it takes nothing else

REFUSED = {
    "().__class__.__bases__": "not taken here",
    "grad_norm.__class__": "not taken here",
    "__import__('os').system('true')": "not taken here",
    "open('/etc/passwd')": "no function is called 'open'",
    "eval('1')": "no function is called 'eval'",
    "(lambda: 1)()": "not taken here",
    "[x for x in (1, 2)]": "not taken here",
    "f'{grad_norm}'": "not taken here",
    "grad_norm ** 9": "not taken here",
    "grad_norm % 2": "not taken here",
    "grad_norm[0]": "only m[",
    "m[grad_norm]": "only m[",
    "m['grad_norm'].real": "not taken here",
    "(y := 3)": "not taken here",
    "1 if 2 else 3": "not taken here",
    "True": "not taken here",
    "1j": "not taken here",
    "b'x'": "not taken here",
    "grad_norm in (1, 2)": "not taken here",
    "max(1, *grad_norm)": "not taken here",
    "max(1, key=2)": "not taken here",
    "1e999": "too large a number",
    "grad_nrom > 1": "did you mean grad_norm?",
    "grad_norm > 1 && lr > 1": "&& is written and",
    "grad_norm > 1 || lr > 1": "|| is written or",
    "medain(grad_norm, 3)": "did you mean median?",
    "median(grad_norm)": "is written median(x, k)",
    "median(grad_norm, 2.5)": "a whole number from 1 to 1000",
    "median(grad_norm, 100000)": "a whole number from 1 to 1000",
    "ranks_max(grad_norm + 1)": "one metric, not an expression",
    "config(grad_norm)": "a text in quotes",
    "usual": "usual is a function: write usual(x)",
    "grad_norm >": "is no expression",
    "": "is no expression",
    "1 +" * 400 + "1": "characters; at most 1000",
    "-" * 60 + "1": "levels deep",
    "(" * 300 + "1" + ")" * 300: "is no expression",
    "grad_norm > 1\x00": "is no expression",
}


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        Evaluation([rule(text)], Facts())
    said = str(refused.value)
    assert said.startswith("alarm mine, when: ")
    assert REFUSED[text] in said
    assert "Traceback" not in said


def test_an_error_names_the_character_and_the_expression() -> None:
    with pytest.raises(BadInput, match=r"at character 9, 'entropi' of '1 \+ 2 > entropi'"):
        Evaluation([rule("1 + 2 > entropi")], Facts())


def test_a_name_in_brackets_may_be_the_runs_own() -> None:
    assert course('m["critic/vf_loss"] > 1', {"critic/vf_loss": [2.0]}) == [True]
    Evaluation([rule('m["critic/vf_loss"] > 1')], Facts())


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=60) | st.text("abm[]()\"'.,+-*/<>=123 norgad_usl", max_size=60))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    try:
        Evaluation([rule(text)], Facts())
    except BadInput as error:
        assert "alarm mine" in str(error)
