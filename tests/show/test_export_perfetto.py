"""A run as a Chrome trace: what stands in it is what the ledger says, and the importer of torch's traces reads it back."""

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MemoryRow, MetricRow, SampleRow, SpanRow, Trained
from flowledger.ledger.writer import Writer
from flowledger.record.importers.imported import import_into
from flowledger.show import export_perfetto, export_rows
from flowledger.show.export_files import written
from flowledger.show.export_rows import Steps
from tests.ledger.synthetic import (
    KINDS,
    MS,
    PEAK_RESERVED,
    SLOW,
    STAGE_MS,
    STEP_MS,
    slow_run,
    stage_start,
    synthetic_run,
)

Event = dict[str, Any]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(synthetic_run(tmp_path_factory.mktemp("perfetto") / "a")) as opened:
        yield opened


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(slow_run(tmp_path_factory.mktemp("perfetto") / "slow")) as opened:
        yield opened


def traced(
    ledger: Ledger, *, steps: Steps | None = None, sample: str | None = None, **more: dict[int, float]
) -> dict[str, Any]:
    file = io.BytesIO()
    export_perfetto.write(ledger, file, steps or Steps(), sample, more)
    found: dict[str, Any] = json.loads(file.getvalue(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    return found


def events(ledger: Ledger, **asked: Any) -> list[Event]:
    found: list[Event] = traced(ledger, **asked)["traceEvents"]
    return found


def names(made: list[Event]) -> dict[tuple[int, int], str]:
    """(pid, tid) -> name; of a process with tid 0."""
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in made if one["ph"] == "M" and "name" in one["args"]}


def test_stages_of_the_trace_last_as_long_as_those_of_the_ledger(ledger: Ledger) -> None:
    found: dict[str, float] = defaultdict(float)
    made = events(ledger)
    threads = names(made)
    for one in made:
        if one["ph"] == "X" and threads[one["pid"], one["tid"]] == "stages":
            found[one["name"]] += one["dur"]
    steps = {f"ProfilerStep#{step}": STEP_MS * 1000 for step in (0, 1)}
    assert found == {stage: 2 * milliseconds * 1000 for stage, milliseconds in STAGE_MS.items()} | steps
    rollout = next(one for one in made if one["name"] == "rollout" and one["args"]["step"] == 1)
    assert rollout["ts"] == stage_start(1, "rollout") / 1000  # the first step begins at 0
    assert rollout["args"]["latency_ms"] == STAGE_MS["rollout"] and rollout["args"]["rank"] == 0


def sums(ledger: Ledger, apart: str) -> list[dict[str, Any]]:
    """Of each stage and kind of collective: how many, how long, and how far after the first it began."""
    return ledger.rows(
        f"""WITH told AS (
            SELECT CASE span_kind WHEN 'comm' THEN comm_type ELSE stage END AS name, start_ns + {apart} AS began, end_ns - start_ns AS ns
            FROM spans_view JOIN clocks USING (process)
            WHERE span_kind = 'stage' AND stage IN ('reward', 'update_actor') OR comm_type IS NOT NULL)
        SELECT name, count(*) AS calls, sum(ns) AS ns, min(began) - min(min(began)) OVER () AS after_ns FROM told GROUP BY name ORDER BY name"""
    )


def test_the_importer_of_torchs_traces_reads_the_same_times_back(two_ranks: Ledger, tmp_path: Path) -> None:
    with written(tmp_path / "trace.json.gz") as file:
        export_perfetto.write(two_ranks, file, Steps(), None, {})
    import_into([tmp_path / "trace.json.gz"], tmp_path / "back")
    there = sums(two_ranks, "apart")
    with Ledger(tmp_path / "back") as back:
        assert sums(back, "0") == there
    assert [row["name"] for row in there] == [
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "reward",
        "update_actor",
    ]
    assert [row["ns"] for row in there if row["name"] == "reward"] == [22_000 * MS]


def test_a_collective_says_how_long_its_rank_waited_and_for_whom(two_ranks: Ledger) -> None:
    """Rank 1 comes to the first one 20 s late; to the two that overlap it is 3 s late, which counts once."""
    waited = {
        (one["args"]["rank"], one["args"]["id"]): (one["args"]["waited_seconds"], one["args"].get("waited_for"))
        for one in events(two_ranks)
        if one["ph"] == "X" and "waited_seconds" in one["args"]
    }
    assert waited[0, 3] == (20, 1) and waited[1, 3] == (0, None)
    assert (
        waited[0, 5] == (3, 1) and waited[0, 6] == (1, 1) and (0, 9) not in waited
    )  # whose third rank recorded nothing


def test_all_ranks_stand_on_one_clock(two_ranks: Ledger) -> None:
    made = traced(two_ranks)
    of_rank = {name.split(" ·")[0]: pid for (pid, tid), name in names(made["traceEvents"]).items() if not tid}
    assert of_rank.keys() >= {"rank 0", "rank 1"}
    for rank, spans in enumerate(SLOW):
        began = sorted(
            one["ts"] for one in made["traceEvents"] if one["ph"] == "X" and one["pid"] == of_rank[f"rank {rank}"]
        )
        expected = [start * 1e6 for number, _, start, _ in spans] + ([33e6] if rank == 0 else [])
        assert began == sorted(expected)
    assert made["baseTimeNanoseconds"] == 1_700_000_000_000 * MS


def test_intervals_of_a_thread_lie_inside_of_each_other_or_apart(two_ranks: Ledger, ledger: Ledger) -> None:
    """Viewers draw a thread as a stack. Rank 0's collectives of 22 to 26 and of 23 to 27 overlap and have a thread each."""
    for opened in (two_ranks, ledger):
        made = events(opened)
        threads = names(made)
        stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
        for one in made:
            if one["ph"] != "X":
                continue
            place = one["pid"], one["tid"]
            assert place in threads
            stack, end = stacks[place], one["ts"] + one["dur"]
            while stack and stack[-1] <= one["ts"]:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
        if opened is two_ranks:
            assert sum(name.startswith("communication") for name in threads.values()) == 3


def test_memory_and_metrics_are_counters(ledger: Ledger) -> None:
    made = [one for one in events(ledger, made_of_rows={0: 7.0, 1: float("nan")}) if one["ph"] == "C"]
    kinds = [one["args"] for one in made if one["name"] == "memory by kind (bytes)"]
    assert kinds == [KINDS, KINDS]
    reserved = [one["args"]["reserved"] for one in made if one["name"] == "allocator (bytes)"]
    assert reserved == [PEAK_RESERVED] * 6  # two ends of stages and a peak in each of two steps
    norms = [(one["ts"], one["args"]["value"]) for one in made if one["name"] == "grad_norm"]
    assert norms == [(0, 1.0), (STEP_MS * 1000, 2.0)]
    assert [one["args"]["value"] for one in made if one["name"] == "made_of_rows"] == [7.0]
    marks = [one["name"] for one in events(ledger, made_of_rows={1: float("inf")}) if one["ph"] == "i"]
    assert marks == ["kl = nan", "kl = nan", "made_of_rows = inf"]


def test_arrows_follow_one_sample_through_stages_and_its_own_micro_batch(ledger: Ledger) -> None:
    made = events(ledger, sample="2")
    threads = names(made)
    arrows = [one for one in made if one["ph"] in "stf"]
    assert [one["ph"] for one in arrows] == ["s", "t", "t", "t", "f"] and len({one["id"] for one in arrows}) == 1
    under = []
    for arrow in arrows:
        slices = [
            one for one in made
            if one["ph"] == "X" and (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"]) and one["ts"] <= arrow["ts"] < one["ts"] + one["dur"]
        ]  # fmt: skip
        innermost = min(slices, key=lambda one: one["dur"])
        under.append(
            (threads[arrow["pid"], arrow["tid"]], innermost["args"]["stage"], innermost["args"].get("micro_batch"))
        )
    stages = [("stages", stage, None) for stage in ("prompt", "rollout", "reward", "advantage")]
    assert under == [
        *stages,
        ("phases and micro-batches", "update_actor", 1),
    ]  # samples 2 and 3 are the second micro-batch
    telling = next(one for one in events(ledger) if one["ph"] == "s")
    assert telling["name"] == "sample 0"  # with tokens, and the largest advantage


def test_steps_narrow_it(ledger: Ledger) -> None:
    second = events(ledger, steps=Steps(1, 1))
    assert {one["args"]["step"] for one in second if one["ph"] == "X"} == {1}
    assert next(one for one in second if one["ph"] == "s")["name"] == "sample 4"
    assert sum(one["ph"] == "C" for one in second) * 2 == sum(one["ph"] == "C" for one in events(ledger))


def test_a_page_of_rows_is_all_that_is_held(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = traced(ledger)
    monkeypatch.setattr(export_rows, "PAGE", 3)
    assert traced(ledger) == whole


def test_what_never_ended_is_begun_and_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = '</script><script>alert("1")</script>\x1b[31m\n'
    book = create(tmp_path / "died", Manifest(run=hostile, mesh={"dp": 2}))
    ink = Writer(book.part("actor", 1, coordinates={"dp": 1, "tp": 0}))
    ink.put(SpanRow(id=1, step=0, t_ns=5, event="begin", name="step", span_kind="stage", start_ns=5 * MS))
    ink.put(
        SpanRow(
            id=2, step=0, t_ns=6, event="begin", name=hostile, span_kind="compute", stage="rollout", start_ns=6 * MS
        )
    )
    for number, start in enumerate((6, 7)):  # two requests at once
        ink.put(SpanRow(id=3 + number, t_ns=1, event="whole", name="request/stop", span_kind="host", start_ns=start * MS, end_ns=9 * MS, sample_id=str(number)))  # fmt: skip
    ink.put(MetricRow(step=0, name=hostile, raw_name=hostile, value=1.0, t_ns=7 * MS))
    ink.put(MemoryRow(step=0, t_ns=8 * MS, instant="end", kind="residue", allocated=5))
    ink.close()
    with Ledger(book.path) as ledger:
        made = events(ledger)
    assert [(one["ph"], one["name"]) for one in made if one["ph"] == "B"] == [("B", "ProfilerStep#0"), ("B", hostile)]
    assert (
        [one["id"] for one in made if one["ph"] == "b"] == ["0", "1"] == [one["id"] for one in made if one["ph"] == "e"]
    )
    assert any(name.startswith("rank 1 dp1 · ") for name in names(made).values())
    assert [one["args"] for one in made if one["name"] == "residue (bytes)"] == [{"residue": 5}]


def test_a_run_without_times_has_nothing_to_draw(tmp_path: Path) -> None:
    book = create(tmp_path / "log", Manifest(run="log"))
    ink = Writer(book.part("driver", None, source="import"))
    ink.put(MetricRow(step=3, name="loss", raw_name="loss", value=1.0))
    ink.put(
        SampleRow(
            step=3, stage="update_actor", sample_id="x", trained=[Trained(epoch=0, mini_batch=0, rank=0, micro_batch=0)]
        )
    )
    ink.close()
    with Ledger(book.path) as ledger, pytest.raises(BadInput, match="nothing that happened at a known time"):
        traced(ledger)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"steps": Steps(7, 9)}, "it has 0 to 1, the nearest is --step 1"),
        ({"sample": "22"}, "has no sample '22'; did you mean 2?"),
    ],
)
def test_what_the_run_does_not_have_is_said_with_the_nearest(ledger: Ledger, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("?", r"\?")):
        traced(ledger, **asked)


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7", Steps(7, 7)), ("3..9", Steps(3, 9)), ("3..", Steps(3, None)), ("..9", Steps(None, 9)), (None, Steps())],
)
def test_steps_as_they_are_written(text: str | None, steps: Steps) -> None:
    assert export_rows.steps_of(text) == steps


@pytest.mark.parametrize("text", ["", "..", "a", "1..2..3", "-1", "9..3", "1.5"])
def test_other_words_are_no_steps(text: str) -> None:
    with pytest.raises(BadInput, match="--step"):
        export_rows.steps_of(text)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    place.write_text("before")
    with pytest.raises(BadInput, match="no space"), written(place) as file:
        file.write(b"half")
        raise OSError(28, "no space left on device")
    assert place.read_text() == "before" and list(tmp_path.iterdir()) == [place]
    with written(tmp_path / "trace.json.gz") as file:
        file.write(b"whole")
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == b"whole"
    with written(tmp_path / "not" / "yet" / "there.json") as file:  # folders that are missing are made
        file.write(b"whole")
    assert (tmp_path / "not" / "yet" / "there.json").read_bytes() == b"whole"
    for wrong in (tmp_path, place / "inside.json"):
        with pytest.raises(BadInput, match="cannot write"), written(wrong):
            pass


def test_what_cannot_be_made_is_left_out_and_named(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Iterator[Event]:
        yield from ledger.rows("SELECT unnest([9223372036854775807]) + 1")

    monkeypatch.setattr(export_perfetto, "readings", fails)
    file = io.BytesIO()
    said = export_perfetto.write(ledger, file, Steps(), None, {})
    assert "readings of memory of a cannot be made, a number in its rows is too large: left out" in said
    kinds = {one["ph"] for one in json.loads(file.getvalue())["traceEvents"]}
    assert "X" in kinds and "C" in kinds  # intervals, and the counters of metrics


def test_only_forms_that_can_be_had_are_advised(tmp_path: Path) -> None:
    run = create(tmp_path / "plan", Manifest(run="plan"))
    with (
        Ledger(run.path) as planned,
        pytest.raises(BadInput, match="--to parquet and csv write what there is") as refused,
    ):
        traced(planned)
    assert "tensorboard" not in str(refused.value)
