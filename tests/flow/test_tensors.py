"""The table of tensors is complete, true to the words, and free of contradictions."""

import re

import pytest

from flowledger.flow.axes import AXES
from flowledger.flow.dims import SYMBOLS, spell
from flowledger.flow.errors import BadInput
from flowledger.flow.kinds import KINDS
from flowledger.flow.mesh import parse_placement
from flowledger.flow.stages import PHASES, ROLES, stages
from flowledger.flow.tensors import PADDINGS, form_of, stage_of, tensor, tensors

# The closed list, written down here a second time on purpose: adding a tensor is a decision.
NAMES = [
    "prompt_ids",
    "attention_mask",
    "position_ids",
    "prompt_length",
    "sample_id",
    "group_id",
    "response_ids",
    "response_mask",
    "full_sequence",
    "generation_metadata",
    "finish_reason",
    "rollout_log_prob",
    "rollout_is_weights",
    "logits",
    "reward_components",
    "baseline_reward",
    "reward",
    "token_level_reward",
    "old_log_prob",
    "sum_pi_squared",
    "ref_log_prob",
    "new_log_prob",
    "values",
    "advantage",
    "advantages",
    "returns",
    "kl",
    "loss_mask",
    "loss_mat",
    "entropy",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "value_loss",
    "grad_norm",
    "hidden_states",
    "activations",
    "kv_cache",
    "params",
    "grads",
    "optimizer_state",
    "comm_buffer",
    "updated_params",
]

# What the plan of the article gives as typical shapes, in its own symbols.
TYPICAL = {
    "prompt_ids": "[B_prompt, S_prompt]",
    "response_ids": "[B_prompt*G, S_resp]",
    "full_sequence": "[B_prompt*G, S_prompt + S_resp]",
    "response_mask": "[B_prompt*G, S_resp]",
    "rollout_log_prob": "[B_prompt*G, S_resp]",
    "old_log_prob": "[B_prompt*G, S_resp]",
    "advantages": "[B_prompt*G, S_resp]",
    "advantage": "[B_prompt*G]",
    "reward": "[B_prompt*G]",
    "baseline_reward": "[B_prompt]",
    "sum_pi_squared": "[B_prompt*G, S_resp]",
    "rollout_is_weights": "[B_prompt*G, S_resp]",
    "token_level_reward": "[B_prompt*G, S_resp]",
}

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def every_place():
    for row in tensors().values():
        for place in (*row.written_by, *row.readers, *row.released_by):
            yield row.name, place


def test_the_list_of_tensors_is_the_closed_list():
    assert sorted(tensors()) == sorted(NAMES)


@pytest.mark.parametrize(("name", "shape"), TYPICAL.items())
def test_the_main_form_is_the_typical_shape(name, shape):
    assert spell(tensor(name).dims) == shape


def test_group_and_sample_forms_of_the_reward_are_rows_of_their_own_with_the_reshape_between_them():
    sample, group = tensor("reward").forms
    assert (sample.shape, group.shape, group.source) == ("[B_prompt*G]", "[B_prompt, G]", "reward/sample")


def test_the_per_sample_advantage_broadcasts_to_the_per_token_one():
    form = tensor("advantages").forms[0]
    assert (form.source, form.broadcast) == ("advantage", "S_resp")


def test_the_greedy_reward_of_a_prompt_repeats_for_each_of_its_samples():
    form = tensor("baseline_reward").forms[1]
    assert (form.shape, form.source, form.broadcast) == ("[B_prompt*G]", "baseline_reward/prompt", "G")


@pytest.mark.parametrize("row", tensors().values(), ids=lambda row: row.name)
def test_every_word_of_a_row_is_known(row):
    assert row.kind in KINDS
    assert row.mask is None or row.mask in tensors()
    role, _, owner_stage = row.owner.partition("@")
    assert role in ROLES and owner_stage in stages()
    for form in row.forms:
        assert form.padding in PADDINGS
        assert form.broadcast is None or form.broadcast in SYMBOLS
        assert set(form.placement or {}) <= set(AXES)
    assert set(row.placement) <= set(AXES)


@pytest.mark.parametrize("row", tensors().values(), ids=lambda row: row.name)
def test_every_placement_cuts_a_dimension_that_the_form_has(row):
    cases = [(form, row.placement_of(form)) for form in row.forms]
    cases += [(row.forms[0], placed) for placed in row.variants.values()]
    for form, placed in cases:
        for text in placed.values():
            dim = parse_placement(text).dim
            assert dim is None or dim < len(form.dims), f"{form.name} {form.shape}: {text}"


@pytest.mark.parametrize("row", tensors().values(), ids=lambda row: row.name)
def test_forms_of_one_tensor_differ_in_their_dims(row):
    shapes = [form.shape for form in row.forms]
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("row", [row for row in tensors().values() if row.mask], ids=lambda row: row.name)
def test_a_mask_has_the_shape_of_what_it_masks(row):
    assert row.forms[0].shape in {form.shape for form in tensor(row.mask).forms}


@pytest.mark.parametrize("row", tensors().values(), ids=lambda row: row.name)
def test_every_source_names_a_tensor_and_a_form_that_exist(row):
    for form in row.forms:
        for source in (form.source or "").split(", ") if form.source else ():
            name, _, made_of = source.partition("/")
            assert name in tensors()
            assert not made_of or made_of in {other.name for other in tensor(name).forms}


@pytest.mark.parametrize("row", tensors().values(), ids=lambda row: row.name)
def test_every_row_speaks_both_languages(row):
    assert CHINESE.search(row.purpose_zh) and CHINESE.search(row.common_bug_zh)
    assert not CHINESE.search(row.purpose + row.common_bug)
    assert row.purpose.endswith(".") and len(row.common_bug) > 40


def test_an_alias_means_one_tensor_only():
    aliases = [alias for row in tensors().values() for alias in row.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(tensors())


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("old_logprob", "old_log_prob"),  # the plan of the article
        ("responses", "response_ids"),  # verl
        ("old_per_token_logps", "old_log_prob"),  # TRL
        ("completion_ids", "response_ids"),
        ("base_action_log_probs", "ref_log_prob"),  # OpenRLHF
        ("loss_masks", "loss_mask"),  # slime
    ],
)
def test_names_of_frameworks_are_found(foreign, ours):
    assert tensor(foreign).name == ours


def test_an_unknown_tensor_is_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match="old_log_prob"):
        tensor("old_log_probb")


@pytest.mark.parametrize(("name", "place"), list(every_place()))
def test_every_place_is_a_stage_and_a_phase_of_it(name, place):
    stage, _, phase = place.partition("@")[0].partition("/")
    assert stage in stages()
    assert not phase or (phase in PHASES and phase in stages()[stage].phases)


def test_a_tensor_of_a_step_is_freed_no_earlier_than_its_last_reader():
    position = {name: number for number, name in enumerate(stages())}
    for row in tensors().values():
        if row.lifetime != "step":
            continue
        last = max((position[stage_of(place)] for place in (row.producer, *row.readers)), default=-1)
        assert position[stage_of(row.freed_by)] >= last, row.name


def test_only_persistent_tensors_are_never_freed_and_read_in_the_next_step():
    for row in tensors().values():
        assert (row.freed_by == "never") == (row.lifetime == "persistent"), row.name
        if any(place.endswith("@previous") for place in row.readers):
            assert row.lifetime == "persistent", row.name


def test_form_of_picks_by_rank_then_by_size():
    sizes = {"B_prompt": 3, "G": 2, "S_prompt": 5, "S_resp": 4, "B_micro": 2}
    assert form_of("reward", (3, 2), sizes).name == "group"
    assert form_of("attention_mask", (6, 9), sizes).name == "full"
    assert form_of("new_log_prob", (2, 4), sizes).name == "micro"
    assert form_of("attention_mask", (7, 7), sizes).name == "prompt"  # a wrong size still has a name
    assert form_of("reward", (1, 1, 1), sizes) is None


def test_a_tensor_that_is_put_together_is_the_step_s_and_no_micro_batch() -> None:
    """As wide as the step where a part was due: the other form that would fit is met within micro-batches alone."""
    half = {"share": lambda placement, at, dim, sizes: dim.resolve(sizes) // (1 if at else 2)}
    bound = {"B_prompt": 4, "G": 4}
    names = {rows: form_of("loss_mask", (rows, 7), bound, **half) for rows in (8, 16, 5)}
    assert {rows: form and form.name for rows, form in names.items()} == {8: "token", 16: "token", 5: "micro"}
    inside = form_of("loss_mask", (8, 7), bound, within="micro_batch", **half)
    assert inside is not None and inside.name == "micro"


def test_of_two_forms_that_fit_the_place_decides() -> None:
    # As many samples in the micro-batch as prompts in the step: [4, 23] could be either.
    bound = {"B_prompt": 4, "G": 4}
    outside = form_of("attention_mask", (4, 23), bound)
    inside = form_of("attention_mask", (4, 23), bound, within="micro_batch")
    assert outside is not None and outside.shape == "[B_prompt, S_prompt]"
    assert inside is not None and inside.shape == "[B_micro, S_prompt + S_resp]"
