"""Traces of torch.profiler: what Holistic Trace Analysis makes of the same files, real traces of two ranks, and damaged ones."""

import gzip
import json
import math
import tomllib
import tracemalloc
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_import_events import CHANGES, changed

from flowledger.flow.errors import BadInput
from flowledger.flow.stages import stages
from flowledger.ledger.reader import Ledger
from flowledger.record.importers import kineto, trace_events, trace_spans
from flowledger.record.importers.formats import format_of
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.intervals import Union, lengths
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.trace_events import TraceEvents
from flowledger.tables.metrics import find
from flowledger.tables.traces import collective, stage

DATA = Path(__file__).parents[1] / "data" / "imports"
GPU = {rank: DATA / f"gpu_rank{rank}.pt.trace.json.gz" for rank in (0, 1)}  # made at random in Kineto's form
GLOO = {rank: DATA / f"gloo_rank{rank}.pt.trace.json.gz" for rank in (0, 1)}  # of torch.profiler on two CPUs
EXPECTED = json.loads((DATA / "gpu_expected.json").read_text())


def read(path):
    notes = Notes()
    return list(kineto.read(Source(path), notes)), notes


def figures(rows, step=None):
    return {row.name: row.value for row in rows if row.table == "metrics" and row.step == step}


def whole(path):
    with gzip.open(path) as file:
        return json.load(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "trace.json"


def kernel(name, ts, dur, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def write(place, events, **about):
    place.write_text(json.dumps({**about, "traceEvents": events}))
    return place


# ---------------------------------------------------------------- what others make of it


@pytest.mark.parametrize("rank", GPU)
def test_the_breakdown_of_a_gpu_is_that_of_hta(rank):
    rows, notes = read(GPU[rank])
    told, hta = figures(rows), EXPECTED[str(rank)]
    busy = 1e-6 * (hta["compute"] + hta["non_compute"])
    assert told["compute_time_s"] == pytest.approx(hta["compute"] * 1e-6)
    assert told["idle_fraction"] == pytest.approx(hta["idle"] / hta["kernel_time"], abs=1e-9)
    assert told["comm_overlap"] * 100 == pytest.approx(hta["overlap"], abs=0.005)
    assert told["exposed_comm_s"] + told["compute_time_s"] <= busy + 1e-12  # copies are non-compute too
    assert told["exposed_comm_s"] == pytest.approx(told["comm_time_s"] * (1 - told["comm_overlap"]))
    assert {row.rank for row in rows} == {rank} and not notes.skipped
    assert all(find(name) for name in told)  # each is a metric of the table, with a unit and a definition


def test_collectives_are_counted_by_kind_with_their_sizes():
    """By hand from the file: bytes are those of the whole tensor, at 2 bytes an element."""
    events = [event for event in whole(GPU[0])["traceEvents"] if event["name"].startswith("nccl")]
    rows, _ = read(GPU[0])
    told = figures(rows)
    for torch_name, kind in (
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
    ):
        mine = [event for event in events if event["args"]["Collective name"] == torch_name]
        sizes = [2 * max(one["args"]["In msg nelems"], one["args"]["Out msg nelems"]) for one in mine]
        assert told[f"collective_calls/{kind}"] == len(mine) > 0
        assert told[f"collective_bytes/{kind}"] == sum(sizes)
        assert told[f"collective_time_s/{kind}"] == pytest.approx(sum(one["dur"] for one in mine) * 1e-6)
        assert sorted(row.bytes for row in rows if row.table == "spans" and row.comm_type == kind) == sorted(sizes)
    spans = [row for row in rows if row.table == "spans" and row.span_kind == "comm"]
    assert all(row.peer_ranks == [0, 1] and row.stage == "update_actor" and row.step in (5, 6) for row in spans)
    assert [row.start_ns for row in spans] == sorted(row.start_ns for row in spans)


def test_a_real_trace_of_two_cpus():
    rows, notes = read(GLOO[1])
    raw = whole(GLOO[1])
    gloo = [event for event in raw["traceEvents"] if event["name"] == "gloo:all_reduce"]
    steps = {event["name"]: event for event in raw["traceEvents"] if event["name"].startswith("ProfilerStep#")}
    spans = [row for row in rows if row.table == "spans"]
    assert [row.latency_ms for row in spans if row.comm_type == "all_reduce"] == pytest.approx(
        [event["dur"] / 1000 for event in sorted(gloo, key=lambda one: one["ts"])], rel=1e-4
    )
    whole_steps = {f"ProfilerStep#{row.step}": row for row in spans if row.name == "step"}
    assert whole_steps.keys() == steps.keys()
    for name, row in whole_steps.items():
        began = raw["baseTimeNanoseconds"] + steps[name]["ts"] * 1000
        assert abs(row.start_ns - began) < 2000  # a double of so many microseconds is that exact
    assert [row.step for row in spans if row.stage == "update_actor" and row.span_kind == "stage"] == [1, 2]
    assert figures(rows)["comm_time_s"] <= sum(event["dur"] for event in gloo) * 1e-6 + 1e-9
    assert not notes.skipped


def test_two_ranks_come_to_a_run_in_which_one_waits_for_the_other(tmp_path):
    """The first all_reduce of rank 0 began 9 ms before that of rank 1: by hand from both files."""
    first = [min(e["ts"] for e in whole(GLOO[r])["traceEvents"] if e["name"] == "gloo:all_reduce") for r in (0, 1)]
    bases = [whole(GLOO[rank])["baseTimeNanoseconds"] for rank in (0, 1)]
    late = (bases[1] - bases[0]) * 1e-9 + (first[1] - first[0]) * 1e-6
    import_into(list(GLOO.values()), tmp_path / "run")
    with Ledger(tmp_path / "run") as ledger:
        waits = ledger.rows("SELECT rank, seconds, last_rank FROM waits ORDER BY seconds DESC")
    assert (waits[0]["rank"], waits[0]["last_rank"]) == (0, 1)
    assert waits[0]["seconds"] == pytest.approx(late, abs=1e-4) and len(waits) == 8


# ---------------------------------------------------------------- what counts as what


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("nccl:all_reduce", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("gloo:broadcast", "broadcast"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "all_to_all"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", None),
        ("void at::native::reduce_kernel<512, 1>", None),
    ],
)
def test_which_kernels_communicate(name, kind):
    assert collective(name) == kind


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("update_actor", "update_actor"),
        ("Worker::compute_log_prob", "old_log_prob"),
        ("gen", "rollout"),
        ("generic", None),
        ("sample_prompts", "prompt"),
        ("dynamic_sampling", "filter"),  # NeMo-RL
        ("RayPPOTrainer::_balance_batch", "balance"),  # verl
        ("balance_experiences", "balance"),  # OpenRLHF
        ("get_samples", "prompt"),  # slime
        ("vLLM.generate", "rollout"),  # TRL
    ],
)
def test_which_annotations_are_stages(name, means):
    assert stage(name) == means


def test_every_stage_is_one_by_its_own_name_and_by_the_timers_of_frameworks():
    assert {name: stage(name) for name in stages()} == {name: name for name in stages()}
    names = tomllib.loads(files("flowledger.tables").joinpath("metric_names.toml").read_text(encoding="utf-8"))
    timers = {
        own.rpartition("/")[2].removesuffix("_time"): name.removeprefix("stage_time_s/")
        for table in names.values() for own, name in table.items() if name.startswith("stage_time_s/") and "<" not in name
    }  # fmt: skip
    assert len(timers) > 20 and {own: stage(own) for own in timers} == timers


def test_kernels_count_and_not_what_the_host_says_of_them(place):
    """The annotation nccl:all_reduce and the operators are of the host; its kernel is half hidden behind a product."""
    write(place, [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 0, "dur": 400},
        kernel("gemm", 100, 40), kernel("ncclDevKernel_AllReduce_Sum", 120, 40), kernel("gemm", 120, 20),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 170, "dur": 10},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 120}, {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ])  # fmt: skip
    told = figures(read(place)[0])
    assert {name: round(value * 1e6) for name, value in told.items() if name.endswith("_s")} == {
        "compute_time_s": 40, "comm_time_s": 40, "exposed_comm_s": 20, "memcpy_time_s": 10,
    }  # fmt: skip
    assert (told["comm_overlap"], told["idle_fraction"]) == (0.5, 0.125)


def test_steps_do_not_count_each_others_time(place):
    """The work of step 1 goes on while step 2 begins on the device: there it is step 2's."""
    notes = [("gpu_user_annotation", 1, 0, 100), ("gpu_user_annotation", 2, 90, 60), ("user_annotation", 3, 0, 9)]
    write(
        place,
        [{"ph": "X", "cat": c, "name": f"ProfilerStep#{n}", "ts": ts, "dur": d} for c, n, ts, d in notes]
        + [kernel("gemm", 80, 40)],
    )
    rows, _ = read(place)
    assert [round(figures(rows, step).get("compute_time_s", -1e-6) * 1e6) for step in (1, 2, 3)] == [10, 30, -1]


def test_ranks_and_what_is_left_out_are_told(place, monkeypatch):
    monkeypatch.setattr(trace_spans, "MOST_COLLECTIVES", 3)
    path = place.with_name("worker_rank-12.pt.trace.json")
    write(path, [kernel("ncclDevKernel_AllGather", 10 * n, 5) for n in range(8)])
    rows, notes = read(path)
    assert {row.rank for row in rows} == {12}
    assert sum(row.table == "spans" for row in rows) == 3 and figures(rows)["collective_calls/all_gather"] == 8
    assert any("5 more collectives" in remark for remark in notes.remarks)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=20
)


@settings(max_examples=40)
@given(INTERVALS, INTERVALS, st.lists(st.integers(0, 80), min_size=2, max_size=6, unique=True), st.integers(1, 9))
def test_unions_have_the_length_that_counting_gives(first, second, edges, run):
    unions = [Union(), Union()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowledger.record.importers.intervals.RUN", run)
        for union, parts in zip(unions, (first, second), strict=True):
            for start, end in parts:
                union.add(start, end)
    edges.sort()
    windows = list(pairwise(edges))
    covered = {moment for start, end in first + second for moment in range(start, end)}
    assert lengths(unions, windows) == [len(covered & set(range(*window))) for window in windows]


# ---------------------------------------------------------------- any way of writing it

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.sampled_from("XMif"), "name": st.text(max_size=12), "ts": st.integers(0, 2**50) | st.floats(0, 1e9)},
        optional={"cat": st.text(max_size=6), "dur": st.floats(0, 1e6), "pid": st.integers() | st.text(max_size=3), "args": st.dictionaries(st.text(max_size=5), VALUES, max_size=4)},
    ),
    max_size=12,
)  # fmt: skip


@settings(deadline=2000, max_examples=40)
@given(EVENTS, st.sampled_from((None, 0, 2)), st.booleans(), st.booleans(), st.integers(1, 80))
def test_events_are_those_of_the_whole_json_however_it_is_written_and_cut(events, indent, compact, plain, size):
    text = json.dumps(
        events if plain else {"schemaVersion": 1, "traceEvents": events, "traceName": "x }, { y"},
        indent=indent, separators=(",", ":") if compact else None, ensure_ascii=size % 2 == 0,
    ).encode()  # fmt: skip
    notes = Notes()
    found = TraceEvents((text[at : at + size] for at in range(0, len(text), size)), "x", notes)
    read_events = [event for batch in found.batches() for event in batch]
    assert [(e.ph, e.name, e.cat, e.ts, e.details) for e in read_events] == [
        (e["ph"], e["name"], e.get("cat", ""), e["ts"], e.get("args", {})) for e in events
    ]
    assert not notes.skipped and found.about.get("traceName") == (None if plain else "x }, { y")


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "damage", ['{"ph": "X", "name": "a" "b"}', '{"ph": "X", "name": [1, }', "{]", '{"ph": nonsense}', "17"]
)
def test_a_damaged_event_is_left_out_and_counted(place, damage):
    good = [json.dumps(kernel("gemm", 10 * n, 5)) for n in range(4)]
    place.write_text('{"traceEvents": [' + ",\n".join([*good[:2], damage, *good[2:]]) + "]}")
    rows, notes = read(place)
    assert figures(rows)["compute_time_s"] == pytest.approx(20e-6)
    assert notes.skipped == ({} if damage == "17" else {"damaged event of a trace": 1})


def test_numbers_and_texts_that_are_no_json_but_are_written(place):
    """Control characters and NaN, as some versions wrote them, and times as texts."""
    place.write_bytes(b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a\x01\nb","ts":1,"dur":2,"args":{"occupancy":NaN}},'
                      b'{"ph":"X","cat":"kernel","name":"\xff","ts":"5","dur":"3"}, {"ph":"X","cat":"kernel","name":"n","ts":NaN,"dur":1},'
                      b'{"ph":"X","cat":"kernel","name":"n","ts":9,"dur":-4}]}')  # fmt: skip
    rows, notes = read(place)
    assert figures(rows)["compute_time_s"] == pytest.approx(5e-6) and not notes.skipped


def test_a_trace_that_is_cut_off_gives_what_came_before(place):
    text = json.dumps({"traceEvents": [kernel("gemm", 10 * n, 5) for n in range(50)]}).encode()
    place.write_bytes(text[: len(text) // 2])
    rows, notes = read(place)
    assert 20e-6 < figures(rows)["compute_time_s"] < 150e-6
    assert "the trace ends within its events" in notes.skipped


def test_damaged_packing_gives_what_came_before(place):
    events = [kernel(f"gemm{n * 7919 % 1009}", 10 * n, 5) for n in range(20_000)]
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode(), 1)
    place.write_bytes(packed[: len(packed) // 2])
    rows, notes = read(place)
    assert figures(rows)["compute_time_s"] > 0.001 and any("gzip" in reason for reason in notes.skipped)


@pytest.mark.parametrize("data", [b'{"traceEvents": 5}', b'{"a": 1}', b"no json at all", b"{" * 5000])
def test_what_is_no_trace_is_said_in_one_line(place, data):
    place.write_bytes(data)
    with pytest.raises(BadInput, match="it has no list of traceEvents"):
        read(place)


def test_what_only_looks_like_a_trace_is_given_up(place, monkeypatch):
    monkeypatch.setattr(trace_events, "MOST_DAMAGED", 40)
    place.write_bytes(b'{"traceEvents": [' + b'{"ph": "X", "args": [' * 3_000)
    with pytest.raises(BadInput, match="damaged events"):
        read(place)


def test_a_trace_without_work_says_so(place):
    rows, notes = read(write(place, []))
    assert not rows and "the trace has neither kernels nor operators" in notes.skipped


def test_it_is_recognised_by_its_content(place):
    assert all(format_of(Source(path)).name == "torch_trace" for path in (*GPU.values(), *GLOO.values()))
    place.write_text(json.dumps([kernel("gemm", 1, 2)]))
    assert format_of(Source(place)).name == "torch_trace"


@settings(max_examples=40, deadline=3000)
@given(CHANGES)
def test_whatever_is_changed_there_are_rows_or_a_clear_line(place, changes):
    place.write_bytes(changed(gzip.decompress(GPU[0].read_bytes()), changes))
    try:
        for row in read(place)[0]:
            assert row.table != "metrics" or math.isfinite(row.value)
    except BadInput as error:
        assert str(place) in str(error) and "\n" not in str(error)


def test_no_more_than_a_few_pieces_are_held():
    """Sixty pieces, of which a few may be in hand at a time."""
    piece = (",".join([json.dumps(kernel("gemm", 1, 5, stream=7))] * 500) + ",").encode()

    def pieces():
        yield b'{"traceEvents": ['
        for _ in range(60):
            yield piece
        yield b"{}]}"

    tracemalloc.start()
    try:
        events = sum(map(len, TraceEvents(pieces(), "x", Notes()).batches()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert events == 60 * 500 + 1 and peak < 16 * len(piece)
