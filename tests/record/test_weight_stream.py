"""What passes from trainer to engine is counted and neither changed nor held back."""

import struct
import zlib
from contextlib import suppress

import torch

from flowledger.record.weight_stream import Passed, checksum, counted, passing


def told(weights):
    numbers = {}
    passed = list(passing(iter(weights), lambda work, *args: work(*args), numbers.__setitem__))
    return passed, numbers


WEIGHTS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(100, dtype=torch.bfloat16))]


def test_the_stream_is_the_same_and_its_numbers_are_those_of_the_tensors():
    passed, numbers = told(WEIGHTS)
    assert all(one[1] is other[1] for one, other in zip(passed, WEIGHTS, strict=True))
    assert (numbers["weight_sync/sent_tensors"], numbers["weight_sync/sent_bytes"]) == (2, 6 * 4 + 100 * 2)


def test_buckets_in_another_order_add_up_to_what_was_sent():
    _, sent = told(WEIGHTS)
    received = []
    for bucket in (WEIGHTS[1:], WEIGHTS[:1]):
        passed = Passed()
        for name, tensor in bucket:
            passed.add(name, tensor.clone())
        passed.tell(lambda name, value: received.append((name, value)), "received")
    total = sum(value for name, value in received if name.endswith("checksum")) % (1 << 32)
    assert total == sent["weight_sync/sent_checksum"]


def test_a_changed_number_name_or_shape_is_another_checksum():
    tensor = torch.arange(6.0)
    changed = [("a", tensor + 1e-3), ("b", tensor), ("a", tensor.view(2, 3))]
    assert len({checksum("a", tensor), *(checksum(name, one) for name, one in changed)}) == 4


def test_a_large_tensor_is_looked_at_in_few_places_also_where_it_is_not_contiguous():
    large = torch.zeros(10_000, 10)
    seen = checksum("a", large.t())
    large[5, 5] = 1  # between the places
    assert checksum("a", large.t()) == seen
    large += 1
    assert checksum("a", large.t()) != seen


def test_who_gives_up_is_told_of_what_has_passed():
    numbers = {}
    stream = passing(iter(WEIGHTS), lambda work, *args: work(*args), numbers.__setitem__)
    next(stream)
    stream.close()
    assert numbers["weight_sync/sent_tensors"] == 1


def test_what_can_be_gone_through_twice_stays_so_and_what_is_no_pair_passes():
    numbers = {}

    def guard(work, *args):
        with suppress(Exception):
            return work(*args)

    weights = dict(WEIGHTS).items()
    result = (weights, None)
    assert counted(result, guard, numbers.__setitem__) is result and numbers["weight_sync/sent_tensors"] == 2
    odd = [("a", WEIGHTS[0][1], "spec"), "a", ["b", WEIGHTS[1][1]]]
    stream, config = counted((iter(odd), "config"), guard, numbers.__setitem__)
    assert all(one is other for one, other in zip(stream, odd, strict=True)) and config == "config"
    assert numbers["weight_sync/sent_tensors"] == 1
    assert counted(None, guard, numbers.__setitem__) is None


class Elsewhere:
    """A tensor on a device, which nobody may wait for."""

    is_cpu = False

    def numel(self):
        return 6

    def element_size(self):
        return 2


def test_what_lies_on_a_device_is_counted_and_not_looked_at():
    told_of = {}
    list(passing([*WEIGHTS, ("c", Elsewhere())], lambda work, *args: work(*args), told_of.__setitem__))
    assert told_of == {"weight_sync/sent_tensors": 3, "weight_sync/sent_bytes": 24 + 200 + 12}


def test_numbers_of_any_kind_and_shape_have_a_checksum():
    kinds = (
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bool),
        torch.ones(4, dtype=torch.float8_e4m3fn),
    )
    assert len({checksum("a", one) for one in kinds}) == 4
    turned = torch.arange(600.0).view(20, 30).t()
    assert checksum("a", turned) == checksum("a", turned.contiguous())


def test_it_is_the_crc32_of_name_shape_and_evenly_spread_elements():
    assert checksum("a", torch.arange(6.0).view(2, 3)) == zlib.crc32(b"a|(2, 3)|" + struct.pack("<6f", *range(6)))
    long = torch.arange(1000, dtype=torch.int32)[100:]  # 900 elements: every 14th, 64 of them
    assert checksum("b", long) == zlib.crc32(b"b|(900,)|" + struct.pack("<64i", *range(100, 100 + 14 * 64, 14)))
    half = torch.arange(4, dtype=torch.bfloat16)  # numpy has none: the upper halves of float32
    assert checksum("c", half) == zlib.crc32(b"c|(4,)|" + b"".join(struct.pack("<f", one)[2:] for one in range(4)))
