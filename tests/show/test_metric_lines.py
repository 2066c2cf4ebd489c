"""Metrics in a terminal: of a long run a line each that fits, and where it left the healthy range; of one step its numbers."""

import io
import re

import pytest
from rich.console import Console

from flowledger.show import metric_lines
from flowledger.show.columns import Table

STEPS = 240


def row(step: int | None, name: str, value: float | None, special: str | None = None) -> dict[str, object]:
    return {"step": step, "name": name, "value": value, "special": special}


def long_run() -> list[dict[str, object]]:
    """`clip_ratio` is healthy up to 0.3, and above it from step 200 on; `kl` is nan once; `late` begins in the last step."""
    rows = [row(step, "clip_ratio", 0.1 if step < 200 else 0.5) for step in range(STEPS)]
    rows += [row(step, "load/update_actor/length_squares", 8104.0 + step) for step in range(STEPS)]
    rows += [row(step, "advantage/mean", -9.313225746e-10 * step) for step in range(STEPS)]
    rows += [row(step, "memory/allocated_peak", float(3 << 30)) for step in range(STEPS)]
    rows += [row(step, "kl", None if step == 7 else 0.1, "nan" if step == 7 else None) for step in range(STEPS)]
    return [*rows, row(STEPS - 1, "late", 2.0)]


def drawn(rows: list[dict[str, object]], width: int) -> list[str]:
    out = io.StringIO()
    metric_lines.draw(Table("metrics", "run", (), rows), Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [70, 80, 100, 120, 200])
def test_each_metric_of_a_long_run_is_one_line_that_fits(width: int) -> None:
    lines = drawn(long_run(), width)
    assert max(map(len, lines)) <= width
    named = {line.split()[0]: line for line in lines if line.split()}
    assert "load/update_actor/length_squares" in named or width < 80
    assert not any(re.match(r" \S{1,8}$", line) for line in lines) or width < 80  # no name goes on in a line of its own


def test_the_line_has_first_last_extremes_trend_and_where_it_left_the_healthy_range() -> None:
    lines = {line.split()[0]: line.split()[1:] for line in drawn(long_run(), 100) if line.split()}
    first, last, low, high, trend, *left = lines["clip_ratio"]
    assert (first, last, low, high) == ("0.1", "0.5", "0.1", "0.5") and " ".join(left) == "at 200 (40x)"
    assert trend[0] == "▁" and trend[-1] == "█" and len(trend) >= 8  # the whole course, not its end
    assert lines["memory/allocated_peak"][:2] == ["3.0G", "3.0G"]
    assert lines["kl"][-2:] == ["at", "7"] and "×" in lines["kl"][4] and lines["late"][-3:] == ["(in", "1", "step)"]
    text = " ".join(" ".join(drawn(long_run(), 100)).split())
    assert "left their healthy range: clip_ratio, kl" in text and "240 steps; --step N" in text


def test_one_step_shows_its_numbers_with_unit_and_healthy_range() -> None:
    rows = [row(3, "clip_ratio", 0.5), row(3, "entropy", 1.2345678), row(3, "own/name", None, "inf")]
    lines = {line.split()[0]: line.split()[1:] for line in drawn(rows, 100) if line.split()}
    assert lines["clip_ratio"] == ["0.5", "·", "fraction", "0", "…", "0.3", "!"]
    assert lines["entropy"][:3] == ["1.235", "·", "nats"] and lines["own/name"] == ["inf", "·", "!"]


def test_bytes_are_written_as_bytes_and_no_number_needs_more_than_nine_signs() -> None:
    bytes_, squares = 68_612_102_554.0, 123_456_789_012.0
    rows = [
        row(step, name, value)
        for step in (0, 1)
        for name, value in (("memory/allocated_peak", bytes_), ("load/rollout/length_squares", squares), ("lr", 1e-6))
    ]
    for width, told in ((100, ["1.23e11", "1e-6"]), (160, ["123,456,789,012", "1e-6"])):
        lines = {line.split()[0]: line.split()[1:] for line in drawn(rows, width) if line.split()}
        assert "64G" in lines["memory/allocated_peak"]
        assert [lines["load/rollout/length_squares"][-2], lines["lr"][-2]] == told
    (line,) = [line for line in drawn(rows[:3], 100) if "allocated_peak" in line]
    assert line.split()[1] == "64G"
    assert not re.search(r"e[+-]0|e\+", "".join(drawn(rows, 100) + drawn(rows[:3], 100)))


def test_bars_are_means_of_equal_shares_of_the_steps() -> None:
    assert metric_lines.spark([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert metric_lines.spark([0.0, 1.0, 2.0, 3.0], 2) == "▁█" and metric_lines.spark([], 4) == ""
    assert metric_lines.spark([1.7e308, -1.7e308, 1.7e308, 1.7e308], 3) == "█▁█"  # wider than a number can be
    assert metric_lines.spark([5.0, 5.0], 8) == "▁▁" and metric_lines.spark([0.0, None, 4.0, 4.0], 2) == "×▁"
