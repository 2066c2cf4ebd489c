"""The signals view: numbers of the run's metrics, time that adds up rank by rank, distributions that can be counted again."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from flowledger.cli.page import metrics
from flowledger.flow.stages import order
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, SampleRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show import tables
from flowledger.show.page import signals, signals_charts, signals_rows, signals_spread, signals_time
from flowledger.show.page.book import Book, Metric
from flowledger.show.page.choice import Choice
from flowledger.show.page.packed import unpacked
from flowledger.show.page.theme import colours, dressed
from flowledger.show.plain import clean
from tests.ledger import synthetic

Open = Callable[..., Any]
Made = Callable[..., Path]
Data = dict[str, Any]
HOSTILE = '<img src=x onerror="document.title=1">'
ALL = Choice()


@contextmanager
def book(run: Path, **more: Any) -> Iterator[Book]:
    with Ledger(run) as ledger:
        yield Book(ledger=ledger, **more)


def shown(run: Path, at: Choice = ALL, **more: Any) -> Data:
    with book(run, **more) as opened:
        data = signals.data(opened, at)
    json.dumps(clean(data), allow_nan=False)
    return data


def written(path: Path, by_rank: list[list[Any]], **manifest: Any) -> Path:
    directory = create(path, Manifest(run=path.name, **manifest))
    for rank, rows in enumerate(by_rank):
        ink = Writer(directory.part("actor", rank))
        for row in rows:
            ink.put(row)
        ink.close()
    directory.close("closed")
    return path


def whole(number: int, stage: str, start: int, end: int | None, **more: Any) -> SpanRow:
    """A stage of step 0, in milliseconds."""
    event = "begin" if end is None else "whole"
    ns = None if end is None else end * 1_000_000
    place: Data = {"step": 0, "rank": 0, "stage": stage, "name": stage, "span_kind": "stage"} | more
    return SpanRow(t_ns=start * 1_000_000, id=number, event=event, start_ns=start * 1_000_000, end_ns=ns, **place)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks whose clocks are 1000 s apart, of which one comes late to the first collective."""
    return synthetic.slow_run(tmp_path_factory.mktemp("slow") / "run")


# ---------------------------------------------------------------------------------------------------------------- metrics


def test_its_numbers_are_those_of_show(recorded: Path) -> None:
    """Recomputed where the rows give it, else as recorded: the two columns of `show RUN metrics`."""
    with Ledger(recorded) as ledger:
        opened = Book(ledger=ledger, metrics=metrics(ledger))
        data = signals.data(opened, ALL)
        told = ledger.rows("SELECT step, name, value FROM metrics_by_step WHERE source <> 'plan' AND value IS NOT NULL")
    by_name = {row["name"]: row for row in data["metrics"]}
    assert len(by_name) == len(data["metrics"]) > 60
    compared = 0
    for row in told:
        metric = by_name[row["name"]]
        if not metric["recomputed"]:
            assert metric["values"][data["steps"].index(row["step"])] == row["value"]
            compared += 1
    assert compared > 20


def test_the_well_known_come_first_then_group_by_group() -> None:
    rows = [
        {"name": name, "group": group}
        for name, group in [("zz", "data"), ("mfu", "first"), ("aa", "stability"), ("reward/mean", "first"), ("x", "other"), ("ab", "stability")]
    ]  # fmt: skip
    assert [row["name"] for row in signals._ordered(rows)] == ["reward/mean", "mfu", "aa", "ab", "zz", "x"]


def test_what_is_not_finite_is_marked_and_leaves_a_gap() -> None:
    metric = Metric(name="ref_kl", values={0: 0.1, 1: math.nan, 2: -math.inf, 4: 0.3})
    row = signals._row(metric, [0, 1, 2, 3, 4])
    assert row["values"] == [0.1, None, None, None, 0.3]
    assert row["special"] == {1: "nan", 2: "-inf"}
    rows = signals_rows.metric_rows({"steps": [0, 1, 2, 3, 4], "alarms": []}, row)
    line = [(one["step"], one["value"]) for one in rows if one["kind"] == "value"]
    assert line == [(0, 0.1), (1, None), (2, None), (4, 0.3)]  # a step without a number breaks nothing
    assert [(one["step"], one["written"]) for one in rows if one["kind"] == "special"] == [(1, "nan"), (2, "-inf")]


@pytest.mark.parametrize(
    ("healthy", "values", "seen"),
    [
        (None, [1.0], None),
        ((0.0, 1.0), [], None),
        ((0.0, 1.0), [0.4, 0.6], (0.384, 0.616)),  # all healthy: the whole chart is
        ((0.0, 0.3), [1.0, 1.0], (0.244, 0.3)),  # all beyond: the bound that was left is in sight
        ((0.5, math.inf), [0.0, 1.0], (0.5, 1.08)),
        ((None, 0.5), [0.0, 1.0], (-0.08, 0.5)),
        ((0.2, 0.3), [0.1, 0.1], (0.2, 0.208)),
        ((-1.0, 1.0), [0.0, 0.0], (-1.0, 1.0)),  # one value: it is in the middle
    ],
)  # fmt: skip
def test_so_much_of_the_healthy_range_is_seen(healthy: Any, values: list[float], seen: Any) -> None:
    found = signals.shade(healthy, values)
    assert (found is None) == (seen is None)
    if found is not None:
        assert found == pytest.approx(seen)


def test_an_alarm_stands_at_its_step_in_the_metrics_that_it_names(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        [[MetricRow(t_ns=1, step=3, name=name, raw_name=name, value=1.0) for name in ("grad_norm", "entropy")]],
    )
    alarm: Data = {
        "id": "grad_norm_high", "order": "alarms", "verdict": "fail", "step": 3, "stage": None, "rank": None, "next_step": "look",
        "message": "the gradient norm is large", "evidence": ["step 3: grad_norm = 301", "usual grad_norm = 1.", "true at step 3"],
    }  # fmt: skip
    others = [{**alarm, "id": "quiet", "verdict": "pass"}, {**alarm, "id": "law", "order": "laws"}]
    known = [Metric(name=name, values={3: 1.0}) for name in ("grad_norm", "entropy", "norm")]
    data = shown(run, findings=[alarm, *others], metrics=known)
    (fired,) = data["alarms"]
    assert (fired["id"], fired["step"], fired["metrics"]) == ("grad_norm_high", 3, ["grad_norm"])
    marked = {
        row["name"]: [one["step"] for one in signals_rows.metric_rows(data, row) if one["kind"] == "alarm"]
        for row in data["metrics"]
    }
    assert marked == {"grad_norm": [3], "entropy": [], "norm": []}


# ---------------------------------------------------------------------------------------------------------------- time


def test_its_sums_are_those_of_show_balance(slow: Path) -> None:
    data = shown(slow, Choice(step=0))
    with Ledger(slow) as ledger:
        told = {(row["rank"], row["stage"]): row for row in tables.table(ledger, "balance", step=0).rows}
    sums = {(row["rank"], row["stage"]): row for row in data["timelines"][0]["sums"]}
    assert sums.keys() == told.keys()
    for place, row in sums.items():
        for name in ("seconds", "comm_seconds", "waited_seconds"):
            assert row[name] == pytest.approx(told[place][name]), (place, name)
        assert row["waited_for"] == told[place]["waited_for"]
    assert sums[0, "filter"]["waited_seconds"] == pytest.approx(20)  # rank 1 comes at 21 s, rank 0 at 1 s
    assert sums[0, "filter"]["waited_for"] == 1


def test_pieces_lie_on_one_clock(slow: Path) -> None:
    (timeline,) = shown(slow, Choice(step=0))["timelines"]
    pieces = {
        (one["row"], one["what"], one["stage"]): (one["begin"], one["end"]) for one in unpacked(timeline["pieces"])
    }
    assert timeline["rows"] == ["rank 0", "rank 1"]
    assert pieces[0, "stage", "reward"] == (0, 1000)
    assert pieces[1, "stage", "reward"] == (0, 21000)
    assert pieces[0, "wait", "filter"] == (1000, 21000)
    assert pieces[0, "comm", "filter"] == (1000, 21250)


@pytest.mark.parametrize(
    ("pieces", "gap", "found"),
    [
        ([], 0, []),
        ([(5, 7), (0, 2)], 0, [(0, 2), (5, 7)]),
        ([(0, 4), (1, 2), (3, 9)], 0, [(0, 9)]),
        ([(0, 2), (4, 5), (9, 10)], 2, [(0, 5), (9, 10)]),
    ],
)
def test_intervals_that_touch_become_one(pieces: Any, gap: int, found: Any) -> None:
    assert signals_time.joined(pieces, gap) == found


def test_a_stage_that_never_ended_is_open(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run", [[whole(1, "reward", 0, 5), whole(2, "update_actor", 6, None), whole(3, "rollout", 7, 9)]]
    )
    (timeline,) = shown(run, Choice(step=0))["timelines"]
    pieces = {one["stage"]: one for one in unpacked(timeline["pieces"])}
    assert pieces["update_actor"]["open"]
    assert pieces["update_actor"]["end"] == 9  # when it was heard last
    assert not pieces["reward"].get("open")
    assert {row["stage"]: row["seconds"] for row in timeline["sums"]}["update_actor"] is None


def test_of_many_ranks_the_slowest_of_each_class_is_there(tmp_path: Path) -> None:
    """Of 20 ranks in two classes: rank 7 and rank 13 take longest, rank 2 is the quickest."""
    took = {7: 90, 13: 80, 2: 5}
    ranks = [[whole(1, "update_actor", 0, took.get(rank, 50), rank=rank)] for rank in range(20)]
    run = written(tmp_path / "run", ranks, rank_classes={"first": [*range(10)], "last": [*range(10, 20)]})
    (timeline,) = shown(run, Choice(step=0))["timelines"]
    assert len(timeline["rows"]) == signals_time.MOST
    assert {"rank 7", "rank 13", "rank 2"} <= set(timeline["rows"])


def test_the_steps_with_a_timeline_are_the_longest_the_first_and_the_last() -> None:
    times = {0: 3.0, 1: 1.0, 2: 9.0, 3: 2.0, 4: 2.5}
    made = Book(ledger=None, metrics=[Metric(name="step_time_s", values=times)])  # type: ignore[arg-type]  # of which nothing is asked
    assert signals._steps(made, [*times]) == [2, 0, 4]
    del times[3]
    assert signals._steps(made, [*times]) == [2, 0, 4, 1]  # of a short run all


# ---------------------------------------------------------------------------------------------------------------- distributions


def test_values_are_counted_between_fixed_edges(recorded: Path) -> None:
    with book(recorded) as opened:
        found = {one["name"]: one for one in signals_spread.distributions(opened)}
        samples = tables.table(opened.ledger, "samples").rows
    assert {"response_length", "prompt_length", "reward", "advantage", "ratio"} <= found.keys()
    for name in ("response_length", "reward", "advantage"):
        one = found[name]
        for step, counts in zip(one["steps"], one["counts"], strict=True):
            values = [row[name] for row in samples if row["step"] == step and row[name] is not None]
            assert sum(counts) == len(values) > 0
            assert counts == _counted(values, one["edges"])


def _counted(values: list[float], edges: list[float]) -> list[int]:
    """By hand: in which bin each value lies, the last one with its upper edge."""
    where = Counter(max(at for at, edge in enumerate(edges[:-1]) if value >= edge - 1e-9) for value in values)
    return [where[at] for at in range(len(edges) - 1)]


def test_whole_numbers_have_bins_around_them(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        [
            [
                SampleRow(t_ns=1, step=0, sample_id=str(at), response_length=length)
                for at, length in enumerate((1, 1, 2, 4))
            ]
        ],
    )
    with book(run) as opened:
        (one,) = signals_spread.distributions(opened)
    assert one["edges"] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert one["counts"] == [[2, 1, 0, 1]]
    assert one["quantiles"] == [[1.0, 1.5, pytest.approx(3.4)]]
    assert (one["only"], one["ticks"]) == (None, [1.0, 2.0, 3.0, 4.0])  # lengths have no halves


@pytest.mark.parametrize("value", [1.0, 0.25, 0.0, -3.0])
def test_one_value_is_one_thin_bar(tmp_path: Path, value: float) -> None:
    rows = [SampleRow(t_ns=1, step=at % 2, sample_id=str(at), reward=value) for at in range(6)]
    with book(written(tmp_path / "run", [[*rows]])) as opened:
        (one,) = signals_spread.distributions(opened)
    assert (one["only"], one["ticks"]) == (value, [value])
    for counts in one["counts"]:
        ((bin_, count),) = [(at, count) for at, count in enumerate(counts) if count]
        begin, end = one["edges"][bin_], one["edges"][bin_ + 1]
        assert count == 3 and (begin + end) / 2 == pytest.approx(value, abs=1e-12)
        assert end - begin < (one["edges"][-1] - one["edges"][0]) / 20


def test_a_few_far_out_stand_in_the_outermost_bins(tmp_path: Path) -> None:
    values = [at / 1000 for at in range(1000)] + [1e6]
    run = written(
        tmp_path / "run",
        [[SampleRow(t_ns=1, step=0, sample_id=str(at), reward=value) for at, value in enumerate(values)]],
    )
    with book(run) as opened:
        (one,) = signals_spread.distributions(opened)
    assert one["open"]
    assert one["edges"][-1] < 2
    assert sum(one["counts"][0]) == 1001
    rows = signals_rows.histogram_rows(one, 0)
    assert sum(row["share"] for row in rows if row["kind"] == "step") == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------------------- what is lacking


def test_a_plan_has_no_signals(planned: Path) -> None:
    data = shown(planned)
    assert data["absent"]
    assert "A plan has none" in data["missing"][0]["en"]


def test_a_log_has_metrics_and_says_what_else_is_not_there(imported: Path) -> None:
    with Ledger(imported) as ledger:
        data = signals.data(Book(ledger=ledger, metrics=metrics(ledger)), ALL)
    assert {"reward/mean", "grad_norm"} <= {row["name"] for row in data["metrics"]}
    assert data["timelines"] == data["distributions"] == []
    said = [sentence["en"] for sentence in data["missing"]]
    assert [line.split(":")[0] for line in said] == ["No stage was timed rank by rank", "No sample was recorded"]


# ---------------------------------------------------------------------------------------------------------------- charts

ROWS = {
    "metric": [
        {"kind": "value", "step": 0, "value": 1.0}, {"kind": "point", "step": 0, "value": 1.0, "seen": True}, {"kind": "special", "step": 1, "written": "nan"},
        {"kind": "value", "step": 1, "value": None}, {"kind": "healthy", "low": 0.5, "high": 1.5}, {"kind": "chosen", "step": 1},
        {"kind": "alarm", "step": 1, "id": "x", "message": HOSTILE, "verdict": "fail"}, {"kind": "room", "value": 0.5},
    ],
    "timeline": [
        {"kind": kind, "name": "rank 0", "begin": 0, "end": 5, "stage": "rollout", "told": "rollout"} for kind in ("stage", "wait", "comm")
    ] + [{"kind": "label", "told": "rollout", "middle": 2}],
    "histogram": [{"kind": kind, "begin": at, "end": at + 1, "share": 0.5} for kind in ("run", "step") for at in (0, 1)],
    "quantiles": [{"kind": "quantiles", "step": at, "p10": 0, "p50": 1, "p90": 2} for at in (0, 1)] + [{"kind": "chosen", "step": 1}],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_vega_takes_every_chart(name: str) -> None:

    spec = dressed(signals_charts.charts([0, 1])[name], "zh")
    assert "var(--" not in json.dumps(spec)
    assert '"zh"' not in json.dumps(spec)
    assert signals_charts.drawn(spec, ROWS[name]) == spec  # each layer has rows here
    svg = vl_convert.vegalite_to_svg({**spec, "width": 300, "data": {"values": ROWS[name]}})
    assert svg.count("<path") > 4
    assert "<img" not in svg


@pytest.mark.parametrize(("steps", "ends"), [([], [0, 1]), ([5], [4, 6]), ([2, 7, 9], [2, 9])])
def test_all_that_is_over_steps_has_one_axis(steps: list[int], ends: list[int]) -> None:
    made = signals_charts.charts(steps)
    axes = [
        layer["encoding"]["x"]["scale"]["domain"]
        for name in ("metric", "quantiles")
        for layer in made[name]["layer"]
        if "x" in layer["encoding"]
    ]
    assert axes == [ends] * len(axes)
    assert len(axes) == 10


def test_rounding_is_no_course() -> None:
    values = [0.9999999999997, 0.9999999999992]
    metric = {"values": values, "special": {}, "shade": None, "name": "rollout_gap/effective_responses"}
    rows = signals_rows.metric_rows({"steps": [0, 1], "alarms": []}, metric)
    assert [row["value"] for row in rows if row["kind"] == "room"] == pytest.approx([0.9, 1.1])
    low, high = signals.shade((0.2, 1.0), values) or (0, 0)
    assert low == pytest.approx(0.9) and high == pytest.approx(1.0)


def test_layers_without_rows_are_left_out() -> None:
    left = signals_charts.drawn(signals_charts.metric((0, 1)), ROWS["metric"][:2])
    assert [layer["name"] for layer in left["layer"]] == ["value", "point"]


@pytest.mark.parametrize(("steps", "named"), [([7], ["7"]), ([3, 4, 5], ["3", "4", "5"]), ([], [])])
def test_the_axis_of_few_steps_names_each_and_no_other(steps: list[int], named: list[str]) -> None:
    metric = {"values": [0.07] * len(steps), "special": {}, "shade": None, "name": "reward/mean"}
    rows = signals_rows.metric_rows({"steps": steps, "alarms": []}, metric)
    spec = signals_charts.drawn(signals_charts.charts(steps)["metric"], rows)
    svg = vl_convert.vegalite_to_svg(dressed({**spec, "width": 300, "data": {"values": rows}}))
    labels = re.findall(r">([^<>]+)</text>", svg)
    assert [one for one in labels if re.fullmatch(r"-?\d+", one)] == named
    assert "0" not in labels and ("step" in labels) is bool(steps)  # what is 0.07 all along has no axis of 0


def test_every_stage_has_a_colour_in_both_lights() -> None:
    domain = signals_charts.timeline()["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert domain == [*order(), "other"] or set(domain) == {*order(), "other"}
    for dark in (False, True):
        assert {f"stage-{stage}" for stage in order()} <= colours(dark=dark).keys()


# ---------------------------------------------------------------------------------------------------------------- the page


def test_a_link_opens_a_metric_with_its_numbers(made: Made, opened: Open, recorded: Path) -> None:
    from playwright.sync_api import expect

    with Ledger(recorded) as ledger:
        rows = ledger.rows("SELECT step, value FROM metrics_by_step WHERE name = 'grad_norm' ORDER BY step")
    page = opened(made(recorded), "#signals?find=grad_norm&metric=grad_norm&step=1")
    assert page.locator("#signals input[type=search]").input_value() == "grad_norm"
    page.locator(".signal-explained summary").click()
    cells = page.locator(".signal-explained tbody tr td:last-child").all_inner_texts()
    assert [float(cell) for cell in cells] == [row["value"] for row in rows]
    assert page.locator("#signals .controls select").input_value() == "1"
    expect(page.locator(".signal.chosen .chart svg")).to_be_visible()


def test_groups_show_what_is_outside_and_axes_have_the_unit_of_their_numbers(
    made: Made, opened: Open, tmp_path: Path
) -> None:
    numbers = {"truncation_ratio": 0.75, "eos_ratio": 0.25, "abort_ratio": 0.0, "step_time_s": 0.25, "entropy": 0.5}
    rows = [
        MetricRow(t_ns=1, step=step, name=name, raw_name=name, value=value * (2 - step))
        for name, value in numbers.items()
        for step in (0, 1)
    ]
    page = opened(made(written(tmp_path / "run", [[*rows]])), "#signals")
    page.wait_for_selector("#signals .signal svg")
    data = page.locator(".signals-group", has_text="eos_ratio")
    assert (
        data.get_attribute("open") is not None and "1 outside its healthy range" in data.locator("summary").inner_text()
    )
    names = data.locator(".signal figcaption button")
    assert names.all_inner_texts() == ["eos_ratio"]
    if (more := data.locator("button.linklike")).count():
        more.click()
        assert len(names.all_inner_texts()) > 1
    told = {
        name: page.locator(f"[id='signal-{name}'] .last").inner_text() for name in ("truncation_ratio", "step_time_s")
    }
    assert told == {"truncation_ratio": "75 %", "step_time_s": "250 ms"}
    for name, most in (("truncation_ratio", 150), ("step_time_s", 500)):
        page.wait_for_selector(f"[id='signal-{name}'] svg")
        labels = page.locator(f"[id='signal-{name}'] svg text").all_text_contents()
        assert max(float(label.replace(",", "")) for label in labels if re.fullmatch(r"[\d,.]+", label)) >= most * 0.9


def test_a_search_narrows_and_stands_in_the_link(made: Made, opened: Open, recorded: Path) -> None:
    from playwright.sync_api import expect

    page = opened(made(recorded), "#signals", height=500)
    page.wait_for_selector("#signals .signal svg")
    field = page.locator("#signals input[type=search]")
    field.press_sequentially("rollout_gap/")
    expect(field).to_be_focused()
    assert page.url.endswith("#signals?find=rollout_gap%2F")
    names = page.locator("#signals .signals-group .signal figcaption button").all_inner_texts()
    assert len(names) > 3
    assert all(name.startswith("rollout_gap/") for name in names)
    page.locator("#signals .controls select").select_option("0")
    expect(field).to_have_value("rollout_gap/")


def test_names_and_messages_from_a_run_stay_text(tmp_path: Path, opened: Open) -> None:
    from flowledger.show.page import html
    from flowledger.show.page.document import document

    rows = [MetricRow(t_ns=step, step=step, name=HOSTILE, raw_name=HOSTILE, value=float(step)) for step in range(3)]
    run = written(tmp_path / "run", [[*rows, whole(1, HOSTILE, 0, 5)]])
    alarm: Data = {
        "id": HOSTILE, "order": "alarms", "verdict": "fail", "step": 1, "stage": None, "rank": None, "next_step": HOSTILE, "message": HOSTILE,
        "evidence": [HOSTILE], "scope": "run", "severity": "error", "position": 1, "needs": None, "fix": None, "confidence": 1.0,
    }  # fmt: skip
    with book(run, metrics=[Metric(name=HOSTILE, values={0: 1.0, 1: 2.0})], findings=[alarm]) as made:
        (tmp_path / "page.html").write_text(html.page(document(made)), encoding="utf-8")
    page = opened(tmp_path / "page.html", "#signals")
    page.wait_for_selector("#signals .signal svg")
    assert page.locator(".alarms strong").inner_text() == HOSTILE
    assert page.locator("#signals img").count() == 0
    assert page.title() != "1"


def test_it_speaks_chinese_and_fits_a_phone(made: Made, opened: Open, recorded: Path) -> None:
    page = opened(made(recorded), "#signals", lang="zh", width=390, dark=True)
    page.wait_for_selector("#signals .signal svg")
    assert page.locator("#signals .signals-group h3").first.inner_text() == "先看这些"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
