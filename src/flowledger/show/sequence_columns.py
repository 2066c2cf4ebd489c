"""The columns of `explain sp-vs-cp`: what stands in each cell, in two languages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from flowledger.show.languages import Language, said
from flowledger.show.words import human_bytes, human_count, human_seconds, human_shape
from flowledger.tables.operators import FAILURES, operators, schemes

Row = Mapping[str, Any]
Cell = Callable[[Row], str | None]
Column = tuple[str, str, Cell]  # English heading, Chinese heading, what stands in it
TITLES = {scheme.name: scheme.title for scheme in schemes()} | {"any": "Experts"}
UNUSED = " *"
CONTEXTS = {"token": ("no", "否"), "blocks": ("by block", "逐分块"), "whole": ("at once", "一次全要")}
WAYS = {"forward": ("fwd", "前向"), "backward": ("bwd", "反向")}
DIRECTIONS = {"forward": ("forward", "前向"), "backward": ("backward", "反向")}
WHEN = {"before": ("before", "之前"), "after": ("after", "之后"), "within": ("within", "期间")}
# Chinese for what the document says in English words.
ZH = {
    "hidden": "已掩盖", "exposed": "暴露", "mostly hidden": "大部分已掩盖", "can hide": "能掩盖", "can mostly hide": "大部分能掩盖", "would hide": "换实现可掩盖", "would mostly hide": "换实现大部分可掩盖",
    "Experts": "专家", "never": "无", **FAILURES, **{one.name: one.zh for one in operators()},
}  # fmt: skip
# Who would cut a message -> what is said of it, and what a verdict becomes.
STATES = {
    "on": ("counted on, it needs no switch", "计入，无需开关"),
    "switch": ("not counted on, its switch is not read here", "不计入，此处不读取其开关"),
    "other": ("not counted on, not the code that runs here", "不计入，不是此处运行的代码"),
    "absent": ("not available in this framework's engine; Megatron has it", "此框架的引擎没有；Megatron 有"),
}
POSSIBLE: dict[str, dict[str, str]] = {
    "on": {},
    "switch": {"hidden": "can hide", "mostly hidden": "can mostly hide"},
    "other": {"hidden": "would hide", "mostly hidden": "would mostly hide"},
    "absent": {"hidden": "would hide", "mostly hidden": "would mostly hide"},
}
# English of the names of implementations -> Chinese.
BY = {
    "in backward ": "反向由 ",
    " by themselves": " 自行完成",
    " by itself": " 自行完成",
    " and ": " 与 ",
    "; ": "；",
    ", ": "、",
}


def spoken(word: str, lang: Language) -> str:
    """A word of the document in the language that is asked for."""
    return ZH.get(word, word) if lang == "zh" else word


def named(key: str, lang: Language) -> str:
    """The key of a text in that language."""
    return f"{key}_zh" if lang == "zh" else key


def titled(row: Row) -> str:
    """The title of a scheme, with a star where the configuration does not use it."""
    return f"{row['title']}{'' if row['used'] else UNUSED}"


def of_scheme(row: Row) -> Column:
    """The column of local shapes under one scheme."""
    name, heading = row["scheme"], f"{row['title']} {row['axis']} {row['degree']}{'' if row['used'] else UNUSED}"
    return heading, heading, lambda point: human_shape(point[name])


def held_columns(lang: Language) -> tuple[Column, ...]:
    """Of the table of samples and tokens."""
    return (
        ("scheme", "方案", lambda row: row["title"]),
        ("degree", "并行度", lambda row: f"{row['axis']} {row['degree']}{'' if row['used'] else UNUSED}" if row["axis"] else None),
        ("first rank has\nsample: tokens", "首个 rank\n样本：token", lambda row: _pieces(row, "first_rank", lang)),
        ("last rank has\nsample: tokens", "末个 rank\n样本：token", lambda row: _pieces(row, "last_rank", lang)),
        ("core: tokens ×\nq/kv heads", "核心：token ×\nq/kv 头", lambda row: f"{row['core_tokens']:,} × {row['core_heads']}/{row['core_kv_heads']}"),
        ("KV at once", "同时在场的 KV", lambda row: human_bytes(row["kv_bytes"])),
        ("residual", "残差", lambda row: human_bytes(row["residual_bytes"])),
    )  # fmt: skip


def _pieces(row: Row, key: str, lang: Language) -> str:
    """`0–1 whole; 2: 0–511`: positions of samples; `each` where a rank has the same of all of them."""
    if row["rank_tokens"] >= row["row_tokens"]:
        return said("all", "全部", lang)
    if not row[key]:
        return said("filling only", "只有填充", lang)
    return said("; ", "；", lang).join(_piece(one, row, lang) for one in row[key])


def _piece(one: Row, row: Row, lang: Language) -> str:
    first, last = one["samples"]
    every = row["samples"] > 1 and last - first + 1 == row["samples"]
    samples = said("each", "每个", lang) if every else str(first) if first == last else f"{first}–{last}"
    if one["runs"] == [[0, row["sample_tokens"] - 1]]:
        return samples + said(" whole", " 整个", lang)
    return samples + said(": ", "：", lang) + ", ".join(f"{start}–{end}" for start, end in one["runs"])


def operator_columns(titles: Mapping[str, str], lang: Language) -> tuple[Column, ...]:
    """Of the table of operators. `titles`: of schemes."""
    return (
        ("operator", "算子", lambda row: spoken(row["operator"], lang)),
        ("scheme", "方案", lambda row: _of(row["schemes"], titles, lang)),
        ("communicates", "通信", lambda row: _collective(row, lang)),
        ("bytes\nfwd+bwd", "字节\n前向+反向", _both),
        ("splits\nby chunk", "可按\n分块切", lambda row: _yes(row["splits_by_chunk"], lang)),
        ("global\ncontext", "全局\n上下文", lambda row: said(*CONTEXTS[row["global_context"]], lang)),
        ("pipe-\nlined", "可流\n水化", lambda row: _yes(row["pipelined"], lang)),
        ("T_compute", "T_compute", lambda row: time_of(row["compute_s"])),
    )  # fmt: skip


def _both(row: Row) -> str | None:
    """Bytes of forward and of backward, where it sends any."""
    return f"{human_bytes(row['bytes'])}+{human_bytes(row['bytes_backward'])}" if row["comm_type"] else None


def _of(names: Sequence[str], titles: Mapping[str, str], lang: Language) -> str:
    """Schemes by their titles: `all`, or `others` than those above."""
    if not names:
        return said("all", "全部", lang)
    return said("others", "其余", lang) if names == ("others",) else ", ".join(titles[name] for name in names)


def _collective(row: Row, lang: Language) -> str:
    if row["comm_type"] is None:
        return said("local", "本地", lang)
    return f"{row['comm_type']} {row['group']} {said(*WHEN[row['when']], lang)}"


def _yes(value: bool, lang: Language) -> str:
    return said("yes", "是", lang) if value else said("no", "否", lang)


def hiding_columns(marks: Mapping[str, str], lang: Language) -> tuple[Column, ...]:
    """Of the criterion, message by message. `marks`: implementation -> the letter under which it is named below."""
    return (
        ("operator", "算子", lambda row: _message(row, lang)),
        ("", "", lambda row: said(*WAYS[row["direction"]], lang)),
        ("chunk", "分块", lambda row: None if row["chunk"] is None else human_count(row["chunk"])),
        ("T_compute", "T_compute", lambda row: time_of(row["compute_s"])),
        ("T_comm", "T_comm", lambda row: time_of(row["comm_s"])),
        ("break-\neven", "平衡\n分块长", lambda row: _break_even(row, lang)),
        ("GB/s to\nhide", "掩盖所需\nGB/s", lambda row: row["needs_bytes_per_s"] and f"{row['needs_bytes_per_s'] / 1e9:,.0f}"),
        ("exposed\nas is", "按现状\n暴露", lambda row: time_of(row["exposed_here_s"])),
        ("cut in\npieces", "分块时\n暴露", lambda row: time_of(row["exposed_s"])),
        ("verdict", "结论", lambda row: verdict(row, lang, marks)),
    )  # fmt: skip


def _message(row: Row, lang: Language) -> str:
    """The operator; of those that exchange heads on both sides of it, on which."""
    side = said(*WHEN[row["when"]], lang) if row["global_context"] == "whole" else ""
    return spoken(row["operator"], lang) + (said(f", {side}", f"，{side}", lang) if side else "")


def _break_even(row: Row, lang: Language) -> str | None:
    if row["chunk"] is None or row["compute_s"] is None:
        return None
    return spoken("never", lang) if row["break_even_chunk"] is None else human_count(row["break_even_chunk"])


def verdict(row: Row, lang: Language, marks: Mapping[str, str] | None = None) -> str:
    """`hidden`; `can hide` behind a switch, `would hide` under other code; or `exposed`. Behind it what keeps it from hiding, and
    who cuts it: numbers and letters of the lists beneath the table."""
    word = row["verdict"] or "?"
    unmet = [str(number) for number, failure in enumerate(FAILURES, 1) if failure in row["failing"]]
    by = [marks[row["done_by"]]] if marks and row["chunk"] is not None and row["done_by"] else []
    listed = ",".join((*unmet, *by))
    return spoken(POSSIBLE[_state(row)].get(word, word), lang) + (f" [{listed}]" if listed else "")


def _state(row: Row) -> str:
    if row.get("available") is False:
        return "absent"
    return "on" if row["switched_on"] else "switch" if row["can_be_switched_on"] else "other"


def marked(hiding: Sequence[Row]) -> dict[str, str]:
    """Implementation that cuts a message into pieces -> its letter, in the order of the rows."""
    names = dict.fromkeys(row["done_by"] for row in hiding if row["chunk"] is not None and row["done_by"])
    return {name: ascii_lowercase[index] for index, name in enumerate(names)}


def done_by(hiding: Sequence[Row], lang: Language) -> Iterator[str]:
    """A line an implementation: whether times as they are count on it."""
    colon, comma = said(": ", "：", lang), said("; ", "；", lang)
    for name, letter in marked(hiding).items():
        mine = [row for row in hiding if row["done_by"] == name and row["chunk"] is not None]
        states = {row["direction"]: said(*STATES[_state(row)], lang) for row in mine}
        each = [f"{said(*DIRECTIONS[way], lang)}{said(' ', '', lang)}{state}" for way, state in states.items()]
        same = len(set(states.values())) == 1
        yield f"[{letter}] {_implementation(name, lang)}{colon}{next(iter(states.values())) if same else comma.join(each)}"


def _implementation(name: str, lang: Language) -> str:
    for english, chinese in BY.items() if lang == "zh" else ():
        name = name.replace(english, chinese)
    return name


def gathered(rows: Sequence[Row]) -> Iterator[Row]:
    """Operators in their order; schemes under which one does the same stand in one row, the numbers those of the first used."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    order = list(dict.fromkeys(row["operator"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["operator"]), row["comm_type"] is None)):
        same = (row["operator"], row["comm_type"], row["when"], row["group"], row["bytes"], row["bytes_backward"])
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

    first: Column = ("chunk", "分块", lambda row: human_count(row["chunk"]))
    return (first, *map(column, places)), [{"chunk": size} for size in sizes]


def _ratio(value: float) -> str:
    return f"{value:.2g}" if value < 100 else human_count(value)


def time_of(seconds: float | None) -> str | None:
    """A time of microseconds to seconds."""
    if seconds is None:
        return None
    micro = seconds * 1e6
    if not micro or micro >= 1e3:
        return human_seconds(seconds) if micro else "0"
    return f"{micro:.0f} µs" if micro >= 9.5 else f"{micro:.2g} µs" if micro >= 0.01 else "<0.01 µs"
