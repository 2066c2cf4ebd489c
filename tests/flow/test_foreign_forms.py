"""Forms that other loops alone have: found where the loop is another's, and no part of the flow."""

import pytest

from flowledger.flow.dims import parse_shape
from flowledger.flow.tensors import Tensor, form_of, tensor, tensors

SIZES = {"B_prompt": 4, "G": 4, "B": 16}
FOREIGN = [row for row in tensors().values() if row.foreign]


@pytest.mark.parametrize(
    ("name", "shape", "within", "dims"),
    [
        ("prompt_ids", (16, 28), None, "[B_prompt*G, S_prompt]"),
        ("prompt_ids", (8, 28), "micro_batch", "[B_micro, S_prompt]"),
        ("prompt_ids", (4, 28), None, "[B_prompt, S_prompt]"),  # as in the flow, where it is
        ("prompt_ids", (6, 28), None, "[B_prompt*G, S_prompt]"),  # groups that lie on two ranks
        ("prompt_mask", (16, 28), None, "[B_prompt*G, S_prompt]"),
        ("prompt_mask", (8, 28), "micro_batch", "[B_micro, S_prompt]"),
        ("attention_mask", (16, 52), None, "[B_prompt*G, S_prompt + S_resp]"),
        ("attention_mask", (8, 52), "micro_batch", "[B_micro, S_prompt + S_resp]"),
        ("response_ids", (8, 24), "micro_batch", "[B_micro, S_resp]"),
        ("advantage", (16,), None, "[B_prompt*G]"),
        ("advantage", (8,), "micro_batch", "[B_micro]"),
        ("old_logps", (16,), None, "[B_prompt*G]"),
        ("old_logps", (8,), "micro_batch", "[B_micro]"),
    ],
)
def test_another_loops_shape_is_named(name, shape, within, dims):
    found = form_of(name, shape, SIZES, within=within, foreign=True)
    assert found is not None and found.shape == dims


@pytest.mark.parametrize("shape", [(16, 28), (4, 28), (3, 28)])
def test_the_own_loop_never_has_one(shape):
    """There, prompts that stand once a sample are a fault, and must be named so that it shows."""
    found = form_of("prompt_ids", shape, {**SIZES, "B_admit": 2})
    assert found in tensor("prompt_ids").forms and found.shape == "[B_prompt, S_prompt]"


@pytest.mark.parametrize("row", FOREIGN, ids=lambda row: row.name)
def test_the_two_kinds_of_forms_are_told_apart(row: Tensor):
    own = {form.shape for form in row.forms}
    assert all(form.alias in (None, *row.aliases) for form in row.foreign)
    assert not own & {form.shape for form in row.foreign if form.alias is None}
    names = [form.name for form in (*row.forms, *row.foreign)]
    assert len(names) == len(set(names))
    for form in row.foreign:
        source, _, made_of = (form.source or "").partition("/")
        assert made_of == "" or made_of in {one.name for one in (*tensor(source).forms, *tensor(source).foreign)}


def test_what_is_summed_over_the_tokens_has_no_mask():
    old = tensor("old_log_prob")
    assert old.mask_of(form_of("old_log_prob", (16,), SIZES, foreign=True)) is None
    assert old.mask_of(form_of("old_log_prob", (16, 24), SIZES, foreign=True)) == old.mask == "response_mask"
    assert tensor("prompt_ids").mask_of(tensor("prompt_ids").foreign[0]) == "attention_mask"
    assert parse_shape("[B_prompt*G]") == tensor("old_log_prob").foreign[0].dims
