"""The replayed caching allocator: rules of torch's own, and what a timeline is expected to reserve."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.engine import Engine
from flowledger.plan.allocator import MIB, Pool
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.job import Job
from flowledger.plan.reserved import replay, reserved
from flowledger.plan.timeline import BLOCK, Live, Timeline
from tests.plan.fsdp_runs import architecture


def test_segments_by_size() -> None:
    """c10/cuda/CUDACachingAllocator.cpp: kSmallBuffer 2 MiB, kLargeBuffer 20 MiB, kMinLargeAlloc 10 MiB, kRoundLarge 2 MiB."""
    for wanted, segment in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ):
        pool = Pool()
        pool.take(wanted)
        assert pool.reserved == segment


def test_requests_round_to_512_bytes_and_share_a_segment() -> None:
    pool = Pool()
    for _ in range(4):
        pool.take(513)
    assert (pool.allocated, pool.reserved) == (4 * 1024, 2 * MIB)


def test_a_freed_block_is_used_again_and_a_larger_one_is_split() -> None:
    pool = Pool()
    first = pool.take(64 * MIB)
    pool.give(first)
    pool.take(40 * MIB)
    pool.take(24 * MIB)
    assert pool.reserved == 64 * MIB


def test_less_than_a_mebibyte_is_not_split_off() -> None:
    pool = Pool()
    pool.give(pool.take(64 * MIB))
    pool.take(63 * MIB + 512 * 1024)
    assert pool.allocated == 64 * MIB


def test_neighbours_merge_and_a_hole_that_is_too_small_does_not_serve() -> None:
    pool = Pool()
    blocks = [pool.take(size * MIB) for size in (32, 32, 32)]
    pool.give(blocks[0])
    pool.give(blocks[2])
    pool.take(48 * MIB)  # two holes of 32 MiB in segments of their own
    assert pool.reserved == 3 * 32 * MIB + 48 * MIB
    other = Pool()
    other.give(other.take(96 * MIB))
    parts = [other.take(32 * MIB) for _ in range(3)]
    for part in (parts[1], parts[0], parts[2]):
        other.give(part)
    other.take(96 * MIB)
    assert other.reserved == 96 * MIB


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), min_size=1, max_size=60))
def test_what_is_held_is_never_more_than_what_is_reserved(requests: list[tuple[int, bool]]) -> None:
    pool, held, wanted = Pool(), [], []
    for size, gives in requests:
        held.append(pool.take(size))
        wanted.append(size)
        if gives:
            pool.give(held.pop(0))
            wanted.pop(0)
        assert sum(wanted) <= pool.allocated <= pool.reserved
    for block in held:
        pool.give(block)
    assert pool.allocated == 0


def small(device: str | None = "H100", *, expandable: bool = False) -> Job:
    engine = Engine(param_dtype="bfloat16", expandable_segments=expandable)
    shape = architecture(hidden=1024, ffn=4096, heads=8, head_dim=128, layers=4)
    return Job(architecture=shape, engine=engine, world=1, device=device, sequences=1, tokens=4096, longest=4096)


def test_only_a_gpu_without_expandable_segments_fragments() -> None:
    full = fsdp.timeline(small())
    peak = full.peak(block=BLOCK).bytes
    assert reserved(full, small(None)) == reserved(full, small(expandable=True)) == peak
    assert peak < reserved(full, small()) < replay(full)


def test_streams_do_not_share_blocks() -> None:
    """A gather's buffer cannot take what activations gave back: 64 MiB twice, though never at once."""
    lives = (
        Live(name="activations", kind="activation", bytes=64 * MIB, born=0, dies=0, label="x"),
        Live(
            name="comm_buffer",
            kind="comm_buffer",
            bytes=64 * MIB,
            born=1,
            dies=1,
            label="layer 1: output of the gather",
        ),
    )
    assert replay(Timeline(("a", "b", "c"), lives)) == 128 * MIB
