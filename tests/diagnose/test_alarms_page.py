"""The page on alarms has every alarm, function and number of the code: python -m tests.diagnose.test_alarms_page fills its tables."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flowledger.diagnose.alarms import rules
from flowledger.diagnose.alarms.functions import FUNCTIONS
from flowledger.diagnose.alarms.numbers import numbers

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "alarms.md", DOCS / "alarms.zh-CN.md")
MARK = re.compile(r"(<!-- alarms: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GOALS = {
    "correctness": "正确性", "stability": "稳定性", "data": "数据质量", "performance": "性能", "balance": "负载", "memory": "显存",
}  # fmt: skip
ORIGINS = {
    "plan": ("plan", "计划"),
    "config": ("configuration", "配置"),
    "history": ("history", "历史"),
    "default": ("", ""),
}


def table(head: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *cells]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows)


def alarm_table(zh: bool) -> str:
    head = (
        ("告警", "目标", "级别", "连续步数", "说什么", "阈值来自")
        if zh
        else ("alarm", "goal", "severity", "for", "what it says", "threshold from")
    )
    return table(
        head,
        [
            (f"`{row.id}`", GOALS[row.goal] if zh else row.goal, row.severity, str(row.hold), said(row, zh), thresholds(row, zh))
            for row in rules.built_in()
        ],
    )  # fmt: skip


def said(row: rules.Rule, zh: bool) -> str:
    return re.sub(r"\{[^{}]*\}", "…", row.zh if zh else row.message).replace("<stage>", "…")


def thresholds(row: rules.Rule, zh: bool) -> str:
    found = []
    for name, threshold in row.thresholds.items():
        words = [
            ORIGINS[origin][zh] or (f"{float(text):g}" if re.fullmatch(r"[-\d.e]+", text) else f"`{text}`")
            for origin, text in threshold.origins.items()
        ]
        found.append(f"`{name}`: " + ("，否则 " if zh else ", else ").join(words))
    return "; ".join(found)


def function_table(zh: bool) -> str:
    head = ("函数", "含义") if zh else ("function", "meaning")
    return table(head, [(f"`{row.usage}`", row.means_zh if zh else row.means) for row in FUNCTIONS.values()])


def number_table(zh: bool) -> str:
    head = ("数值", "单位", "含义", "需要") if zh else ("number", "unit", "meaning", "needs")
    return table(
        head,
        [(f"`{row.name}`", row.unit, row.zh if zh else row.definition, row.needs) for row in numbers().values()],
    )


TABLES: dict[str, Callable[[bool], str]] = {
    "table": alarm_table,
    "functions": function_table,
    "numbers": number_table,
}


def filled(page: Path) -> str:
    zh = page.name.endswith(".zh-CN.md")
    return MARK.sub(
        lambda found: found[1] + "\n" + TABLES[found[2]](zh) + "\n" + found[3], page.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {found[2] for found in MARK.finditer(text)} == TABLES.keys()
    assert filled(page) == text, "run: python -m tests.diagnose.test_alarms_page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_rows_that_a_page_shows_can_be_read(page: Path) -> None:
    """Each YAML block of the page is a file that `--rules` takes."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        rules.compiled(rules.parsed(block, page.name))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")
