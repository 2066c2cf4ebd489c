"""Shape mismatch: the axis and the kind of cut are named, at the step of the order that they belong to."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.diagnose.orders import shape_mismatch, walk
from flowledger.diagnose.orders.clashes import clashes, dims_of_loss, told, within
from flowledger.diagnose.orders.dealing import dealt
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.ratios import CUT, cut_of, number_told, rearranged, shape_told
from flowledger.diagnose.planned import Planned, Summary, assumed
from flowledger.ledger.rows import FindingRow, TensorRow, TokenRow
from tests.diagnose import sick
from tests.diagnose.sick import cause, first, tensor, verdict

MASK = "B_prompt*G, S_prompt + S_resp"
BOUND = {"B_prompt": 2, "G": 4, "B": 8, "dp": 2, "cp": 2}


# --------------------------------------------------------------------------------------------------- what a factor is


def test_a_sequence_cut_where_a_batch_cut_is_expected_is_named() -> None:
    said = shape_told([4, 64], [8, 32], MASK, {"dp": 2, "cp": 2})
    assert said == "dim 1 is halved by cp, a sequence cut; expected dp, a batch cut"


@pytest.mark.parametrize(
    ("expected", "observed", "degrees", "group", "said"),
    [
        ([8, 64], [8, 16], {"cp": 4, "dp": 2}, 1, "dim 1 is divided 4-fold by cp, a sequence cut, which is not expected there"),
        ([8, 64], [8, 16], {"cp": 2, "sp": 2}, 1, "dim 1 is divided 4-fold by cp*sp, a sequence cut, which is not expected there"),
        ([4, 64], [8, 64], {"dp": 2, "tp": 4}, 1, "expected dp, a batch cut, and it is not cut so"),
        ([8, 64], [2, 64], {}, 4, "dim 0 has prompts where samples are expected: it was not repeated n = 4 times"),
        ([8, 64], [32, 64], {}, 4, "dim 0 was repeated n = 4 times once too often"),
        ([8, 64], [64, 8], {}, 1, "the dimensions stand in another order (a transpose)"),
        ([8, 64], [16, 32], {}, 1, "as many elements in another shape (a reshape)"),
        ([8, 64], [8, 63], {"dp": 2}, 4, ""),  # no factor: nothing is made up
        ([8, 64], [8], {"dp": 2}, 4, ""),
        ([8, 64], [8, 0], {"dp": 2}, 4, ""),
        ([8, 64], [8, 64], {"dp": 2}, 4, ""),
    ],
)  # fmt: skip
def test_factors_by_hand(expected, observed, degrees, group, said) -> None:
    assert shape_told(expected, observed, MASK, degrees, group) == said


@given(
    axis=st.sampled_from(["dp", "cp", "tp"]), degree=st.sampled_from([2, 3, 4, 8]), size=st.integers(1, 40),
    others=st.dictionaries(st.sampled_from(["pp", "ep"]), st.sampled_from([5, 7]), max_size=2),
)  # fmt: skip
def test_a_dimension_divided_by_a_degree_is_said_to_be_cut_by_that_axis(axis, degree, size, others) -> None:
    dims = {"dp": "B_prompt*G, H", "cp": "B_micro, S", "tp": "B_micro, V"}[axis]
    whole = [6, 6]
    at = 0 if axis == "dp" else 1
    expected, observed = list(whole), list(whole)
    expected[at], observed[at] = size * degree, size
    said = shape_told(expected, observed, dims, {axis: degree, **others})
    assert f"by {axis}, a {CUT[axis]} cut" in said and f"dim {at} " in said


@given(st.integers(2, 64), st.integers(2, 64))
def test_only_a_whole_factor_is_a_cut(degree: int, other: int) -> None:
    cut = cut_of(Fraction(other, degree), {"dp": degree})
    assert (cut is not None) == (other == degree * degree)


@given(st.permutations([3, 5, 7]))
def test_a_transpose_is_one_of_every_order_but_the_same(order: list[int]) -> None:
    assert bool(rearranged([3, 5, 7], order)) == (order != [3, 5, 7])


def test_numbers_are_told_by_axis_group_and_width() -> None:
    assert "n = 8" in number_told(10, 80, {}, 8)
    assert "dp, a batch cut" in number_told(10, 20, {"dp": 2}) and "dtype" in number_told(10, 20, {"dp": 2})
    assert number_told(10, 10.0001, {"dp": 2}) == number_told(10, 23, {"dp": 2}) == number_told(0, 5, {}) == ""


# ---------------------------------------------------------------------------------------------- what an exception says

SIZES = {"S_resp": 512, "S_prompt": 256, "S_prompt + S_resp": 768, "B_prompt*G": 64, "B_prompt": 8, "G": 8, "H": 1024}
TEXTS = {
    "The size of tensor a (512) must match the size of tensor b (768) at non-singleton dimension 1":
        ("mask", ("768 (S_prompt + S_resp)", "512 (S_resp)")),
    "The size of tensor a (64) must match the size of tensor b (8) at non-singleton dimension 0":
        ("logical", ("n = 8", "prompts on one side")),
    "The size of tensor a (384) must match the size of tensor b (768) at non-singleton dimension 1":
        ("local", ("one side is cut by cp, a sequence cut",)),
    "The expanded size of the tensor (100) must match the existing size (37) at non-singleton dimension 1": ("mask", ()),
    "shape '[4, 16]' is invalid for input of size 60": ("mask", ("60 elements do not fill [4, 16]",)),
    "mat1 and mat2 shapes cannot be multiplied (64x1024 and 512x4096)": ("operator", ("width 1024", "height 512")),
    "only support equal chunk. Got size of DataProto 2 and chunk 4.": ("logical", ("2 cannot be dealt out to 4",)),
    "Sizes of tensors must match except in dimension 0. Expected size 512 but got size 768 for tensor number 1 in the list.":
        ("mask", ("512 (S_resp)",)),
    "stack expects each tensor to be equal size, but got [512] at entry 0 and [256] at entry 3": ("local", ("cp",)),
}  # fmt: skip


@pytest.mark.parametrize("text", list(TEXTS))
def test_two_sizes_of_an_exception_are_named_and_belong_to_a_step(text: str) -> None:
    (clash,) = clashes(f"RuntimeError: {text}")
    step, said = told(clash, SIZES, {"dp": 4, "cp": 2}, 8)
    assert step == TEXTS[text][0]
    assert all(word in said for word in TEXTS[text][1])


def test_a_text_without_two_sizes_has_no_clash() -> None:
    assert not list(clashes("KeyError: 'reward'\nexpected 3 files"))


# ------------------------------------------------------------------------------------------------------------- ledgers


@pytest.mark.parametrize("stated", ["cp: Shard(1)", "dp: Shard(0)"])
def test_a_mask_cut_along_the_sequence_where_the_batch_is_cut_fails_at_the_local_shape(
    tmp_path: Path, stated: str
) -> None:
    """Whether the rank says how it is cut, or says what it should be: the shape itself tells."""
    ranks = [[], [], [], []]
    for rank, rows in enumerate(ranks):
        for name in ("position_ids", "full_sequence", "attention_mask"):
            rows.append(
                tensor(name, MASK, [4, 64], logical_shape=[8, 64], stage="old_log_prob", rank=rank, placement=["dp: Shard(0)"])
            )  # fmt: skip
        rows.append(tensor("attention_mask", MASK, [8, 32], logical_shape=[8, 64], rank=rank, placement=[stated]))
    path = sick.run(tmp_path / "run", ranks, mesh={"dp": 2, "cp": 2}, bindings=BOUND)
    met = sick.told(path)
    assert first(met) == "shape_mismatch.local"
    assert "dim 1 is halved by cp, a sequence cut; expected dp, a batch cut" in cause(met)
    assert "attention_mask in update_actor" in cause(met)
    assert met.cause[1].confidence >= 0.8


def test_the_same_tensors_cut_as_they_should_be_fail_nowhere(tmp_path: Path) -> None:
    ranks = [
        [tensor(name, MASK, [4, 64], stage="old_log_prob", rank=rank, placement=["dp: Shard(0)"])
         for name in ("position_ids", "full_sequence", "attention_mask")]
        for rank in range(4)
    ]  # fmt: skip
    path = sick.run(tmp_path / "run", ranks, mesh={"dp": 2, "cp": 2}, bindings=BOUND)
    met = sick.told(path, order="shape_mismatch")
    assert first(met) is None
    assert verdict(met, "shape_mismatch.logical") == verdict(met, "shape_mismatch.local") == "pass"


def test_prompts_that_were_not_repeated_fail_at_the_logical_shape(tmp_path: Path) -> None:
    rows = [tensor("reward", "B_prompt*G", [2], dtype="float32", stage="reward", access="write")]
    path = sick.run(tmp_path / "run", [rows], bindings=BOUND | {"dp": 1, "cp": 1})
    met = sick.told(path)
    assert first(met) == "shape_mismatch.logical"
    assert "B_prompt*G is 8 by the configuration, and 2 was observed" in cause(met)


def test_a_prompt_token_in_the_loss_fails_at_the_mask(tmp_path: Path) -> None:
    token = TokenRow(sample_id="0", position=0, step=0, attention_mask=1, response_mask=0, loss_mask=1)
    met = sick.told(sick.run(tmp_path / "run", [[token]], bindings={}))
    assert first(met) == "shape_mismatch.mask"
    assert "sample 0 position 0" in cause(met)


def test_a_crash_names_the_dimensions_that_the_run_binds(tmp_path: Path) -> None:
    text = "RuntimeError: The size of tensor a (8) must match the size of tensor b (2) at non-singleton dimension 0"
    rows = [
        FindingRow(
            id="call_failed", verdict="fail", severity="error", stage="advantage", message=f"advantage failed: {text}"
        )
    ]
    met = sick.told(sick.run(tmp_path / "run", [rows], bindings=BOUND | {"dp": 1, "cp": 1}, state="crashed"))
    assert [walked.order.name for walked in met.walked] == ["shape_mismatch"]
    assert first(met) == "shape_mismatch.logical"
    assert "prompts on one side, their samples on the other" in cause(met) and "advantage" in cause(met)


# ------------------------------------------------------------------------------------------ planned beside recorded


def plan(*, mesh: dict[str, int], group: int = 4, cut: int = 2) -> Planned:
    rows = 2 * group
    shape = TensorRow(
        tensor_name="old_log_prob", stage="old_log_prob", dims="[B_prompt*G, S_resp]", logical_shape=[rows, 32], access="write",
        local_shape=[rows // cut, 32], placement=["dp: Shard(0)"], dtype="float32", rank=0, rank_count=4, step=1,
    )  # fmt: skip
    prompts = TensorRow(
        tensor_name="prompt_length", stage="prompt", dims="[B_prompt]", logical_shape=[2], local_shape=[2], access="write",
        placement=[], dtype="int64", rank=0, rank_count=4, step=1,
    )  # fmt: skip
    summary = Summary(framework="flowledger", model="hand", world=4, mesh=mesh)
    return Planned(run="hand", summary=summary, chain=[], checks=[], rows=[], shapes=[prompts, shape])


def recorded(path: Path, local: list[int], placement: list[str], logical: list[int]) -> Path:
    rows = [
        [
            sick.span(1, "step", 0, 1, step=0, stage=None, span_kind="host"),
            tensor("old_log_prob", "B_prompt*G, S_resp", local, logical_shape=logical, placement=placement, dtype="float32",
                   stage="old_log_prob", access="write", rank=rank),
        ]
        for rank in range(4)
    ]  # fmt: skip
    return sick.run(path, rows, mesh={"dp": 2, "cp": 2}, framework="flowledger", bindings={"G": 4, "B_prompt": 2})


def test_a_plan_beside_the_run_tells_which_axis_has_cut_what(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", [8, 16], ["cp: Shard(1)"], [8, 32])
    met = sick.told(path, planned=plan(mesh={"dp": 2, "cp": 2}), order="shape_mismatch")
    assert first(met) == "shape_mismatch.local"
    assert "old_log_prob in old_log_prob: dim 1 is halved by cp, a sequence cut; expected dp, a batch cut" in cause(met)
    assert any("recorded [8, 16] of [8, 32], planned [4, 32] of [8, 32]" in line for line in met.first[1].evidence)


def test_a_plan_of_another_setting_fails_at_the_logical_shape_and_of_another_mesh_at_the_last_step(
    tmp_path: Path,
) -> None:
    path = recorded(tmp_path / "run", [4, 32], ["dp: Shard(0)"], [8, 32])
    same = sick.told(path, planned=plan(mesh={"dp": 2, "cp": 2}), order="shape_mismatch")
    assert first(same) is None and verdict(same, "shape_mismatch.operator") == "pass"
    other = sick.told(path, planned=plan(mesh={"dp": 2, "cp": 2}, group=8), order="shape_mismatch")
    assert first(other) == "shape_mismatch.logical"
    assert cause(other) == "B_prompt*G is 16 by the configuration and 8 in the run"
    mesh = sick.told(path, planned=plan(mesh={"dp": 4, "cp": 1}, cut=4), order="shape_mismatch")
    assert first(mesh) == "shape_mismatch.operator" and cause(mesh) == "dp is 4 in the plan and 2 in the run"


@pytest.mark.parametrize(("rows", "chunks", "group", "prompts", "fix", "says"), [
    (500, 8, 5, 100, ("data.train_batch_size", "100", "96 or 104"), "500 rows are 100 prompts * n = 5"),  # 480 and 520
    (60, 8, 4, 15, ("data.train_batch_size", "15", "14 or 16"), "a multiple of 2"),
    (100, 8, 5, 100, ("data.train_batch_size", "100", "96 or 104"), "these are the prompts before"),
    (501, 8, 5, 100, ("rows of this batch", "501", "496 or 504"), "no prompts * n = 5"),
    (500, 8, None, None, ("rows of this batch (prompts * n)", "500", "496 or 504"), "so that n counts too"),
    (3, 8, 1, 3, ("data.train_batch_size", "3", "8"), "such as 8"),
])  # fmt: skip
def test_what_to_change_of_a_batch_that_does_not_divide_counts_n(
    rows: int, chunks: int, group: int | None, prompts: int | None, fix: tuple[str, str, str], says: str
) -> None:
    change = dealt(rows, chunks, group=group, prompts=prompts, framework="verl")
    assert (change.fix["key"], change.fix["from"], change.fix["to"]) == fix and says in change.why
    for text in change.fix["to"].split(" or "):
        made = (
            int(text) * (group if change.fix["key"].startswith("data") and rows != prompts else 1)
            if group
            else int(text)
        )
        assert made % chunks == 0


def test_a_crash_over_unequal_parts_has_a_change_in_prompts() -> None:
    end = FindingRow(
        id="crash",
        verdict="fail",
        message="AssertionError: only support equal chunk. Got size of DataProto 500 and chunk 8.",
    )
    seen = Evidence(findings=(end,), planned_config={"rollout": {"samples_per_prompt": 5}})
    answer = shape_mismatch.logical(seen)
    assert answer.fix == {"key": "prompts of a step", "from": "100", "to": "96 or 104"}
    assert "n = 5" in answer.evidence[0]


def test_a_loss_has_no_prompt_dimension_and_a_sentence_has_its_stage_once() -> None:
    text = "The size of tensor a (256) must match the size of tensor b (16) at non-singleton dimension 1"
    words = f"RuntimeError: {text} (in update_actor)\nframe trl/trainer/grpo_trainer.py:2210 in _compute_loss"
    (clash,) = clashes(words)
    assert clash.text == f"RuntimeError: {text}"
    assert "S_prompt" in told(clash, SIZES, {}, 8)[1]
    there = within(SIZES, dims_of_loss(words, "update_actor"))
    assert "S_resp" in there and not any("S_prompt" in name or name == "H" for name in there)
    assert told(clash, there, {}, 8) == ("mask", "")
    assert within(SIZES, dims_of_loss(text, "rollout")) == SIZES


def test_a_size_that_nobody_has_set_is_never_sure() -> None:
    text = "The size of tensor a (512) must match the size of tensor b (768) at non-singleton dimension 1"
    row = FindingRow(id="crash", verdict="fail", severity="critical", stage="rollout", message=f"RuntimeError: {text}")
    found = {}
    for taken in (frozenset[str](), frozenset({"S_resp"})):
        made = Evidence(findings=(row,), assumed=taken, told_sizes=SIZES)
        found[taken] = walk.diagnose(made).cause[1].confidence
    assert list(found.values()) == [0.75, 0.5]


def test_only_what_no_key_and_no_default_of_a_framework_says_is_assumed() -> None:
    sources = {
        "data.max_prompt_tokens": "trl 1.16", "rollout.max_response_tokens": "max_completion_length@run.sh:3",
        "data.prompts_per_step": "tiny.yaml:4", "rollout.samples_per_prompt": "num_generations default@trl 1.16",
    }  # fmt: skip
    assert assumed(sources.__getitem__) == {"S_prompt"}
