"""The overview: its numbers are those of `--json`, its parts add up, and each finding leads to where it can be seen."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from flowledger.cli.page import book_of, metrics
from flowledger.diagnose.laws import LAWS
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show import tables
from flowledger.show.page import evidence, figures, overview, overview_charts, overview_time, signals, theme
from flowledger.show.page.book import Book, Metric
from flowledger.show.page.choice import Choice
from flowledger.show.report import own_cost as told_cost

Open = Callable[..., Any]
Made = Callable[..., Path]
Data = dict[str, Any]
VIEWS = {"overview", "flow", "shapes", "memory", "lifetimes", "mesh", "sample", "signals"}
HOSTILE = '<img src=x onerror="document.title=1"></script><script>alert(1)</script>'
MIB = 2**20


@cache
def data_of(run: Path, plan: Path | None = None) -> Data:
    with book_of(run, plan) as book:
        return overview.data(book, Choice())


@contextmanager
def bare(run: Path) -> Iterator[Book]:
    """A run of which nothing was looked for: quicker where no finding is asked for."""
    with Ledger(run) as ledger:
        yield Book(ledger=ledger, metrics=metrics(ledger))


def ms(value: float) -> int:
    return int(value * 1e6)


def spans(
    step: int, rank: int, start: float, stages: dict[str, float], *, open_stage: str | None = None
) -> Iterator[SpanRow]:
    """A step of stages that follow one another, in milliseconds; 5 ms lie after the last."""
    at, first = start, step * 100 + 1
    end = None if open_stage else ms(start + sum(stages.values()) + 5)
    yield SpanRow(
        t_ns=ms(start), step=step, rank=rank, id=first, event="whole" if end else "begin", name="step", span_kind="stage",
        start_ns=ms(start), end_ns=end,
    )  # fmt: skip
    for number, (stage, lasts) in enumerate(stages.items(), first + 1):
        closed = stage != open_stage
        yield SpanRow(
            t_ns=ms(at), step=step, rank=rank, role="actor", stage=stage, id=number, parent=first, event="whole" if closed else "begin",
            name=stage, span_kind="stage", start_ns=ms(at), end_ns=ms(at + lasts) if closed else None,
        )  # fmt: skip
        at += lasts


def written(path: Path, rows: list[Any], *, state: str = "closed", recorder: dict[str, int] | None = None) -> Path:
    """A run of one process with these rows."""
    book = create(path, Manifest(run=path.name))
    ink = Writer(book.part("actor", 0))
    for row in rows:
        ink.put(row)
    ink.close()
    book.close(state, recorder)
    return path


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 35, 15 and 25 ms; a peak of 7 MiB of which 6 are known, of a device with 14; a metric; findings."""
    rows: list[Any] = []
    for step, (rollout, update) in enumerate([(10, 20), (4, 6), (8, 12)]):
        rows += spans(step, 0, step * 100, {"rollout": rollout, "update_actor": update})
        told = {
            "grad_norm": 1.5 + step,
            "recorder/cpu_s": (3.5e-3, 6.5e-3, 7.5e-3)[step],
            "recorder/ns_per_row": 1500.0,
        }
        rows += [MetricRow(t_ns=step, step=step, name=name, raw_name=name, value=value) for name, value in told.items()]
    peak: Data = {"t_ns": 1, "step": 1, "stage": "update_actor", "phase": "backward", "rank": 0, "instant": "peak"}
    rows += [
        MemoryRow(**peak, kind="param", allocated=4 * MIB),
        MemoryRow(**peak, kind="activation", allocated=2 * MIB),
        MemoryRow(**peak, kind="total", allocated=7 * MIB, reserved=8 * MIB, limit=14 * MIB),
        FindingRow(id="grad_norm_spike", order="alarms", verdict="warn", message=HOSTILE, step=1, evidence=["step 1: grad_norm = 2.5"]),
        FindingRow(id="grad_norm_spike", order="alarms", verdict="warn", message="and again", step=2),
        FindingRow(id="shapes_conserved", order="laws", verdict="fail", message="not so: advantages on rank 3"),
        FindingRow(id="oom_near", order="alarms", verdict="warn", message="nearly full", stage="update_actor", rank=3, step=2),
        FindingRow(id="kl_wrong", order="checks", verdict="skipped", message="not checked", needs=["tokens"]),
    ]  # fmt: skip
    return written(
        tmp_path_factory.mktemp("overview") / "three", rows, recorder={"rows": 42, "bytes": 3072, "dropped": 1}
    )


# --------------------------------------------------------------------------------------------------- where time and memory go


def test_the_step_in_the_middle_and_the_last_are_shown(three_steps: Path) -> None:
    assert data_of(three_steps)["time"]["whole"] == {
        "last": pytest.approx(0.025)
    }  # 25 ms is the median of 35, 15 and 25


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({0: 3.0}, {"last": 0}),
        ({0: 3.0, 1: 1.0, 2: 2.0}, {"last": 2}),
        ({0: 2.0, 1: 1.0, 2: 3.0}, {"middle": 0, "last": 2}),
        ({4: 1.0, 5: 9.0}, {"middle": 4, "last": 5}),
    ],
    ids=["one", "middle_is_last", "middle", "even"],
)
def test_the_step_in_the_middle_is_a_step_that_was(seconds: dict[int, float], chosen: dict[str, int]) -> None:
    assert overview_time._middle_and_last(sorted(seconds), seconds) == chosen


def test_the_parts_of_a_bar_make_up_the_step(three_steps: Path, recorded: Path) -> None:
    for run in (three_steps, recorded):
        time = data_of(run)["time"]
        for which, whole in time["whole"].items():
            bars = [bar for bar in time["bars"] if bar["which"] == which]
            assert sum(bar["seconds"] for bar in bars) == pytest.approx(whole, rel=1e-9), run


def test_stages_last_as_long_as_the_table_says(recorded: Path) -> None:
    rows = data_of(recorded)["time"]["rows"]
    assert rows
    with Ledger(recorded) as ledger:
        for row in rows:
            (told,) = tables.table(ledger, "stages", step=row["step"], stage=row["stage"]).rows
            assert {name: told[name] for name in ("seconds", "share", "waited_seconds")} == {
                name: row[name] for name in ("seconds", "share", "waited_seconds")
            }


def test_a_wait_is_a_part_of_its_stage() -> None:
    at = {"which": "last", "step": 0}
    rows = [
        {**at, "stage": "update_actor", "seconds": 3.0, "waited_seconds": 1.0},
        {**at, "stage": "rollout", "seconds": 2.0, "waited_seconds": None},
    ]
    bars = overview_time._timed(rows, {"last": 6.0})["bars"]
    assert [(bar["told"]["en"], bar["seconds"], bar["amount"]) for bar in bars] == [
        ("update_actor: 2.00 s", 2.0, 2.0), ("update_actor, waiting for others: 1.00 s", 1.0, 1.0), ("rollout: 2.00 s", 2.0, 2.0),
        ("between stages: 1.00 s", 1.0, 1.0),
    ]  # fmt: skip
    assert {bar["bar"]["zh"] for bar in bars} == {"最后（第 0 步）"}


def test_what_a_log_says_of_its_stages_is_drawn_too(imported: Path) -> None:
    with bare(imported) as book:
        time = overview_time.time_of(book)
        told = {metric.name: metric.values for metric in book.metrics}
    assert time["rows"]
    for row in time["rows"]:
        assert row["seconds"] == told[f"stage_time_s/{row['stage']}"][row["step"]]


def test_the_peak_is_the_one_that_the_table_names(three_steps: Path, recorded: Path, planned: Path) -> None:
    for run, which in ((three_steps, "recorded"), (recorded, "recorded"), (planned, "planned")):
        memory = data_of(run)["memory"]
        peak = memory["peaks"][which]
        with Ledger(run) as ledger:
            told = tables.table(ledger, "memory").summary["peak"]
        assert {name: peak[name] for name in ("peak", "stage", "step", "rank")} == {
            name: told[name] for name in ("peak", "stage", "step", "rank")
        }
        assert sum(bar["bytes"] for bar in memory["bars"]) == peak["peak"]


def test_what_no_kind_explains_stands_beside_the_kinds(three_steps: Path) -> None:
    memory = data_of(three_steps)["memory"]
    assert {bar["kind"]: bar["bytes"] for bar in memory["bars"]} == {
        "param": 4 * MIB,
        "activation": 2 * MIB,
        "residue": MIB,
    }
    assert memory["limit"] == 14 * MIB
    assert memory["charts"]["memory"]["layer"][1]["encoding"]["x"] == {"datum": 14.0}  # in MiB, as the bars


def test_charts_name_colours_that_the_style_has(three_steps: Path, recorded: Path) -> None:
    for run in (three_steps, recorded):
        made = data_of(run)
        for spec in (made["time"]["charts"]["time"], made["memory"]["charts"]["memory"]):
            for dark in (False, True):
                assert "var(--" not in json.dumps(theme.dressed(spec, dark=dark))
            scale = (spec.get("encoding") or spec["layer"][0]["encoding"])["color"]["scale"]
            assert len(scale["domain"]) == len(set(scale["domain"])) == len(scale["range"])


@pytest.mark.parametrize(("most", "unit"), [(3.0, "GiB"), (0.99, "MiB"), (1e-12, "B")], ids=["gib", "mib", "nothing"])
def test_a_unit_is_the_largest_of_which_there_is_one(most: float, unit: str) -> None:
    assert overview_charts.unit_of(most * 2**30, overview_charts.SIZES)[0] == unit


# ------------------------------------------------------------------------------------------------------------------- figures


def test_figures_are_those_of_the_table_of_metrics(recorded: Path) -> None:
    with Ledger(recorded) as ledger:
        from flowledger.diagnose.measures import series_of

        told = series_of(ledger)
        shown = {row["metric"]: row for row in data_of(recorded)["figures"]}
        assert {"step_time_s", "tokens_per_s", "reward/mean", "grad_norm", "memory/allocated_peak"} <= shown.keys()
        for name, row in shown.items():
            numbers = [value for _, value in sorted(told.by_step(name).items())]
            expected = (
                median(numbers)
                if row["key"] in ("step_time", "tokens_per_s")
                else max(numbers)
                if row["key"] == "memory"
                else numbers[-1]
            )
            assert row["value"] == expected, name
            assert [value for _, value in row["course"]] == numbers
        (reward,) = (row for row in shown.values() if row["key"] == "reward")
        assert reward["first"] == told.by_step("reward/mean")[0]


def test_a_figure_out_of_its_healthy_range_is_marked(tmp_path: Path) -> None:
    rows = [
        MetricRow(t_ns=1, step=0, name="grad_norm", raw_name="g", value=1e6),
        MetricRow(t_ns=1, step=0, name="entropy", raw_name="e", value=0.5),
    ]
    with bare(written(tmp_path / "run", rows)) as book:
        shown = {row["key"]: row["unhealthy"] for row in figures.figures(book)}
    assert shown == {"grad_norm": True, "entropy": False}


@pytest.fixture(scope="module")
def half_well(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every check holds, most samples are cut off and a step takes half a second."""
    told = {"truncation_ratio": 0.75, "eos_ratio": 0.25, "entropy": 0.5, "step_time_s": 0.5}
    rows: list[Any] = [MetricRow(t_ns=1, step=0, name=name, raw_name=name, value=value) for name, value in told.items()]
    rows.append(FindingRow(id="masks_nest", order="laws", verdict="pass", message="so it is"))
    return written(tmp_path_factory.mktemp("half_well") / "run", rows)


def test_what_is_outside_here_is_outside_in_signals(half_well: Path, recorded: Path) -> None:
    for run in (half_well, recorded):
        with bare(run) as book:
            told = [row["name"] for row in overview.unhealthy(book)]
            drawn = [row["name"] for row in signals.data(book, Choice())["metrics"] if row["outside"]]
        assert sorted(told) == sorted(drawn)
    with bare(half_well) as book:
        assert {row["name"]: row["value"] for row in overview.unhealthy(book)} == {
            "truncation_ratio": 0.75,
            "eos_ratio": 0.25,
        }


@pytest.mark.parametrize(("value", "outside"), [(math.nan, True), (math.inf, True), (0.05, False), (0.31, True)])
def test_what_is_no_number_is_not_healthy(value: float, outside: bool) -> None:
    assert signals.is_outside(Metric(name="truncation_ratio", healthy=(0.0, 0.3), values={0: 0.9, 1: value})) is outside


def test_a_long_course_is_thinned_from_its_first_to_its_last() -> None:
    course = [(step, float(step)) for step in range(5000)]
    kept = figures.thinned(course)
    assert (kept[0], kept[-1], len(kept)) == (course[0], course[-1], figures.POINTS)
    assert kept == sorted(set(kept))
    assert figures.thinned(course[:50]) == course[:50]


def test_the_recorders_own_cost_is_what_the_report_says(three_steps: Path) -> None:
    """3.5 and 1 ms of the 35 and 25 that were not watched, 3 of the 15 that were."""
    made = data_of(three_steps)
    assert made["cost"] == {
        "rows": 42, "bytes": 3072, "dropped": 1, "us_per_event": 1.5, "cpu_s": pytest.approx(7.5e-3),
        "share": pytest.approx(4.5 / 60), "watched_share": pytest.approx(3 / 15),
    }  # fmt: skip
    assert (
        made["cost_said"]["en"]
        == "42 events, 3.0KB, 1 dropped, 1.5 µs an event, 7.5% of a step, 20.0% where operators were watched"
    )
    with Ledger(three_steps) as ledger:
        said = told_cost(ledger)
    assert "(7.50%)" in said and "(20.00%)" in said and "42 rows" in said and "1 dropped" in said


def test_an_open_run_says_what_recording_has_cost_so_far(tmp_path: Path) -> None:
    rows = [MetricRow(t_ns=step, step=step, name=f"recorder/{name}", raw_name=name, value=value * (step + 1))
            for step in (0, 1) for name, value in (("rows", 10), ("bytes", 1024), ("dropped", 0), ("ns_per_row", 1500))]  # fmt: skip
    with bare(written(tmp_path / "run", rows, state="interrupted")) as book:
        cost = figures.own_cost(book)
    assert cost is not None
    assert (cost["rows"], cost["bytes"], cost["dropped"], cost["us_per_event"]) == (20, 2048, 0, 3.0)


# ------------------------------------------------------------------------------------------------------------------ findings


def test_findings_are_those_of_the_table_worst_first(three_steps: Path, planned: Path, imported: Path) -> None:
    for run in (three_steps, planned):
        made = data_of(run)
        with Ledger(run) as ledger:
            told = sorted((row["id"], row["message"]) for row in tables.table(ledger, "findings").rows)
        assert sorted((row["id"], row["message"]) for row in made["findings"]) == told
        assert made["counts"] == {
            verdict: sum(row["verdict"] == verdict for row in made["findings"]) for verdict in made["counts"]
        }
    worst = ("fail", "warn", "skipped", "pass")
    ranks = [worst.index(row["verdict"]) for row in data_of(imported)["findings"]]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("finding", "link"),
    [
        ({"id": "shapes_conserved", "order": "laws", "message": "advantages of 3 rows on rank 3"}, ("shapes", {"find": "advantages"})),
        ({"id": "mask_shape", "order": "shape_mismatch", "stage": "update_actor", "message": "values [4] …"},
         ("shapes", {"stage": "update_actor", "find": "values", "mismatch": "1"})),
        ({"id": "oom_near", "order": "alarms", "stage": "update_actor", "rank": 3, "step": 2, "message": "nearly full"},
         ("memory", {"stage": "update_actor", "rank": "3", "step": "2"})),
        ({"id": "crash", "order": "import", "stage": "update_actor", "message": "torch.OutOfMemoryError: CUDA out of memory on rank 5"},
         ("memory", {"stage": "update_actor", "rank": "5"})),
        ({"id": "crash", "order": "import", "step": 4, "message": "ValueError"}, ("signals", {"step": "4"})),
        ({"id": "load_imbalance_tokens", "order": "alarms", "step": 1, "message": "uneven"}, ("mesh", {"step": "1", "heat": "tokens"})),
        ({"id": "ref_kl_negative", "order": "alarms", "step": 7, "message": "x", "evidence": ["step 7: ref_kl = -0.4", "bound = 0"]},
         ("signals", {"step": "7", "find": "ref_kl"})),
        ({"id": "loss_wrong", "order": "checks", "step": 0, "message": "not so. step 0: sample 12, token 3"}, ("sample", {"sample": "12", "step": "0"})),
        ({"id": "tensors_leak", "order": "checks", "message": "old_log_prob is held"}, ("lifetimes", {"tensor": "old_log_prob"})),
        ({"id": "plan_agrees", "scope": "diff", "message": "differ"}, ("shapes", {"mismatch": "1"})),
        ({"id": "memory.kv_pool", "scope": "plan", "order": "oom", "stage": "rollout", "message": "59 samples"}, ("memory", {"stage": "rollout"})),
    ],
    ids=lambda one: one["id"] if isinstance(one, dict) else one[0],
)  # fmt: skip
def test_a_finding_leads_to_its_evidence(finding: Data, link: tuple[str, Data]) -> None:
    assert evidence.evidence_of({"verdict": "fail", "scope": "run", **finding}) == {"view": link[0], "asked": link[1]}


def test_every_alarm_law_and_check_leads_somewhere() -> None:
    rules = yaml.safe_load(files("flowledger.diagnose.alarms").joinpath("alarms.yaml").read_text(encoding="utf-8"))
    alarms = [("alarms", row["id"]) for row in (rules["alarms"] if isinstance(rules, dict) else rules)]
    checks = [("checks", "unheard_of"), *(("laws", name) for name, *_ in LAWS)]
    assert len(alarms) > 40
    for order, name in [*alarms, *checks]:
        found = evidence.evidence_of({"id": name, "scope": "run", "order": order, "message": ""})
        assert found is not None and found["view"] in VIEWS, name


def test_a_rule_of_a_configuration_has_no_picture() -> None:
    assert (
        evidence.evidence_of({"id": "verl.I1", "scope": "plan", "order": None, "message": "32 micro-batches"}) is None
    )


# -------------------------------------------------------------------------------------------------------- plan, and what stopped


def test_the_batch_chain_multiplies_out(planned: Path) -> None:
    made = data_of(planned)["plan"]
    size = {row["symbol"]: row["size"] for row in made["chain"]}
    times = {row["symbol"]: row["times"] for row in made["chain"]}
    assert size["B_prompt"] * size["G"] == size["B"]
    assert times["B_mini"] * size["B_mini"] == size["B"] and times["B_micro"] * size["B_micro"] == size["B_mini"]
    assert all(row["per_rank"] * 8 == row["size"] for row in made["chain"] if "per_rank" in row)
    assert made["starts"] and made["fits"] == "pass"


@pytest.mark.parametrize(
    ("checks", "starts", "fits"),
    [
        ([("memory.fits", "oom", "fail")], True, "fail"),
        ([("memory.fits", "oom", "pass"), ("memory.engine", "oom", "fail")], True, "fail"),
        ([("memory.fits", "oom", "skipped"), ("verl.A1", None, "fail")], False, "skipped"),
        ([], True, "skipped"),
    ],
    ids=["too_large", "engine", "broken_rule", "not_asked"],
)
def test_a_plan_says_whether_it_starts_and_fits(planned: Path, checks: list[Any], starts: bool, fits: str) -> None:
    found = [{"id": name, "order": order, "verdict": verdict, "scope": "plan"} for name, order, verdict in checks]
    with Ledger(planned) as ledger:
        made = overview.plan_of(Book(ledger=ledger, findings=found))
    assert made is not None and (made["starts"], made["fits"]) == (starts, fits)


def test_a_run_that_died_says_where(tmp_path: Path) -> None:
    rows = [
        *spans(0, 0, 0, {"rollout": 4}),
        *spans(1, 0, 50, {"rollout": 4, "update_actor": 9}, open_stage="update_actor"),
    ]
    with bare(written(tmp_path / "run", rows, state="crashed")) as book:
        made = overview.stopped(book)
    assert made is not None
    assert made["state"] == "crashed"
    assert [(row["step"], row["stage"], row["ranks"]) for row in made["places"]] == [(1, "update_actor", [0])]


def test_a_run_that_ended_well_stopped_nowhere(three_steps: Path, planned: Path) -> None:
    assert data_of(three_steps)["stopped"] is data_of(planned)["stopped"] is None


def test_an_empty_run_has_an_overview(tmp_path: Path) -> None:
    with bare(written(tmp_path / "run", [], state="crashed")) as book:
        made = overview.data(book, Choice())
    assert (made["figures"], made["memory"]["peaks"], made["stopped"]["places"]) == ([], {}, [])
    assert made["time"]["missing"] and made["memory"]["missing"]


# ------------------------------------------------------------------------------------------------------------------ in a browser


def test_the_page_says_the_numbers_and_leads_to_the_evidence(opened: Open, made: Made, three_steps: Path) -> None:
    page = opened(made(three_steps))
    assert page.locator("[data-figure=grad_norm] .figure").inner_text() == "3.5"
    assert "42 events, 3.0KB, 1 dropped" in page.locator("#own_cost").inner_text()
    open_ones = page.locator("#overview > .body > .findings > .finding")
    assert open_ones.count() == 3  # two of one name stand together
    first, second, third = open_ones.all()
    assert third.locator("a.to").get_attribute("href") == "#memory?rank=3&stage=update_actor&step=2"
    assert re.search(r"fails\s+shapes_conserved", first.inner_text())
    assert HOSTILE in second.inner_text() and page.locator("img").count() == 0
    assert page.locator("#time tbody tr").count() == 3 and page.locator("#peak tbody tr").count() == 4
    first.locator("a.to").click()
    page.wait_for_function("location.hash === '#shapes?find=advantages'")


def test_all_is_not_well_where_a_metric_is_outside(opened: Open, made: Made, half_well: Path) -> None:
    page = opened(made(half_well))
    headline = page.locator("#overview .headline")
    assert "warn" in headline.get_attribute("class")
    assert (
        "2 metrics are outside their healthy range" in headline.inner_text() and "All well" not in headline.inner_text()
    )
    assert page.locator("#unhealthy a").all_inner_texts() == ["eos_ratio 25%", "truncation_ratio 75%"]
    page.locator("#unhealthy a").first.click()
    page.wait_for_selector("#signals .signal .outside")


def test_the_overview_fits_a_phone_in_both_languages(
    opened: Open, made: Made, three_steps: Path, planned: Path
) -> None:
    for run in (three_steps, planned):
        page = opened(made(run), "#overview", width=390, height=800, lang="zh")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0 and "需注意" in page.locator("#overview").inner_text()


def test_numbers_stay_finite(three_steps: Path, recorded: Path) -> None:
    for run in (three_steps, recorded):
        for bar in [*data_of(run)["time"]["bars"], *data_of(run)["memory"]["bars"]]:
            assert math.isfinite(bar["amount"]) and bar["amount"] > 0
