"""Dimensions are spelled in one way, resolved to integers, and refused with the part that is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.flow.dims import SYMBOLS, parse_dim, parse_shape, resolve, spell
from flowledger.flow.errors import BadInput

SIZES = {"B_prompt": 4, "G": 3, "S_prompt": 5, "S_resp": 7, "dp": 2, "S": 12}


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("[B_prompt*G,S_resp]", "[B_prompt*G, S_resp]"),
        ("B_prompt * G, S_prompt+S_resp", "[B_prompt*G, S_prompt + S_resp]"),
        ("[]", "[]"),
        ("[ceil(S/dp)]", "[ceil(S / dp)]"),
        ("[(S_prompt+S_resp)*2]", "[(S_prompt + S_resp)*2]"),
    ],
)
def test_a_shape_has_one_spelling(written, canonical):
    assert spell(parse_shape(written)) == canonical
    assert spell(parse_shape(canonical)) == canonical


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("B_prompt*G", 12),
        ("S_prompt + S_resp", 12),
        ("ceil(S_resp / dp)", 4),
        ("S_resp - S_prompt", 2),
        ("2*(G + 1)", 8),
    ],
)
def test_a_dimension_resolves_to_the_number_worked_out_by_hand(written, size):
    assert parse_dim(written).resolve(SIZES) == size


def test_the_order_of_factors_is_kept_because_it_says_how_rows_lie():
    assert parse_dim("B_prompt*G") != parse_dim("G*B_prompt")


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_ceil_is_the_least_size_that_covers(total, degree):
    piece = parse_dim("ceil(S / dp)").resolve({"S": total, "dp": degree})
    assert piece * degree >= total > (piece - 1) * degree or total == piece == 0


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(BadInput, match="'G'"):
        resolve(parse_shape("[B_prompt*G]"), {"B_prompt": 2})


@pytest.mark.parametrize("text", ["B_promt", "S_prompt / 2", "B_prompt**2", "B_prompt*", "f(S)", "'x'", "True"])
def test_what_is_no_dimension_is_refused(text):
    with pytest.raises(BadInput):
        parse_dim(text)


def test_every_symbol_has_a_meaning_in_both_languages():
    assert all(english and chinese for english, chinese in SYMBOLS.values())
