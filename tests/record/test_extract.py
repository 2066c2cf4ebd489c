"""A tensor's row says what was observed."""

import zlib

import torch

from flowledger.record.extract import content_checksum, shape_checksum


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
