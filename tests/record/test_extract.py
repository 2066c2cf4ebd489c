"""A tensor's row says what was observed."""

import math
import random
import zlib

import pytest
import torch

from flowledger.flow.mesh import mesh
from flowledger.flow.tensors import form_of, tensors
from flowledger.record import extract
from flowledger.record.extract import Templates, Where, content_checksum, kept, shape_checksum
from flowledger.record.place import Place


def test_a_row_has_dims_from_the_flow_and_sizes_from_the_tensor(record, job):
    with record() as rows:
        job.run()
    (row,) = rows.of("tensors", tensor_name="response_mask", stage="rollout")
    assert (row.dims, row.logical_shape, row.local_shape) == ("B_prompt*G, S_resp", [4, 3], [4, 3])
    assert (row.dtype, row.numel, row.bytes, row.access) == ("int64", 12, 96, "write")
    assert (row.padding, row.kind, row.lifetime, row.mask_ratio) == ("right", "batch", "step", 9 / 12)


def test_a_masked_tensor_names_its_mask_with_shape_and_kept_fraction(record, job):
    with record() as rows:
        job.run()
    (row,) = rows.of("tensors", tensor_name="full_sequence", stage="rollout")
    assert (row.mask, row.mask_shape, row.mask_ratio) == ("attention_mask", [4, 5], 15 / 20)


def test_a_wrong_size_keeps_its_observed_shape(record, job):
    with record(bindings={"B_prompt": 2, "G": 3, "B": 6}) as rows:
        job.run()
    (row,) = rows.of("tensors", tensor_name="response_mask", stage="rollout")
    assert row.logical_shape == [4, 3]


def test_models_and_optimizers_become_one_row_a_layer(record, job):
    with record() as rows:
        job.run(2)
    params = {row.layer: row.numel for row in rows.of("tensors", tensor_name="params", step=0)}
    # layer: 8*32 + 32 + 32*8 + 8; the rest: embedding 16*8, head 8*16 + 16
    assert params == {0: 552, 1: 552, None: 272}
    states = rows.of("tensors", tensor_name="optimizer_state", step=1, access="read")
    assert sorted((row.layer, row.numel) for row in states if row.layer is not None) == [(0, 552)] * 2 + [(1, 552)] * 2
    assert rows.of("tensors", tensor_name="optimizer_state", step=0, access="read") == []


def test_the_shape_checksum_is_crc32_of_name_dims_shape_and_dtype():
    assert shape_checksum("reward", "B", [4], "float32") == zlib.crc32(b"reward|B|4|float32")
    assert shape_checksum("reward", "B", [4], "float32") != shape_checksum("reward", "B", [8], "float32")


def test_the_content_checksum_sees_values_and_not_layout():
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert content_checksum(value) == content_checksum(value.t().contiguous().t())
    assert content_checksum(value) != content_checksum(value + 1)


SIZES = {"B_prompt": 5, "G": 4, "S_prompt": 9, "V": 99}


def _templates(**degrees: int) -> Templates:
    train = mesh(**degrees)
    place = Place(rank=0, meshes={"train": train, "rollout": mesh(dp=train.size)} if degrees else {})
    return Templates(bindings=SIZES, rank=0, rank_count=train.size, place=place, foreign=True)


@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_row_is_that_of_its_own_shape_whatever_shapes_came_before(degrees):
    kept, lot = _templates(**degrees), random.Random(0)
    asked_for = [
        1,
        2,
        3,
        4,
        5,
        8,
        9,
        10,
        12,
        20,
        33,
        99,
        108,
    ]  # sizes of the flow's symbols, of a rank's share, and others
    for name, facts in tensors().items():
        for dims in sorted({len(form.dims) for form in (*facts.forms, *facts.foreign)}):
            for within in (None, "micro_batch", "decode"):
                where = Where("update_actor", "read", within)
                for _ in range(12):
                    shape = tuple(lot.choice(asked_for) for _ in range(dims))
                    fresh = _templates(**degrees).row(name, shape, "torch.float32", 4, where)
                    assert kept.row(name, shape, "torch.float32", 4, where) == fresh
                    assert (fresh.local_shape, fresh.bytes) == (list(shape), 4 * math.prod(shape))


def test_lengths_that_no_form_asks_for_are_worked_out_once(monkeypatch):
    """Every micro-batch of a dynamic batch may have a length of its own."""
    asked = []
    monkeypatch.setattr(extract, "form_of", lambda *at, **how: asked.append(at) or form_of(*at, **how))
    templates = _templates()
    rows = [
        templates.row("response_ids", (2, length), torch.int64, 8, Where("update_actor", "read", "micro_batch"))
        for length in range(100, 200)
    ]
    assert len(asked) == 1
    assert {row.dims for row in rows} == {"B_micro, S_resp"}
    assert [row.bytes for row in rows] == [2 * 8 * length for length in range(100, 200)]
    assert len({row.shape_checksum for row in rows}) == 100


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_kept_elements_of_a_mask_are_counted_in_any_dtype_and_layout(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(dtype)
    assert (kept(mask), kept(mask.t()), kept(mask[:, 1:])) == (3, 3, 1)
