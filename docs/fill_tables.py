"""Fill the tables and outputs of the pages from the product itself: python docs/fill_tables.py

A page marks the place of a table with `<!-- table: NAME -->` and `<!-- end -->`; pages ending in `.zh-CN.md` get Chinese.
`<!-- output: A | B -->` between a bash block of one flowledger command and the text block below it fills that block with
what the command prints at 100 columns: the lines in which A or B (regular expressions) is found, and `…` for the rest.
`<!-- measured: A | B -->` does so for what also holds times and measured bytes: the block is filled anew only where more
than these differ. The commands are typed in the order of the page, in a directory of their own that has the examples.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from itertools import groupby
from pathlib import Path

from flowledger.flow.axes import CUTS
from flowledger.flow.dims import SYMBOLS
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.plan.weights import count
from flowledger.tables import algorithms as algorithm_tables
from flowledger.tables import rules as rule_tables
from flowledger.tables.constants import constants
from flowledger.tables.gpus import gpus
from flowledger.tables.metrics import metrics
from flowledger.tables.models import Architecture, models

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUTPUT = re.compile(
    r"(^```bash\nflowledger ([^\n]*)\n```\n<!-- (output|measured): ([^\n]*) -->\n```text\n)(.*?)(^```$)",
    re.DOTALL | re.MULTILINE,
)
RULE = re.compile(r" *─[─ ]*")  # beneath headings
CONTINUED = re.compile(r" {3}| \w+$")  # cells that go on, or the phase of a stage
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?:%| ?(?:ms|s|MiB)\b|[KMGT]B?\b)?")
COUNT = re.compile(r"\d{1,4}")  # a number that no machine and no hour changes
GIB = 2**30


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in cells)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def plain(text: str) -> str:
    """Prose whose asterisks are products, not emphasis."""
    return text.replace("*", r"\*")


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


def metric_sources(zh: bool) -> str:
    head = (
        ("指标", "由哪些行得出", "各 rank 合并", "健康范围", "范围之外由谁提示")
        if zh
        else ("metric", "made of", "over ranks", "healthy", "outside told by")
    )
    return table(
        head,
        (
            (
                f"`{row.name}`",
                ("记录或导入" if zh else "recorded or imported")
                if row.sources == ("metrics.value",)
                else code(row.sources),
                row.over_ranks,
                f"{row.healthy[0]:g} … {row.healthy[1]:g}" if row.healthy else "",
                code(row.told_by) or (row.silent_zh if zh else row.silent),
            )
            for row in metrics().values()
        ),
    )


def algorithm_rows(what: str, zh: bool) -> str:
    """All algorithms of one sort; what there is to know beyond is said by `flowledger explain`."""
    head = ("名称", "用途", "公式", "粒度", "需要", "来源") if zh else ("name", "what it is for", "formula", "works per", "needs", "source")  # fmt: skip
    rows = (row for row in algorithm_tables.algorithms().values() if row.what == what)
    return table(
        head,
        (
            (
                code(
                    (row.name, *row.aliases) if what == "kl_form" else (row.name,)
                ),  # a configuration takes these alone
                plain(row.purpose_zh if zh else row.purpose),
                f"`{(zh and row.formula_zh) or row.formula}`",
                row.grain,
                code(need for need in algorithm_tables.NEEDS if need in row.needs),
                row.source,
            )
            for row in rows
        ),
    )


def algorithm_surprises(zh: bool) -> str:
    head = ("算法", "须知") if zh else ("algorithm", "what may surprise")
    told = ((row, row.surprise_zh if zh else row.surprise) for row in algorithm_tables.algorithms().values())
    return table(head, ((f"`{row.what}:{row.name}`", plain(text)) for row, text in told if text))


def needs(zh: bool) -> str:
    head = ("需要", "由什么提供") if zh else ("need", "what supplies it")
    return table(head, ((f"`{name}`", texts[zh]) for name, texts in algorithm_tables.NEEDS.items()))


def rule_counts(zh: bool) -> str:
    """Rules of each framework by the moment at which a breach shows."""
    moments = tuple(rule_tables.FIRES_AT)
    head = ("框架", *(f"`{moment}`" for moment in moments), "合计") if zh else ("framework", *(f"`{moment}`" for moment in moments), "all")  # fmt: skip
    found = {name: rules_of(name) for name in (*rule_tables.FRAMEWORKS, rule_tables.ANY)}
    return table(
        head,
        (
            (
                ("任何框架" if zh else "any framework") if name == rule_tables.ANY else f"`{name}`",
                *(str(sum(rule.fires_at == moment for rule in held) or "") for moment in moments),
                str(len(held)),
            )
            for name, held in found.items()
        ),
    )


def rules_of(framework: str) -> list[rule_tables.Rule]:
    """The rules of one framework alone, or those that hold for any."""
    return [rule for rule in rule_tables.table(framework).rules if rule.framework == framework]


def rule_rows(framework: str, zh: bool) -> str:
    head = ("id", "何时触发", "须成立（原文）") if zh else ("id", "fires at", "what must hold")
    rows = (
        (
            f"`{rule.id}`",
            f"`{rule.fires_at}`",
            plain(rule.title)
            + (f" ({', '.join(rule.trainers)})" if rule.trainers else "")
            + (f" [{rule.versions}]" if rule.versions != "all" else "")
            + (" ⚠" if rule.severity == "warning" else ""),
        )
        for rule in rules_of(framework)
    )
    return table(head, rows)


def device_table(zh: bool) -> str:
    head = (
        ("设备", "内存 GiB", "带宽 GB/s", "矩阵 TFLOPS", "float32 TFLOPS", "互联 GB/s", "也可写作")
        if zh
        else ("device", "memory GiB", "bandwidth GB/s", "matrix TFLOPS", "float32 TFLOPS", "links GB/s", "also called")
    )
    return table(
        head,
        (
            (
                row.name,
                f"{row.memory_bytes / GIB:.2f}",
                f"{row.hbm_bytes_per_s / 1e9:,.0f}",
                f"{row.matrix_flops / 1e12:,.0f}",
                f"{row.float32_flops / 1e12:,.4g}" if row.float32_flops else "",
                f"{row.link_bytes_per_s / 1e9:,.0f}",
                code(row.aliases),
            )
            for row in gpus().values()
        ),
    )


def model_table(zh: bool) -> str:
    head = (
        ("模型", "参数量 B", "层", "隐藏维度", "头", "FFN", "词表", "特征")
        if zh
        else ("model", "parameters, B", "layers", "hidden", "heads", "FFN", "vocabulary", "traits")
    )
    return table(
        head,
        (
            (
                row.name,
                f"{count(row) / 1e9:,.2f}",
                str(row.layers),
                f"{row.hidden:,}",
                f"{row.heads}/{row.kv_heads}",
                f"{row.ffn:,}",
                f"{row.vocab:,}",
                ", ".join(traits(row)),
            )
            for row in models().values()
        ),
    )


def traits(row: Architecture) -> Iterable[str]:
    """What sets a model apart from a plain Llama: words of the catalogue."""
    if row.moe:
        yield f"MoE {row.moe.experts}, top {row.moe.topk}"
    if row.mla:
        yield "MLA"
    if row.linear:
        yield "linear attention"
    if row.tied:
        yield "tied"


def constant_table(zh: bool) -> str:
    head = (
        ("常数", "值", "单位", "缘由（原文）", "版本")
        if zh
        else ("constant", "value", "unit", "why it is there", "holds for")
    )
    return table(
        head,
        (
            (f"`{row.name}`", f"{row.value:,.12g}", row.unit, plain(row.reason), row.version)
            for row in constants().values()
        ),
    )


TABLES: dict[str, Callable[[bool], str]] = {
    "rule_counts": rule_counts,
    **{
        f"rules_{name}": lambda zh, name=name: rule_rows(name, zh)  # type: ignore[misc]
        for name in (*rule_tables.FRAMEWORKS, rule_tables.ANY)
    },
    **{
        f"algorithms_{what}": lambda zh, what=what: algorithm_rows(what, zh)  # type: ignore[misc]
        for what in algorithm_tables.WHATS
    },
    "algorithm_surprises": algorithm_surprises,
    "needs": needs,
    "devices": device_table,
    "models": model_table,
    "constants": constant_table,
    "symbols": symbols,
    "axes": axes,
    "kinds": kinds,
    "stages": stage_table,
    "tensors": tensor_table,
    "metrics": metric_table,
    "metric_sources": metric_sources,
}


@cache
def printed(words: str, place: Path) -> tuple[str, str]:
    """What `flowledger WORDS` prints there, 100 columns wide: its output, its messages."""
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "flowledger.cli", *shlex.split(words)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:  # 1: a check fails
        raise SystemExit(f"flowledger {words}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout, done.stderr


def shortened(text: str, wanted: str) -> str:
    """The lines in which one of the expressions is found, with the lines that continue them; `…` for what is left out.

    `!A`: a line in which A is found continues none.
    """
    asked = [one.strip() for one in wanted.split(" | ")]
    patterns = [re.compile(one) for one in asked if not one.startswith("!")]
    apart = [re.compile(one[1:]) for one in asked if one.startswith("!")]
    kept: list[tuple[bool, str]] = []
    for line in map(str.rstrip, text.splitlines()):
        above = kept[-1][1] if kept and kept[-1][0] else ""
        continues = bool(above) and bool(RULE.fullmatch(line) or (CONTINUED.match(line) and not RULE.fullmatch(above)))
        continues = continues and not any(one.search(line) for one in apart)
        kept.append((continues or any(one.search(line) for one in patterns), line))
    found: list[str] = []
    for shown, group in groupby(kept, key=lambda item: item[0]):
        lines = [line for _, line in group]
        found += lines if shown else [" …"] if any(lines) else [""] if found else []
    return "".join(f"{line}\n" for line in found)


def steady(text: str) -> str:
    """The words of a text without what differs from run to run: measured numbers, and where cells are broken beside them."""
    text = re.sub(r"tok/s \S+", "tok/s #", text)
    text = NUMBER.sub(lambda found: found[0] if COUNT.fullmatch(found[0]) else "#", text)
    return " ".join(sorted(re.sub("─+", "─", text).split()))


def filled(page: Path, place: Path) -> str:
    """The page's text with every marked table and output as the product has it now; its commands are typed in a place."""
    zh = page.name.endswith(".zh-CN.md")

    def block(found: re.Match[str]) -> str:
        head, words, sort, wanted, was, foot = found.groups()
        output, messages = printed(words, place)
        now = shortened(messages + output if sort == "measured" else output, wanted)
        return f"{head}{was if sort == 'measured' and steady(was) == steady(now) else now}{foot}"

    text = MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]](zh)}{found[3]}", page.read_text(encoding="utf-8"))
    return OUTPUT.sub(block, text)


def pages() -> list[Path]:
    return sorted([*Path(__file__).parent.glob("*.md"), *ROOT.glob("README*.md")])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="flowledger-pages-") as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for page in pages():
            page.write_text(filled(page, Path(folder)), encoding="utf-8")
