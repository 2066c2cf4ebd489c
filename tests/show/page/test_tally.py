"""The tally of a large run: whatever the pieces in which its rows come, it has what the ledger's views have."""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowledger.ledger import directory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MemoryRow, MetricRow, Row, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show.page.tally import TABLES, Tally
from flowledger.show.page.tally_metrics import is_count, is_share
from flowledger.show.page.vast import thinned
from tests.diagnose import sick

SECOND = 1_000_000_000
Files = dict[tuple[str, str], bytes]  # part, file -> what stands in it


def contents(run: Path) -> Files:
    """The lines of every part, wherever it lies by now."""
    files = [file for place in ("parts", "compacted") for file in run.glob(f"{place}/*/*.jsonl")]
    return {(file.parent.name, file.name): file.read_bytes() for file in files}


def differences(tally: Tally, ledger: Ledger) -> list[str]:
    """Where the tally's rows are others than the views'."""
    steps, named = tally.times.steps(), [*tally.metrics.steps]
    latest = steps[-1]
    fullest: dict[int, dict[str, Any]] = {}
    for row in ledger.rows("FROM peaks WHERE source <> 'plan' AND step IS NOT NULL"):
        best = fullest.get(row["step"])
        if best is None or _order(row) > _order(best):
            fullest[row["step"]] = row
    pairs = {
        "step_seconds": (tally.step_seconds(steps), "FROM step_seconds WHERE source <> 'plan'", ("step",)),
        "cut_steps": (tally.cut_steps(steps), "FROM cut_steps", ("step",)),
        "stages": (tally.stages(steps), "FROM stages WHERE source <> 'plan'", ("step", "role", "stage")),
        "metrics_by_step": (tally.metrics_by_step(named), "FROM metrics_by_step WHERE source <> 'plan'", ("step", "name")),
        "balance": (tally.balance(latest), f"FROM balance_at({latest})", ("stage", "rank", "process")),
        "peaks": (tally.peaks(sorted(fullest)), [*fullest.values()], ("step",)),
        "peaks of ranks": (
            tally.peaks_of_ranks(latest), f"FROM peaks WHERE step = {latest} AND source <> 'plan'", ("process",),
        ),
    }  # fmt: skip
    return [
        line
        for name, (mine, view, key) in pairs.items()
        for line in _unlike(name, mine, ledger.rows(view) if isinstance(view, str) else view, key)
    ]


def _order(row: dict[str, Any]) -> tuple[bool, int, int]:
    return row["instant"] == "peak", row["peak"], -1 if row["known"] is None else row["known"]


def _unlike(name: str, mine: Sequence[Any], theirs: Sequence[Any], key: Sequence[str]) -> Iterator[str]:
    ours, views = ({tuple(row[word] for word in key): row for row in rows} for rows in (mine, theirs))
    yield from (f"{name} {at}: in one of them only" for at in ours.keys() ^ views.keys())
    for at in ours.keys() & views.keys():
        for column, value in ours[at].items():
            if column not in ("waited_seconds", "share") and not _equal(value, views[at][column]):
                yield f"{name} {at} {column}: {value} and {views[at][column]}"
            if column == "share" and value is not None and not _equal(value, views[at][column]):
                yield f"{name} {at} share: {value} and {views[at][column]}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def told(files: Files, to: Path, manifest: bytes, processes: dict[str, bytes], draw: random.Random) -> Tally:
    """A tally of these files, that looks again and again while they grow by pieces that end anywhere."""
    (to / "parts").mkdir(parents=True)
    (to / directory.MANIFEST).write_bytes(manifest)
    tally = Tally(to)
    left = {key: content for key, content in files.items() if content}
    most = max(map(len, left.values()))
    while left:
        part, file = draw.choice([*left])
        here = to / "parts" / part
        if not here.exists():
            here.mkdir()
            (here / "process.json").write_bytes(processes[part])
        size = draw.randint(1, most)
        with (here / file).open("ab") as opened:
            opened.write(left[part, file][:size])
        left[part, file] = left[part, file][size:]
        if not left[part, file]:
            del left[part, file]
        if draw.random() < 0.6:
            tally.look(draw.choice((1, 100_000)))
    while tally.look(over=True):
        pass
    tally.look(over=True)
    return tally


def replayed(run: Path, to: Path, seed: int) -> Tally:
    """The tally of a run that is written once more."""
    processes = {
        file.parent.name: file.read_bytes()
        for place in ("parts", "compacted")
        for file in run.glob(f"{place}/*/process.json")
    }
    return told(contents(run), to, (run / directory.MANIFEST).read_bytes(), processes, random.Random(seed))


@pytest.fixture(scope="module")
def recorded_ledger(recorded: Path) -> Iterator[Ledger]:
    with Ledger(recorded) as ledger:
        yield ledger


@pytest.mark.parametrize("seed", range(3))
def test_of_a_recorded_run(recorded: Path, recorded_ledger: Ledger, tmp_path: Path, seed: int) -> None:
    tally = replayed(recorded, tmp_path / "again", seed)
    assert "\n".join(differences(tally, recorded_ledger)) == ""
    assert len(tally.stages(tally.times.steps())) >= 20  # and it is not nothing


# ------------------------------------------------------------------------------------------------------ ranks, by hand


def span(
    at: int, name: str, begin: float, end: float | None, *, step: int, stage: str | None = None, **more: Any
) -> list[Row]:
    """A span's begin, and its end if it has one."""
    start = int(begin * SECOND)
    known = {
        "id": at,
        "step": step,
        "name": name,
        "span_kind": "stage",
        "start_ns": start,
        "stage": stage,
        "role": "actor",
    }
    rows: list[Row] = [SpanRow(**known, event="begin", t_ns=start)]
    if end is not None:
        rows.append(SpanRow(**known, **more, event="end", end_ns=int(end * SECOND), t_ns=int(end * SECOND)))
    return rows


def a_rank(rank: int, draw: random.Random, steps: int) -> list[Row]:
    """What one of four ranks could write: it is slow or fast, dies in the last step, has numbers of every kind."""
    rows: list[Row] = []
    for step in range(steps):
        begin, at = step * 100.0 + rank * 0.1, step * 10
        dies = rank == 3 and step == steps - 1
        first, second = 1.0 + draw.random(), 2.0 + draw.random()
        rows += span(at, "step", begin, None if dies else begin + 5, step=step)
        rows += span(
            at + 1,
            "old_log_prob",
            begin,
            begin + first,
            step=step,
            stage="old_log_prob",
            tokens_valid=100 + rank,
            tokens_logical=128,
        )
        rows += span(
            at + 2,
            "update_actor",
            begin + first,
            None if dies else begin + first + second,
            step=step,
            stage="update_actor",
        )
        rows.append(SpanRow(id=at + 3, step=step, stage="update_actor", role="actor", phase="forward", event="whole", name="forward", span_kind="compute",
                            start_ns=0, end_ns=int(draw.random() * SECOND), tokens_computed=7 + rank, tokens_valid=5, t_ns=0))  # fmt: skip
        for stage in ("old_log_prob", "update_actor"):
            size = draw.randint(10**9, 2 * 10**9)
            rows.append(
                MemoryRow(
                    step=step,
                    stage=stage,
                    instant="end",
                    kind="total",
                    allocated=size,
                    reserved=size + 10,
                    peak_since_stage=size + rank,
                    t_ns=step * SECOND,
                )
            )
            if step == 0:
                rows += [
                    MemoryRow(
                        step=step,
                        stage=stage,
                        instant="end",
                        kind=kind,
                        allocated=draw.randint(1, 10**8),
                        t_ns=step * SECOND,
                    )
                    for kind in ("param", "grad")
                ]
        if step == 0:
            rows += [
                MemoryRow(
                    step=step,
                    stage="update_actor",
                    instant="peak",
                    kind=kind,
                    allocated=10**9 + rank,
                    t_ns=step * SECOND,
                )
                for kind in ("param", "activation")
            ]
        for name, value, weight in (("kl", draw.gauss(0, 1), draw.choice((None, 3.0))), ("rollout/running", 4.0, None), ("rollout/running", 2.0, None),
                                    ("rollout/decode_tokens", 100.0, None), ("loss", float("nan") if step == 1 and rank == 2 else 0.5, None)):  # fmt: skip
            rows.append(
                MetricRow(
                    name=name,
                    raw_name=name.upper(),
                    value=value,
                    weight=weight,
                    step=step,
                    t_ns=int((begin + 1) * SECOND),
                )
            )
        rows.append(
            MetricRow(
                name="rollout/kv_blocks_used", raw_name="kv", value=step + rank / 10, t_ns=int((begin + 2) * SECOND)
            )
        )
    return rows


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, two of them beside others on `tp`; the last dies in its last step."""
    made = directory.create(tmp_path_factory.mktemp("four") / "run", Manifest(run="four", mesh={"dp": 2, "tp": 2}))
    draw = random.Random(0)
    for rank in range(4):
        ink = Writer(made.part("actor", rank, coordinates={"dp": rank // 2, "tp": rank % 2}))
        for row in a_rank(rank, draw, 12):
            row.rank = rank
            ink.put(row)
        ink.close()
    made.close("crashed")
    return made.path


@pytest.fixture(scope="module")
def four_ledger(four: Path) -> Iterator[Ledger]:
    with Ledger(four) as ledger:
        yield ledger


@pytest.mark.parametrize("seed", range(4))
def test_of_several_ranks(four: Path, four_ledger: Ledger, tmp_path: Path, seed: int) -> None:
    tally = replayed(four, tmp_path / "again", seed)
    assert "\n".join(differences(tally, four_ledger)) == ""
    shares = [row["share"] for row in tally.stages(tally.times.steps())]
    assert None not in shares and 0 < min(shares) < 1  # stages follow each other: shares are known, and equal
    assert [row["step"] for row in tally.cut_steps(tally.times.steps())] == [11]
    assert tally.latest() == {"step": 10, "seconds": 5.0}


def test_how_far_the_run_has_come_is_told_before_its_memory_is_added(four: Path, four_ledger: Ledger) -> None:
    tally, seen = Tally(four), list[tuple[object, int]]()
    tally.look(timed=lambda: seen.append((tally.latest(), len(tally.memory.changed))))
    assert seen == [({"step": 10, "seconds": 5.0}, 0)]
    tally.look(over=True)
    assert "\n".join(differences(tally, four_ledger)) == ""
    tally.look(timed=lambda: seen.append((None, 0)))  # nothing new
    assert len(seen) == 1
    behind = Tally(four)
    behind.look(1, timed=lambda: seen.append((None, 1)))  # more is left than was read: nobody knows how far it has come
    assert len(seen) == 1


def test_of_equally_slow_ranks_the_lowest_is_named_however_their_parts_are_called(tmp_path: Path) -> None:
    """`actor-r10-…` stands before `actor-r2-…`: of the two, which took as long as each other and longer than all others, 2 is named."""
    ranks = [[sick.span(1, "reward", 0, 5 if rank in (2, 10) else 4, step=0)] for rank in range(11)]
    run = sick.run(tmp_path / "run", ranks)
    with Ledger(run) as ledger:
        view = [row["slowest_rank"] for row in ledger.rows("FROM stages")]
    for seed in range(5):
        tally = replayed(run, tmp_path / str(seed), seed)
        assert [row["slowest_rank"] for row in tally.stages([0])] == view == [2]


def test_a_difference_would_be_seen(four: Path, four_ledger: Ledger, tmp_path: Path) -> None:
    """The control: one row more, and the two part."""
    tally = replayed(four, tmp_path / "again", 0)
    extra = SpanRow(
        id=1,
        step=3,
        stage="old_log_prob",
        role="actor",
        event="whole",
        name="x",
        span_kind="stage",
        start_ns=0,
        end_ns=SECOND,
    )
    tally.times.add(0, [extra], 0)  # type: ignore[list-item] it has all that is taken of a span
    assert any("stages (3, 'actor', 'old_log_prob') calls" in line for line in differences(tally, four_ledger))


def test_what_is_shared_and_what_is_counted_is_as_the_views_have_it(four_ledger: Ledger) -> None:
    names = (
        "rollout/running",
        "rollout/waiting",
        "rollout/engine_steps",
        "rollout/finished/stop",
        "recorder/cpu_s",
        "recorder/ns_per_row",
        "kl",
    )
    for name in names:
        (row,) = four_ledger.rows("SELECT is_share(?) AS share, is_count(?) AS count", [name, name])
        assert (is_share(name), is_count(name)) == (row["share"], row["count"]), name


def test_parts_that_are_set_aside_are_read_on_and_not_again(four: Path, tmp_path: Path) -> None:
    files = contents(four)
    run = tmp_path / "run"
    for (part, file), content in files.items():
        (run / "parts" / part).mkdir(parents=True, exist_ok=True)
        (run / "parts" / part / file).write_bytes(content[: len(content) // 2])
    tally = Tally(run)
    tally.look()
    (run / "compacted").mkdir()
    for part in {part for part, _ in files}:
        (run / "parts" / part).rename(run / "compacted" / part)
    for (part, file), content in files.items():
        with (run / "compacted" / part / file).open("ab") as opened:
            opened.write(content[len(content) // 2 :])
    tally.look(over=True)
    assert tally.growth.read == sum(
        len(content) for (_, file), content in files.items() if file.rpartition("-")[0] in TABLES
    )
    assert not tally.look(over=True)


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    part = tmp_path / "parts" / "actor-r0-here-1"
    part.mkdir(parents=True)
    good = b'{"seq":1,"step":4,"name":"kl","raw_name":"kl","value":1.5}\n'
    (part / "metrics-0.jsonl").write_bytes(good + b'{"seq":2,"step":4,"na\n' + good + b'{"seq":3,"step":4,"name":"kl"')
    tally = Tally(tmp_path)
    tally.look(over=True)
    assert [(row["step"], row["name"], row["value"]) for row in tally.metrics_by_step([4])] == [(4, "kl", 1.5)]


def test_a_long_metric_is_thinned_to_its_extremes() -> None:
    values = {step: math.sin(step / 50) for step in range(10_000)} | {7_777: 99.0, 1_234: -99.0}
    kept = thinned(values, 400)
    assert len(kept) <= 402
    assert kept.items() <= values.items()
    assert {0, 9_999, 7_777, 1_234} <= kept.keys()
    assert thinned({1: 2.0}) == {1: 2.0}
