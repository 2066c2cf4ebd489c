"""Snapshots of torch's allocator: read as plain data and nothing else, and what was in use at the peak, by kind and stage.

The history is that of a played allocator, which knows what was in use at every moment; sums are also those that torch's own
`_memory_viz` makes of the same snapshot.
"""

import gzip
import io
import os
import pickle
import pickletools
import re
import struct

import pytest
from allocator_on_paper import SITE, START, Paper, frames
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_import_events import CHANGES, changed

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.record.importers import memory_snapshot, restricted_pickle
from flowledger.record.importers.file_ranks import rank_in, step_in
from flowledger.record.importers.formats import format_of
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.restricted_pickle import Torn, load
from flowledger.record.importers.source import Source

MIB, GIB = 1 << 20, 1 << 30
MODULE = SITE + "torch/nn/modules/module.py:"
FORWARD = (SITE + "torch/nn/modules/linear.py:forward", MODULE + "_call_impl")
LOADED = (MODULE + "convert", MODULE + "_apply", "train.py:main")
UPDATE = SITE + "verl/workers/actor/dp_actor.py:update_policy"
MOMENTS = (SITE + "torch/optim/adamw.py:_init_group", SITE + "torch/optim/optimizer.py:wrapper", UPDATE)
CACHE = (SITE + "vllm/v1/worker/gpu_model_runner.py:initialize_kv_cache_tensors",)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots") / "snapshot.pickle"


def read(place, snapshot=None, *, protocol=4):
    if snapshot is not None:
        place.write_bytes(snapshot if isinstance(snapshot, bytes) else pickle.dumps(snapshot, protocol))
    notes = Notes()
    return list(memory_snapshot.read(Source(place), notes)), notes


def memory(rows, instant):
    """kind -> bytes of a moment; `total` too."""
    return {row.kind: row.allocated for row in rows if row.table == "memory" and row.instant == instant}


def total(rows, instant):
    (row,) = [row for row in rows if row.table == "memory" and row.instant == instant and row.kind == "total"]
    return row


def loaded(data, size=1 << 20, made=None):
    return load((data[at : at + size] for at in range(0, len(data), size)), "it", made)


# ---------------------------------------------------------------- plain data

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
    max_leaves=25,
)  # fmt: skip


@settings(deadline=2000, max_examples=60)
@given(PLAIN, st.integers(3, 5), st.integers(1, 40))  # protocol 2 has no bytes: Python then writes a call
def test_plain_data_is_read_as_python_reads_it(value, protocol, size):
    assert loaded(pickle.dumps(value, protocol), size) == value


def test_long_lists_shared_parts_and_large_numbers():
    shared = {"line": 3}
    value = {
        "a": [{"n": n, "shared": shared} for n in range(3000)],
        "b": list(range(-70000, 70000, 7)),
        "c": ["x" * 70000] * 2,
    }
    for protocol in (2, 4, 5):
        found = loaded(pickle.dumps(value, protocol), 4096)
        assert found == value and found["a"][0]["shared"] is found["a"][2999]["shared"]


class Calls:
    """What an attacker writes: a pickle that runs a command when Python reads it."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_command_is_not_run_and_is_named(place, protocol):
    trap = place.with_name("trap")
    snapshot = {"segments": [], "device_traces": [[Calls(f"touch {trap}")]]}
    for found in (Calls(f"touch {trap}"), snapshot):
        with pytest.raises(BadInput) as error:
            read(place, found, protocol=protocol)
        named = "(GLOBAL|STACK_GLOBAL) at byte" if protocol or found is not snapshot else "DICT|GLOBAL|PUT"
        assert re.search(named, str(error.value)) and "\n" not in str(error.value) and str(place) in str(error.value)
    assert not trap.exists()
    if protocol:
        assert "posix.system" in str(error.value) and "nothing was run" in str(error.value)
    pickle.loads(pickle.dumps(Calls(f"touch {trap}"), protocol))
    assert trap.exists()  # so the trap is one
    trap.unlink()


def test_every_instruction_that_is_not_plain_data_is_refused_by_name():
    """Of all that Python knows, by its own table; those that read are the plain ones."""
    refused = set()
    for one in pickletools.opcodes:
        try:
            loaded(b"\x80\x04" + one.code.encode("latin1") + bytes(64))
        except BadInput as error:
            if (found := re.search(r"\(([A-Z0-9_]+) at byte 2\)", str(error))) is not None:
                assert found[1] == one.name
                refused.add(one.name)
        except Torn:
            pass
    calls = {
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "REDUCE",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
        "PERSID",
        "BINPERSID",
    }
    sets = {"EMPTY_SET", "ADDITEMS", "FROZENSET", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
    old = {"INT", "LONG", "FLOAT", "STRING", "UNICODE", "PUT", "GET"}
    assert refused == calls | sets | old


BOMBS = {
    "a number for the billionth object": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "a number of a million bytes": b"\x80\x02\x8b" + struct.pack("<I", 10**6) + bytes(10**6) + b".",
    "keys that take for ever to hash": b"\x80\x02}()" + b"2\x86" * 60 + b"K\x01u.",
    "an empty stack": b"\x80\x020.",
    "items for no list": b"\x80\x02}(K\x01e.",
    "a key without a value": b"\x80\x02}(K\x01u.",
    "an object that was not numbered": b"\x80\x02h\x07.",
    "a mark that is not there": b"\x80\x02]e.",
    "no pickle": b"\x80\x02\xfe\xfe\xfe",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_bombs_and_nonsense_are_refused_at_once(data):
    with pytest.raises((BadInput, Torn)):
        loaded(data)


@pytest.mark.parametrize(
    "piece", [b"}", b"]", b"(", b"N", b"K\x01", b"}K\x01K\x01s", b"X\x02\x00\x00\x00xx", b")\x85", b"2", b"]\x94"]
)
def test_what_takes_too_much_memory_is_given_up(piece, monkeypatch):
    monkeypatch.setattr(restricted_pickle, "ROOM", 200_000)
    with pytest.raises(BadInput, match="takes more than"):
        loaded(b"\x80\x04N" + piece * 30_000, 4096)


# ---------------------------------------------------------------- moments


def course(steps):
    """A played allocator after (size, index of who is given back): negative sizes give back."""
    paper, sizes = Paper(), {}
    kept: list[int] = []
    for size, which, again in steps:
        if size > 0:
            address = kept.pop(which % len(kept)) if kept and again else None
            asked = min(size, paper.segments[address]) if address is not None else size
            sizes[paper.take(asked, FORWARD, address=address)] = asked
        elif paper.alive:
            address = sorted(paper.alive)[which % len(paper.alive)]
            paper.give_back(address, sizes[address])
            kept.append(address)
            if again:
                paper.release(kept.pop())
    return paper


STEPS = st.lists(st.tuples(st.integers(-3000, 5000), st.integers(0, 30), st.booleans()), min_size=1, max_size=25)


@settings(deadline=2000, max_examples=60)
@given(STEPS, st.integers(0, 120))
def test_the_peak_is_the_highest_that_the_history_reaches(place, steps, keep):
    paper = course(steps)
    keep = min(keep, len(paper.trace))
    assume(keep or paper.segments)
    seen = [(0, 0, {}), *paper.course][len(paper.course) - keep :]
    rows, _ = read(place, paper.snapshot(keep))
    most = max(seen, key=lambda moment: moment[0])
    assert total(rows, "snapshot").allocated == paper.course[-1][0]
    if keep:
        assert total(rows, "peak").allocated == most[0]
        assert (total(rows, "peak").reserved or 0) in {reserved for used, reserved, _ in seen if used == most[0]}
    for instant in ("peak", "snapshot") if keep else ("snapshot",):
        told = memory(rows, instant)
        assert told.pop("total") == sum(told.values())


def test_the_sums_are_those_that_torch_makes():
    from torch.cuda._memory_viz import segsum

    paper = Paper()
    paper.take(3 * MIB, FORWARD)
    paper.give_back(paper.take(5 * MIB, FORWARD), 5 * MIB)
    text = segsum(paper.snapshot())
    rows = list(memory_snapshot._rows(*_device(paper), 0, None, Notes()))
    assert "total_reserved: 8.0MiB" in text and "total_allocated: 3.0MiB" in text
    assert (total(rows, "snapshot").reserved, total(rows, "snapshot").allocated) == (8 * MIB, 3 * MIB)


def _device(paper):
    data = pickle.dumps(paper.snapshot(), 4)
    found = load(iter((data,)), "it", memory_snapshot.event)
    return memory_snapshot._devices(found, Source("it"))


def test_kinds_and_stages_at_the_peak_by_hand(place):
    paper = Paper()
    for size in (40, 24):
        paper.take(size * MIB, frames(*LOADED))
    paper.take(128 * MIB, frames(*MOMENTS))
    paper.take(16 * MIB, frames(*CACHE))
    saved = paper.take(300 * MIB, frames(*FORWARD, UPDATE))
    paper.take(40 * MIB)  # backward: as large as a parameter, by a thread without frames
    paper.take(9 * MIB)
    paper.give_back(saved, 300 * MIB)
    rows, notes = read(place, paper.snapshot())
    assert {kind: size // MIB for kind, size in memory(rows, "peak").items()} == {
        "total": 557, "param": 64, "optimizer": 128, "kv_cache": 16, "activation": 300, "grad": 40, "temporary": 9,
    }  # fmt: skip
    assert memory(rows, "snapshot")["total"] == 257 * MIB and "activation" not in memory(rows, "snapshot")
    made = {
        (row.stage, row.kind): row.allocated // MIB for row in rows if row.table == "memory" and row.instant == "made"
    }
    assert made == {
        ("update_actor", "optimizer"): 128,
        ("update_actor", "activation"): 300,
        ("rollout", "kv_cache"): 16,
    }
    assert any("grad is by size alone" in remark for remark in notes.remarks)
    assert total(rows, "snapshot").fragmentation == pytest.approx(300 / 557)
    numbers = {row.name: row.value for row in rows if row.table == "metrics"}
    assert numbers == {"memory/inactive_split_bytes": 0, "memory/largest_free_block_bytes": 300 * MIB}


@pytest.mark.parametrize(
    ("who", "kind"),
    [
        ((SITE + "torch/distributed/fsdp/_flat_param.py:_alloc_padded_unsharded_flat_param",), "comm_buffer"),
        ((SITE + "torch/distributed/fsdp/_flat_param.py:_get_shard",), "param"),
        ((SITE + "verl/utils/fsdp_utils.py:load_fsdp_optimizer",), "optimizer"),
        ((SITE + "megatron/core/distributed/param_and_grad_buffer.py:__init__",), "grad"),
        (("??:torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)", "??:torch::autograd::Engine::thread_main"), "grad"),
        (("??:at::native::mm_cuda", "??:torch::autograd::Engine::thread_main"), "temporary"),
        (("??:c10d::ProcessGroupNCCL::allgather", "train.py:main"), "comm_buffer"),
        (("train.py:helper",), "temporary"),
    ],
)  # fmt: skip
def test_what_frames_say(place, who, kind):
    paper = Paper()
    paper.take(MIB, frames(*who))
    assert memory(read(place, paper.snapshot())[0], "peak") == {"total": MIB, kind: MIB}


def test_what_was_made_before_the_history_is_residue_where_it_did_not_last(place):
    paper = Paper()
    early = paper.take(64 * MIB, frames(*LOADED))
    lasting = paper.take(32 * MIB, frames(*LOADED))
    before = len(paper.trace)
    paper.take(8 * MIB, frames(*FORWARD))
    paper.give_back(early, 64 * MIB)
    rows, _ = read(place, paper.snapshot(len(paper.trace) - before))
    assert memory(rows, "peak") == {"total": 104 * MIB, "residue": 64 * MIB, "param": 32 * MIB, "activation": 8 * MIB}
    assert lasting in paper.alive


def test_a_shortage_in_the_history(place):
    """1 GiB is asked for, 0.5 GiB are free, and 1.5 GiB lie about in pieces."""
    paper = Paper(device=2)
    paper.take(6 * GIB, frames(*LOADED))
    hole = paper.take(3 * GIB // 2, frames(*FORWARD, UPDATE))
    paper.give_back(hole, 3 * GIB // 2)
    paper.run_out(GIB, GIB // 2, frames(*FORWARD, UPDATE))
    rows, _ = read(place, paper.snapshot())
    (finding,) = [row for row in rows if row.table == "findings"]
    assert (finding.id, finding.verdict, finding.rank, finding.stage) == ("out_of_memory", "fail", 2, "update_actor")
    assert "1.00 GiB more were asked for" in finding.message and "expandable_segments" in finding.next_step
    assert finding.evidence[0].startswith("6.00 GiB param in 1 block")
    assert finding.evidence[-1] == "asked for at actor/dp_actor.py:7 update_policy"
    assert (total(rows, "oom").allocated, total(rows, "oom").reserved) == (6 * GIB, 15 * GIB // 2)
    assert total(rows, "oom").fragmentation == pytest.approx(0.2)
    assert total(rows, "peak").allocated == 15 * GIB // 2


def test_segments_that_grow_in_place_and_pieces_within_them(place):
    """Expandable segments: two pages are mapped, one is taken back; a block of three stays free beside one in use."""
    paper = Paper()
    paper.take(2 * MIB, frames(*FORWARD))
    snapshot = paper.snapshot()
    snapshot["segments"][0] |= {"total_size": 8 * MIB, "is_expandable": True}
    snapshot["segments"][0]["blocks"] += [
        {"size": 3 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
        {"size": 3 * MIB, "requested_size": 0, "state": "active_pending_free", "frames": []},
    ]
    pages = [
        {"action": action, "addr": START, "size": size * MIB, "stream": 0, "time_us": 1}
        for action, size in (("segment_map", 10), ("segment_unmap", 4))
    ]
    snapshot["device_traces"] = [[*pages, *paper.trace[1:]]]
    rows, _ = read(place, snapshot)
    numbers = {row.name: row.value / MIB for row in rows if row.table == "metrics"}
    assert numbers == {"memory/inactive_split_bytes": 3, "memory/largest_free_block_bytes": 3}
    assert total(rows, "peak").reserved == 8 * MIB


@pytest.mark.parametrize(
    ("path", "rank", "step"),
    [
        ("out/step12/torch_memory_rank3_pid77.pickle", 3, 12),
        ("global_step_40/rank-7.pt.trace.json.gz", 7, 40),
        ("memory_rank_11.pickle", 11, None),
        ("frank5/steps9.pickle", None, None),
    ],
)
def test_ranks_and_steps_stand_in_names(tmp_path, path, rank, step):
    assert (rank_in(tmp_path / path), step_in(tmp_path / path)) == (rank, step)
    if rank is not None and path.endswith("pickle"):
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        paper = Paper()
        paper.take(MIB)
        assert {(row.rank, row.step) for row in read(place, paper.snapshot())[0]} == {(rank, step)}


def test_older_forms(place):
    """A list of segments alone, as torch.cuda.memory_snapshot gives it; and frames within `history`."""
    paper = Paper()
    paper.take(4 * MIB, frames(*LOADED))
    segments = paper.snapshot()["segments"]
    assert memory(read(place, segments)[0], "snapshot") == {"total": 4 * MIB, "param": 4 * MIB}
    block = segments[0]["blocks"][0]
    block["history"] = [{"addr": START, "real_size": 4 * MIB, "frames": block.pop("frames")}]
    del block["address"]
    assert memory(read(place, {"segments": segments})[0], "snapshot") == {"total": 4 * MIB, "param": 4 * MIB}


def test_several_ranks_come_to_one_run(tmp_path):
    for rank, size in ((0, 100), (3, 200)):
        paper = Paper()
        paper.give_back(paper.take(size * MIB, frames(*FORWARD, UPDATE)), size * MIB)
        (tmp_path / f"snapshot_rank{rank}.pickle").write_bytes(pickle.dumps(paper.snapshot()))
    summary = import_into([tmp_path], tmp_path / "run")
    assert list(summary.files) == ["memory_snapshot"]
    with Ledger(tmp_path / "run") as ledger:
        peaks = ledger.rows(
            "SELECT rank, stage, activation, fragmentation FROM memory_readings WHERE instant = 'peak' ORDER BY rank"
        )
    assert [(row["rank"], row["stage"], row["activation"]) for row in peaks] == [
        (0, "update_actor", 100 * MIB), (3, "update_actor", 200 * MIB),
    ]  # fmt: skip
    assert [row["fragmentation"] for row in peaks] == [0, 0]


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def sample():
    paper = Paper()
    for n in range(60):
        address = paper.take((n % 7 + 1) * MIB, frames(*(LOADED if n % 3 else (*FORWARD, UPDATE))))
        if n % 2:
            paper.give_back(address, (n % 7 + 1) * MIB)
    return pickle.dumps(paper.snapshot(), 4)


def test_a_torn_snapshot_gives_its_segments_and_no_history(place, sample):
    whole, partial = total(read(place, sample)[0], "snapshot"), 0
    for size in range(40, len(sample), 1511):
        try:
            rows, notes = read(place, sample[:size])
        except BadInput as error:
            assert "ends in the middle" in str(error)
            continue
        partial += 1
        assert total(rows, "snapshot").allocated == whole.allocated and not memory(rows, "peak")
        assert any("ends in the middle" in reason for reason in notes.skipped)
    assert partial > 3


def test_damaged_packing(place, sample):
    rows, _ = read(place, gzip.compress(sample))
    assert total(rows, "peak").allocated > 0
    with pytest.raises(BadInput, match="ends in the middle"):
        read(place, gzip.compress(sample)[:100])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"model": {}}, "its keys are model, and none is `segments`"),
        ({"segments": 5}, "none is `segments`"),
        (17, "it holds no dict"),
        ({"segments": []}, "nothing was allocated"),
        ({"segments": [5, {"device": "x"}, {"blocks": [None]}], "device_traces": [None, [1]]}, "nothing was allocated"),
    ],
)
def test_what_is_no_snapshot_is_said(place, found, says):
    with pytest.raises(BadInput, match=says):
        read(place, found)


def test_what_is_named_a_million_times_is_looked_at_once(place):
    """Ten thousand names of one segment, whose thousand blocks are one; as a bomb this would be ten million."""
    block = {"size": MIB, "state": "active_allocated", "address": START}
    rows, _ = read(
        place, {"segments": [{"device": 0, "address": START, "total_size": MIB, "blocks": [block] * 1000}] * 10_000}
    )
    assert memory(rows, "snapshot")["total"] == MIB


def test_it_is_recognised(place, sample):
    place.write_bytes(sample)
    assert format_of(Source(place)).name == "memory_snapshot"
    other = place.with_name("dump")
    other.write_bytes(sample)
    assert format_of(Source(other)).name == "memory_snapshot"


@settings(max_examples=40, deadline=3000)
@given(CHANGES)
def test_whatever_is_changed_there_are_rows_or_a_clear_line(place, sample, changes):
    try:
        read(place, changed(sample, changes))
    except BadInput as error:
        assert str(place) in str(error) and "\n" not in str(error)


@settings(max_examples=40, deadline=3000)
@given(st.binary(max_size=200))
def test_any_bytes_after_the_beginning_of_a_pickle(place, data):
    try:
        read(place, b"\x80\x04" + data)
    except BadInput as error:
        assert str(place) in str(error) and "\n" not in str(error)


WORDS = st.sampled_from(
    ["alloc", "free_requested", "oom", "segment_alloc", "segments", "frames", "active_allocated", "inactive"]
)
ENTRIES = st.dictionaries(st.sampled_from(["action", "addr", "size", "frames", "time_us", "device", "blocks", "state", "address", "total_size", "device_free", "history"]), WORDS | st.integers(-5, 2**65) | st.none() | st.lists(st.dictionaries(st.sampled_from(["filename", "name", "line", "state", "size"]), WORDS | st.integers(), max_size=3), max_size=2), max_size=7)  # fmt: skip


@settings(max_examples=25, deadline=3000)
@given(st.lists(ENTRIES, max_size=5), st.lists(st.lists(ENTRIES, max_size=6), max_size=3))
def test_a_snapshot_with_anything_in_it(place, segments, traces):
    buffer = io.BytesIO()
    pickle.dump({"segments": segments, "device_traces": traces}, buffer)
    try:
        rows, _ = read(place, buffer.getvalue())
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert all(row.allocated >= 0 for row in rows if row.table == "memory")
