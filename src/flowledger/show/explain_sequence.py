"""Sequence parallelism beside context parallelism: the words of it, and the answer for one configuration on a terminal.

Takes the document that a plan makes of it (`--json` prints the same), and knows nothing of how it was computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.languages import Language, said
from flowledger.show.sequence_columns import (
    HELD,
    TITLES,
    Column,
    Row,
    gathered,
    hiding_columns,
    matrix,
    named,
    of_scheme,
    operator_columns,
    spoken,
    time_of,
)
from flowledger.show.words import ABSENT, human_bytes, human_shape
from flowledger.tables.operators import ASPECTS, FAILURES, schemes

NAME = "sp-vs-cp"

Document = Mapping[str, Any]

PURPOSE = (
    "Both cut sequences, for different ends: Megatron SP saves activations between the blocks, cp makes attention itself fit. "
    "`--plan CONFIG` answers with the configuration's own numbers: local shapes, which operators communicate, what hides.",
    "两者都切序列，目的不同：Megatron SP 省块间激活，cp 让 attention 本身放得下。"
    "`--plan CONFIG` 用该配置自己的数字回答：本地 shape、哪些算子要通信、什么能被掩盖。",
)

MANY = 7  # columns of a table whose numbers are kept on one line


def facts(lang: Language) -> dict[str, Any]:
    """What the comparison is without a configuration: every aspect of every scheme."""
    texts = {aspect: {scheme.title: said(*scheme.texts[aspect], lang) for scheme in schemes()} for aspect in ASPECTS}
    return {"what": "comparison", "name": NAME, "meaning": said(*PURPOSE, lang), **texts}


def aspect_lines(aspects: Mapping[str, Mapping[str, str]], lang: Language) -> Iterator[str]:
    """The schemes under each aspect, a line each."""
    for aspect, texts in aspects.items():
        yield said(*ASPECTS[aspect], lang)
        yield from (f"  {title}: {text}" for title, text in texts.items())


def draw(document: Document, screen: Console, lang: Language) -> None:
    """Print the three answers, the differences, and what the numbers leave out."""
    screen.print(_head(document, lang))
    for heading, columns, rows in _tables(document, lang):
        screen.print()
        screen.print(Text(heading, style="bold"))
        _grid(columns, rows, screen, lang)
    screen.print(Text(legend(lang), style="dim"))
    _rates(document, screen, lang)
    for line in verdicts(document, lang):
        screen.print(Text(line))
    if any(not row["used"] for row in document["schemes"]):
        screen.print(
            Text(
                said(
                    "* not used here: for comparison, in the place of what is",
                    "* 此配置未用：取代已用的，仅供比较",
                    lang,
                ),
                style="dim",
            )
        )
    screen.print()
    screen.print(Text(said("differences", "差异", lang), style="bold"))
    for line in aspect_lines(_texts(document, lang), lang):
        screen.print(Text(line), style="" if line.startswith(" ") else "bold")
    for note in document["notes"]:
        screen.print(Text(note, style="dim"))


def _head(document: Document, lang: Language) -> Text:
    size = document["sizes"]
    row = said("packed row", "packed 行", lang) if size["packed"] else said("padded", "填充", lang)
    axes = ", ".join(f"{axis} {size[axis]}" for axis in ("dp", "tp", "pp", "sp", "cp", "ep") if size[axis] > 1)
    kinds = [size["sequence_parallel"] and "Megatron SP", size["cp"] > 1 and TITLES[f"cp_{size['cp_kind']}"]]
    more = "".join(f", {kind}" for kind in kinds if kind)
    batch = said(
        f"B = {size['B']}, S = {size['S']:,} ({row}: {size['n']} samples of {size['s']:,} tokens), H = {size['H']:,}",
        f"B = {size['B']}，S = {size['S']:,}（{row}：{size['n']} 个样本，各 {size['s']:,} token），H = {size['H']:,}", lang,
    )  # fmt: skip
    where = f"  {document['model']}  {axes or said('one rank', '单 rank', lang)}{more}\n{document['stage']}: {batch}"
    return Text.assemble((f"{NAME} ", "bold"), (document["run"], "bold cyan"), where)


def _tables(document: Document, lang: Language) -> Iterator[tuple[str, Sequence[Column], Sequence[Row]]]:
    """Heading, columns and rows of each table."""
    running = [row for row in document["schemes"] if row["degree"] > 1]
    yield (
        said("1. what a rank holds: [B, S, H] at each point of a layer; under a scheme: by it alone",
             "1. 一个 rank 持有什么：[B, S, H] 在层内各处；方案列为仅用该方案时", lang),
        (("point", "位置", lambda row: row[named("point", lang)]), ("whole", "完整", lambda row: f"{row['dims']}\n{human_shape(row['logical_shape'])}"),
         ("here", "此配置", lambda row: human_shape(row["local_shape"])), *(of_scheme(row) for row in running)),
        document["shapes"],
    )  # fmt: skip
    yield said("of one sample", "一个样本", lang), HELD, running
    yield (
        said("2. operators: local, or what they send (one layer, one micro-batch, one rank)",
             "2. 算子：本地执行，或发送什么（一层、一个 micro-batch、一个 rank）", lang),
        operator_columns(lang), list(gathered(document["rows"])),
    )  # fmt: skip
    yield (
        said("3. when communication hides: T_compute(chunk) >= T_comm(chunk)",
             "3. 通信何时能藏进计算：T_compute(chunk) >= T_comm(chunk)", lang),
        hiding_columns(lang), document["hiding"],
    )  # fmt: skip
    if document["chunks"]:
        columns, rows = matrix(document["chunks"], lang)
        heading = said("T_compute / T_comm by tokens of a chunk, forward: hidden from 1 on",
                       "各块长（token）下的 T_compute / T_comm，前向：达到 1 即可掩盖", lang)  # fmt: skip
        yield heading, columns, rows


def legend(lang: Language) -> str:
    """What the numbers of a verdict mean."""
    return "  ".join(f"[{number}] {spoken(word, lang)}" for number, word in enumerate(FAILURES, 1))


def verdicts(document: Document, lang: Language) -> Iterator[str]:
    """One line a scheme: what a layer computes, what of its communication stays exposed, and what fails."""
    for scheme in document["schemes"]:
        mine = [row for row in document["hiding"] if row["scheme"] == scheme["scheme"] and row["per"] == "layer"]
        if not mine:
            yield f"{scheme['title']}: " + said("no degree divides the heads", "没有能整除头数的并行度", lang)
            continue
        unmet = list(dict.fromkeys(word for row in mine for word in row["failing"]))
        fails = said("; ", "；", lang).join(spoken(word, lang) for word in unmet)
        taken = "" if scheme["used"] else " *"
        yield f"{scheme['title']} {scheme['axis']} {scheme['degree']}{taken}: {_cost(scheme, lang)}" + (
            said(f": {fails}", f"：{fails}", lang) if unmet else ""
        )


def _cost(scheme: Row, lang: Language) -> str:
    sent = human_bytes(scheme["layer_bytes"])
    if scheme["layer_compute_s"] is None:
        return said(f"a layer sends {sent}", f"一层发送 {sent}", lang)
    work, exposed, all_layers = (
        time_of(scheme[key]) for key in ("layer_compute_s", "layer_exposed_s", "micro_batch_exposed_s")
    )
    return said(
        f"a layer computes {work} and sends {sent}; {exposed} of that stay exposed, {all_layers} a micro-batch",
        f"一层计算 {work}，发送 {sent}；其中暴露 {exposed}，每个 micro-batch 共 {all_layers}", lang,
    )  # fmt: skip


def _rates(document: Document, screen: Console, lang: Language) -> None:
    """The rates behind the times."""
    rates = document["hardware"]
    if rates is None:
        return
    links = ", ".join(
        f"{name} {rates[name]['bytes_per_s'] / 1e9:.0f} GB/s + {(rates[name]['start_s'] + rates[name]['step_s']) * 1e6:.0f} µs"
        for name in ("node", "network")
    )
    reached = said("reached, reckoned with", "按可达速率计", lang)
    flops = f"matmul {rates['matmul_flops'] / 1e12:.0f}, attention {rates['attention_flops'] / 1e12:.0f} TFLOPS"
    screen.print(Text(f"{rates['gpu']}, {reached}: {flops}; {links}", style="dim"))


def _texts(document: Document, lang: Language) -> dict[str, dict[str, str]]:
    return {aspect: {row["title"]: row[named(aspect, lang)] for row in document["schemes"]} for aspect in ASPECTS}


def _grid(columns: Sequence[Column], rows: Sequence[Row], screen: Console, lang: Language) -> None:
    """A table; rows with a verdict are parted by scheme, whose name stands above them."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, (english, chinese, _) in enumerate(columns):
        whole = len(columns) > MANY and number > 1  # names wrap where the columns are many, numbers never
        grid.add_column(said(english, chinese, lang), overflow="fold", no_wrap=whole)
    above = None
    for row in rows:
        if "verdict" in row and row["scheme"] != above:
            above = row["scheme"]
            grid.add_row(Text(spoken(TITLES[above], lang), style="bold cyan"))
        grid.add_row(*(Text(cell(row) or ABSENT) for _, _, cell in columns))
    screen.print(grid)
