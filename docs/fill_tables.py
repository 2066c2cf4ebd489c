"""Fill the tables of these pages from the flow's own tables: python docs/fill_tables.py

A page marks the place of a table with `<!-- table: NAME -->` and `<!-- end -->`; pages ending in `.zh-CN.md` get Chinese.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from flowledger.flow.axes import CUTS
from flowledger.flow.dims import SYMBOLS
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.tables.metrics import metrics

MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in cells)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def symbols(zh: bool) -> str:
    head = ("符号", "含义") if zh else ("symbol", "meaning")
    return table(head, ((f"`{name}`", texts[zh]) for name, texts in SYMBOLS.items()))


def axes(zh: bool) -> str:
    head = ("轴", "切什么") if zh else ("axis", "what it cuts")
    return table(head, ((f"`{name}`", texts[zh]) for name, texts in CUTS.items()))


def kinds(zh: bool) -> str:
    head = ("种类", "含义") if zh else ("kind", "meaning")
    return table(head, ((f"`{name}`", texts[zh]) for name, texts in KINDS.items()))


def stage_table(zh: bool) -> str:
    head = ("阶段", "做什么", "逐个处理", "聚合") if zh else ("stage", "what it does", "works on", "aggregates")
    return table(
        head,
        (
            (f"`{row.name}`", row.purpose_zh if zh else row.purpose, ", ".join(row.works_on), row.aggregates_zh if zh else row.aggregates)
            for row in stages().values()
        ),
    )  # fmt: skip


def tensor_table(zh: bool) -> str:
    head = (
        ("tensor", "形状", "mask", "产生", "释放于", "用途")
        if zh
        else ("tensor", "shapes", "mask", "made in", "freed after", "what it is for")
    )
    never = "不释放" if zh else "never"
    return table(
        head,
        (
            (
                f"`{row.name}`",
                "<br>".join(f"`{form.shape}`" for form in row.forms),
                f"`{row.mask}`" if row.mask else "",
                f"`{row.producer}`",
                f"`{row.freed_by}`" if row.released_by else never,
                row.purpose_zh if zh else row.purpose,
            )
            for row in tensors().values()
        ),
    )


def metric_table(zh: bool) -> str:
    head = ("指标", "单位", "层次", "定义") if zh else ("metric", "unit", "level", "definition")
    return table(
        head,
        ((f"`{row.name}`", row.unit, row.level, row.definition_zh if zh else row.definition) for row in metrics().values()),
    )  # fmt: skip


TABLES: dict[str, Callable[[bool], str]] = {
    "symbols": symbols,
    "axes": axes,
    "kinds": kinds,
    "stages": stage_table,
    "tensors": tensor_table,
    "metrics": metric_table,
}


def filled(page: Path) -> str:
    """The page's text with every marked table as the flow has it now."""
    zh = page.name.endswith(".zh-CN.md")
    return MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]](zh)}{found[3]}", page.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.md"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page), encoding="utf-8")
