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
    TITLES,
    Column,
    Row,
    done_by,
    gathered,
    held_columns,
    hiding_columns,
    marked,
    matrix,
    named,
    of_scheme,
    operator_columns,
    spoken,
    time_of,
    titled,
)
from flowledger.show.words import ABSENT, human_bytes, human_shape
from flowledger.tables.operators import ASPECTS, FAILURES, schemes

NAME = "sp-vs-cp"

Document = Mapping[str, Any]

PURPOSE = (
    "Both cut sequences, for different ends: Megatron SP saves activations between the blocks, cp makes attention itself fit. "
    "`--plan CONFIG` answers with the configuration's own numbers: local shapes, which operators communicate, what hides.",
    "两者都切序列，目的不同：Megatron SP 省子层之间的激活，cp 让 attention 本身放得下。"
    "`--plan CONFIG` 用该配置自己的数字回答：本地 shape、哪些算子要通信、什么能被掩盖。",
)

MANY = 7  # columns of a table whose numbers are kept on one line
INDENT = "    "
MANY_WORDS = 3  # blanks in a heading that may wrap


def facts(lang: Language) -> dict[str, Any]:
    """What the comparison is without a configuration: every aspect of every scheme."""
    texts = {aspect: {scheme.title: said(*scheme.texts[aspect], lang) for scheme in schemes()} for aspect in ASPECTS}
    return {"what": "comparison", "name": NAME, "meaning": said(*PURPOSE, lang), **texts}


def draw(document: Document, screen: Console, lang: Language) -> None:
    """Print what it comes to, the three answers, and what the numbers leave out."""
    for line in _head(document, lang):
        _say(line, screen)
    for text in refused(document, lang):
        _say(Text(text, style="red"), screen)
    for text in (least_exposed(document, lang), *verdicts(document, lang), together(document, lang)):
        _say(Text(text), screen)
    if any(not row["used"] for row in document["schemes"]):
        star = said(
            "* not used here: for comparison, in the place of what is", "* 此配置未用：取代已用的，仅供比较", lang
        )
        _say(Text(star, style="dim"), screen)
    for heading, columns, rows in _tables(document, lang):
        screen.print()
        screen.print(Text(heading, style="bold"))
        _grid(columns, rows, screen, {row["scheme"]: titled(row) for row in document["schemes"]}, lang)
    beneath = (*legend(lang), *done_by(document["hiding"], lang), *_rates(document, lang))
    for text in beneath if document["hardware"] else (_left_out(lang),):
        _say(Text(text, style="dim"), screen)
    screen.print()
    prose = "masks, positions, keys, weights and limits of each scheme: flowledger explain sp-vs-cp"
    _say(Text(said(prose, "各方案的 mask、位置、KV、权重与限制：flowledger explain sp-vs-cp", lang)), screen)
    for note in document[named("notes", lang)]:
        _say(Text(note, style="dim"), screen)


def _say(line: Text, screen: Console) -> None:
    """A line; where it is too long, the rest is set in."""
    for number, part in enumerate(line.wrap(screen, screen.width - len(INDENT))):
        part.rstrip()
        screen.print(Text(INDENT if number else "") + part)


def refused(document: Document, lang: Language) -> Iterator[str]:
    """The rules that the configuration breaks."""
    for row in document["refused"]:
        text = f"{row['id']}: {row[named('message', lang)]}"
        yield said(f"does not run: {text}", f"不能运行：{text}", lang)
    if document["refused"]:
        yield said(
            "numbers below are of that configuration all the same, rounded where it does not divide",
            "下面仍是该配置的数字，除不尽处取整", lang,
        )  # fmt: skip


def _head(document: Document, lang: Language) -> Iterator[Text]:
    size = document["sizes"]
    row = said("packed row", "packed 行", lang) if size["packed"] else said("padded", "填充", lang)
    ranks = said(f"{size['world']} ranks: ", f"{size['world']} 个 rank：", lang)
    axes = ranks + ", ".join(f"{axis} {size[axis]}" for axis in ("dp", "tp", "pp", "sp", "cp", "ep") if size[axis] > 1)
    kinds = [size["sequence_parallel"] and "Megatron SP", size["cp"] > 1 and TITLES[f"cp_{size['cp_kind']}"]]
    more = "".join(f", {kind}" for kind in kinds if kind)
    shared = said(", prompts shared", "，共用 prompt", lang) if size["shared_prompts"] else ""
    batch = said(
        f"B = {size['B']}, S = {size['S']:,} ({row}: {size['n']} samples of {size['s']:,} tokens, the limit and not your data{shared}), H = {size['H']:,}",
        f"B = {size['B']}，S = {size['S']:,}（{row}：{size['n']} 个样本，各 {size['s']:,} token，是上限而非你的数据{shared}），H = {size['H']:,}", lang,
    )  # fmt: skip
    where = f"  {document['model']}  {axes if size['world'] > 1 else said('one rank', '单 rank', lang)}{more}"
    yield Text.assemble((f"{NAME} ", "bold"), (document["run"], "bold cyan"), where)
    yield Text(f"{document['stage']}: {batch}")
    yield Text(_two_cuts(document, lang))


def _two_cuts(document: Document, lang: Language) -> str:
    """What cuts the batch here, beside what cuts sequences."""
    size, cuts = document["sizes"], [row for row in document["schemes"] if row["used"] and row["scheme"] != "tp"]
    by = " × ".join(f"{row['title']} {row['axis']} {row['degree']}" for row in cuts)
    if not cuts:
        sequence = said("none, a rank has whole rows", "无，每个 rank 有整行", lang)
    else:
        sequence = said(
            f"{by}, of each row of {size['S']:,} tokens a rank has {size['x']:,} between the blocks",
            f"{by}，每行 {size['S']:,} token 中一个 rank 在子层之间有 {size['x']:,}", lang,
        )  # fmt: skip
    batch = said("none", "无", lang)
    if size["dp"] > 1:
        together = size["B"] * size["S"] * size["dp"]
        batch = said(
            f"dp {size['dp']}, each rank other rows (the whole T, of all dp ranks: {together:,} tokens)",
            f"dp {size['dp']}，各 rank 的行不同（整个 T，即全部 dp rank：{together:,} token）", lang,
        )  # fmt: skip
    return said(f"batch cut: {batch}; sequence cut: {sequence}", f"切 batch：{batch}；切序列：{sequence}", lang)


def _tables(document: Document, lang: Language) -> Iterator[tuple[str, Sequence[Column], Sequence[Row]]]:
    """Heading, columns and rows of each table."""
    running = [row for row in document["schemes"] if row["degree"] > 1]
    here = {**document["here"], "title": said("here", "此配置", lang), "axis": "", "used": True}
    titles = {row["scheme"]: titled(row) for row in running}
    yield (
        said("1. what a rank holds: [B, S, H] at each point of a layer; under a scheme: by it alone",
             "1. 一个 rank 持有什么：[B, S, H] 在层内各处；方案列为仅用该方案时", lang),
        (("point", "位置", lambda row: row[named("point", lang)]), ("whole row,\none dp rank", "整行，\n一个 dp rank", lambda row: f"{row['dims']}\n{human_shape(row['logical_shape'])}"),
         ("here", "此配置", lambda row: human_shape(row["local_shape"])), *(of_scheme(row) for row in running)),
        document["shapes"],
    )  # fmt: skip
    yield (
        said("which tokens of which sample a rank has between the blocks; bytes: of one layer on one rank",
             "一个 rank 在子层之间持有哪个样本的哪些 token；字节：每层、每 rank", lang),
        held_columns(lang), [here, *running],
    )  # fmt: skip
    yield (
        said("2. operators: local, or what they send (one layer, one micro-batch, one rank)",
             "2. 算子：本地执行，或发送什么（一层、一个 micro-batch、一个 rank）", lang),
        operator_columns(titles, lang), list(gathered(document["rows"])),
    )  # fmt: skip
    if document["hardware"]:
        shown = [
            row for row in document["hiding"] if row["used"] or (row["direction"], row["per"]) == ("forward", "layer")
        ]
        yield (
            said("3. when communication hides: T_compute(chunk) >= T_comm(chunk)",
                 "3. 通信何时能藏进计算：T_compute(chunk) >= T_comm(chunk)", lang),
            hiding_columns(marked(document["hiding"]), lang), shown,
        )  # fmt: skip
    if document["chunks"]:
        columns, rows = matrix(document["chunks"], lang)
        heading = said("T_compute / T_comm by tokens of a chunk, forward: hidden from 1 on",
                       "各分块长（token）下的 T_compute / T_comm，前向：达到 1 即可掩盖", lang)  # fmt: skip
        yield heading, columns, rows


def legend(lang: Language) -> Iterator[str]:
    """What the numbers and words of a verdict mean."""
    yield "  ".join(f"[{number}] {spoken(word, lang)}" for number, word in enumerate(FAILURES, 1))
    yield said(
        "mostly hidden: a last piece has no work left to hide behind; break-even never: no chunk is large enough, ·: not cut "
        "in chunks; of schemes marked * only forward within a layer (--json has all)",
        "大部分已掩盖：最后一片没有计算可以掩盖；平衡分块长“无”：多大的分块都不够，·：不切分块；带 * 的方案只列层内前向（--json 有全部）", lang,
    )  # fmt: skip


def _left_out(lang: Language) -> str:
    return said(
        "3. when communication hides: left out, for times need a device; name one with --gpu",
        "3. 通信何时能藏进计算：略去，时间取决于设备；用 --gpu 指定", lang,
    )  # fmt: skip


def least_exposed(document: Document, lang: Language) -> str:
    """The scheme that leaves least exposed, as its implementations cut it, and whether this framework has it."""
    engine = document["engine"]
    if lang == "zh":
        engine = engine.replace("'s ", " 的 ").replace("engine", "引擎").replace("own loop", "训练循环")
    running = [row for row in document["schemes"] if row["degree"] > 1]
    has = said(", ", "、", lang).join(row["title"] for row in running if row["available"]) or said("none", "无", lang)
    if any(row["available"] is None for row in running):
        has = said("not known here", "此处未知", lang)
    if not document["hardware"] or not running:
        return said(
            f"least exposed here: needs --gpu; {engine} has: {has}",
            f"此处暴露最少：需要 --gpu；{engine} 有：{has}",
            lang,
        )
    best, *others = sorted(running, key=lambda row: (row["micro_batch_exposed_here_s"], not row["used"]))
    there = {True: ("yes", "是"), False: ("no", "否"), None: ("not known here", "此处未知")}[best["available"]]
    line = said(
        f"least exposed here: {_exposure(best, lang)}; this framework has it ({engine}): {there[0]}",
        f"此处暴露最少：{_exposure(best, lang)}；此框架有它吗（{engine}）：{there[1]}", lang,
    )  # fmt: skip
    if best["available"] is not False or not (second := next((row for row in others if row["available"]), None)):
        return line
    return line + said(
        f"; of those it has: {_exposure(second, lang)}", f"；它有的之中：{_exposure(second, lang)}", lang
    )


def _exposure(row: Row, lang: Language) -> str:
    """`Ulysses sp 4, 90 ms a micro-batch`."""
    time = time_of(row["micro_batch_exposed_here_s"])
    what = f"{row['title']} {row['axis']} {row['degree']}"
    return said(f"{what}, {time} a micro-batch", f"{what}，每个 micro-batch {time}", lang)


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


def together(document: Document, lang: Language) -> str:
    """The line of the whole configuration: all its schemes and its experts."""
    here = document["here"]
    names = list(dict.fromkeys(TITLES[row["scheme"]] for row in document["hiding"] if row["used"]))
    text = said("here, together", "此配置合计", lang)
    if not names:
        return f"{text}: " + said("no message inside the layers", "层内没有通信", lang)
    line = f"{text} ({' + '.join(spoken(name, lang) for name in names)}): {_cost(here, lang)}"
    if not here["outside_exposed_here_s"]:
        return line
    rows = [row for row in document["hiding"] if row["used"] and row["per"] == "model"]
    where = said(", ", "、", lang).join(dict.fromkeys(spoken(row["operator"], lang) for row in rows))
    outside = time_of(here["outside_exposed_here_s"])
    return line + said(f", {outside} of it outside the layers: {where}", f"，其中层外（{where}）{outside}", lang)


def _cost(row: Row, lang: Language) -> str:
    """Of a layer, forward and backward, and of a micro-batch through the layers of one rank."""
    sent = human_bytes(row["layer_bytes"])
    if row["layer_compute_s"] is None:
        return said(f"a layer sends {sent}", f"一层发送 {sent}", lang)
    work, pieces, here, all_layers = (
        time_of(row[key])
        for key in ("layer_compute_s", "layer_exposed_s", "layer_exposed_here_s", "micro_batch_exposed_here_s")
    )
    cut = said(f" ({pieces} cut in pieces)", f"（分块时 {pieces}）", lang) if pieces != here else ""
    return said(
        f"a layer computes {work} and sends {sent}; {here} of that stay exposed{cut}, {all_layers} a micro-batch",
        f"一层计算 {work}，发送 {sent}；其中暴露 {here}{cut}，每个 micro-batch 共 {all_layers}", lang,
    )  # fmt: skip


def _rates(document: Document, lang: Language) -> Iterator[str]:
    """The rates behind the times."""
    rates = document["hardware"]
    if rates is None:
        return
    links = ", ".join(
        f"{word} {rates[name]['bytes_per_s'] / 1e9:.0f} GB/s + {(rates[name]['start_s'] + rates[name]['step_s']) * 1e6:.0f} µs"
        for name, word in (("node", said("node", "节点内", lang)), ("network", said("network", "节点间", lang)))
    )
    reached = said("reached, reckoned with", "按可达速率计", lang)
    flops = f"{rates['dtype']} matmul {rates['matmul_flops'] / 1e12:.0f}, attention {rates['attention_flops'] / 1e12:.0f} TFLOPS"
    yield f"{rates['gpu']}, {reached}: {flops}; {links}"


def _grid(
    columns: Sequence[Column], rows: Sequence[Row], screen: Console, titles: Mapping[str, str], lang: Language
) -> None:
    """A table; rows with a verdict are parted by scheme, whose title stands above them."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, (english, chinese, _) in enumerate(columns):
        # names wrap where the columns are many, numbers never
        whole = len(columns) > MANY and number > 1 and english.count(" ") < MANY_WORDS
        grid.add_column(said(english, chinese, lang), overflow="fold", no_wrap=whole)
    above = None
    for row in rows:
        if "verdict" in row and row["scheme"] != above:
            above = row["scheme"]
            grid.add_row(Text(titles.get(above) or spoken(TITLES[above], lang), style="bold cyan"))
        grid.add_row(*(Text(cell(row) or ABSENT) for _, _, cell in columns))
    screen.print(grid)
