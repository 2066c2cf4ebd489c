"""The columns of `explain sp-vs-cp`: what stands in each cell, in two languages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flowledger.show.languages import Language, said
from flowledger.show.words import ABSENT, human_bytes, human_count, human_seconds, human_shape
from flowledger.tables.operators import FAILURES, operators, schemes

Row = Mapping[str, Any]
Cell = Callable[[Row], str | None]
Column = tuple[str, str, Cell]  # English heading, Chinese heading, what stands in it
TITLES = {scheme.name: scheme.title for scheme in schemes()} | {"any": "any"}
CONTEXTS = {"token": ("no", "否"), "blocks": ("by block", "逐块"), "whole": ("at once", "一次全要")}
WHEN = {"before": ("before", "之前"), "after": ("after", "之后"), "within": ("within", "期间")}
# Chinese for what the document says in English words.
ZH = {
    "hidden": "能掩盖", "exposed": "暴露", "mostly hidden": "大部分能掩盖", "forward": "前向", "backward": "反向", "any": "任意",
    "never": "无", **FAILURES, **{one.name: one.zh for one in operators()},
}  # fmt: skip


def spoken(word: str, lang: Language) -> str:
    """A word of the document in the language that is asked for."""
    return ZH.get(word, word) if lang == "zh" else word


def named(key: str, lang: Language) -> str:
    """The key of a text in that language."""
    return f"{key}_zh" if lang == "zh" else key


def of_scheme(row: Row) -> Column:
    """The column of local shapes under one scheme."""
    name, heading = row["scheme"], f"{row['title']} {row['axis']} {row['degree']}"
    return heading, heading, lambda point: human_shape(point[name])


HELD: tuple[Column, ...] = (
    ("scheme", "方案", lambda row: row["title"]),
    ("degree", "并行度", lambda row: f"{row['axis']} {row['degree']}{'' if row['used'] else ' *'}"),
    ("first rank has", "首个 rank", lambda row: _positions(row["first_rank"])),
    ("last rank has", "末个 rank", lambda row: _positions(row["last_rank"])),
    (
        "core: tokens × q/kv heads",
        "核心：token × q/kv 头",
        lambda row: f"{row['core_tokens']:,} × {row['core_heads']}/{row['core_kv_heads']}",
    ),
    ("KV at once", "同时在场的 KV", lambda row: human_bytes(row["kv_bytes"])),
    ("residual", "残差", lambda row: human_bytes(row["residual_bytes"])),
)


def _positions(runs: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{first}–{last}" for first, last in runs) or ABSENT


def operator_columns(lang: Language) -> tuple[Column, ...]:
    """Of the table of operators."""
    return (
        ("operator", "算子", lambda row: spoken(row["operator"], lang)),
        ("scheme", "方案", lambda row: _of(row["schemes"], lang)),
        ("communicates", "通信", lambda row: _collective(row, lang)),
        ("bytes", "字节", lambda row: human_bytes(row["bytes"]) if row["comm_type"] else None),
        ("splits\nby chunk", "可按\n块切", lambda row: _yes(row["splits_by_chunk"], lang)),
        ("global\ncontext", "全局\n上下文", lambda row: said(*CONTEXTS[row["global_context"]], lang)),
        ("can be\npipelined", "可流\n水化", lambda row: _yes(row["pipelined"], lang)),
        ("T_compute", "T_compute", lambda row: time_of(row["compute_s"])),
    )  # fmt: skip


def _of(names: Sequence[str], lang: Language) -> str:
    """Schemes by their titles: `all`, or `others` than those above."""
    if not names:
        return said("all", "全部", lang)
    return said("others", "其余", lang) if names == ("others",) else ", ".join(TITLES[name] for name in names)


def _collective(row: Row, lang: Language) -> str:
    if row["comm_type"] is None:
        return said("local", "本地", lang)
    return f"{row['comm_type']} {row['group']} {said(*WHEN[row['when']], lang)}"


def _yes(value: bool, lang: Language) -> str:
    return said("yes", "是", lang) if value else said("no", "否", lang)


def hiding_columns(lang: Language) -> tuple[Column, ...]:
    """Of the criterion, message by message."""
    return (
        ("operator", "算子", lambda row: spoken(row["operator"], lang)),
        ("", "", lambda row: spoken(row["direction"], lang)),
        ("chunk", "块", lambda row: None if row["chunk"] is None else human_count(row["chunk"])),
        ("T_compute", "T_compute", lambda row: time_of(row["compute_s"])),
        ("T_comm", "T_comm", lambda row: time_of(row["comm_s"])),
        ("break-\neven", "平衡\n块长", lambda row: _break_even(row, lang)),
        ("GB/s to\nhide", "掩盖所需\nGB/s", lambda row: row["needs_bytes_per_s"] and f"{row['needs_bytes_per_s'] / 1e9:,.0f}"),
        ("exposed", "暴露", lambda row: time_of(row["exposed_s"])),
        ("verdict", "结论", lambda row: verdict(row, lang)),
    )  # fmt: skip


def _break_even(row: Row, lang: Language) -> str | None:
    if row["chunk"] is None or row["compute_s"] is None:
        return None
    return spoken("never", lang) if row["break_even_chunk"] is None else human_count(row["break_even_chunk"])


def verdict(row: Row, lang: Language) -> str:
    """`hidden`, or `exposed` and the numbers of what keeps it from hiding, which stand beneath the table."""
    unmet = ", ".join(str(number) for number, word in enumerate(FAILURES, 1) if word in row["failing"])
    return spoken(row["verdict"] or "?", lang) + (f" [{unmet}]" if unmet else "")


def gathered(rows: Sequence[Row]) -> Iterator[Row]:
    """Operators in their order; schemes under which one does the same stand in one row, the numbers those of the first used."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    order = list(dict.fromkeys(row["operator"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["operator"]), row["comm_type"] is None)):
        same = (row["operator"], row["comm_type"], row["when"], row["group"], row["bytes"], row["splits_by_chunk"])
        found.setdefault(same, []).append(row)
    everyone = tuple(dict.fromkeys(row["scheme"] for row in rows))
    for alike in found.values():
        held = tuple(dict.fromkeys(row["scheme"] for row in alike))
        local = alike[0]["comm_type"] is None
        named = () if held == everyone else ("others",) if local else held
        yield {**next((row for row in alike if row["used"]), alike[0]), "schemes": named}


def matrix(chunks: Sequence[Row], lang: Language) -> tuple[tuple[Column, ...], list[Row]]:
    """The sweep with one row a chunk size and one column an operator."""
    places = list(dict.fromkeys((row["scheme"], row["operator"]) for row in chunks))
    sizes = dict.fromkeys(row["chunk"] for row in chunks)
    ratios = {(row["chunk"], row["scheme"], row["operator"]): row["compute_s"] / row["comm_s"] for row in chunks}

    def column(place: tuple[str, str]) -> Column:
        heading = f"{spoken(TITLES[place[0]], lang)}: {spoken(place[1], lang)}"
        return heading, heading, lambda row: _ratio(ratios[row["chunk"], *place])

    first: Column = ("chunk", "块", lambda row: human_count(row["chunk"]))
    return (first, *map(column, places)), [{"chunk": size} for size in sizes]


def _ratio(value: float) -> str:
    return f"{value:.2g}" if value < 100 else human_count(value)


def time_of(seconds: float | None) -> str | None:
    """A time of microseconds to seconds."""
    if seconds is None:
        return None
    return f"{seconds * 1e6:.0f} µs" if 0 < seconds < 1e-3 else human_seconds(seconds) if seconds else "0"
