"""A diagnosis drawn for a terminal: the orders that were walked, the first step that fails, its evidence, cause and change.

Takes the document that `diagnose --json` prints, and knows nothing of how it was made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.words import harmless

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "pass": ("✓", "green"), "skipped": ("·", "dim"),
         "partly": ("~", "green")}  # fmt: skip
LACKING = 3  # lines of what was not checked
WELL_KNOWN, GUESSES = 0.8, 2  # from this confidence on a cause needs no guesses beside it; how many stand there else
MOST, LONG = 4, 240  # lines of evidence, and signs of one; JSON has all
LABEL = 26  # columns that the label of a block takes
# Word -> (English, Chinese).
WORDS: Mapping[str, tuple[str, str]] = {
    "looked": ("looked at", "已读取"),
    "unread": ("not read", "未能读取"),
    "first": ("First question that fails", "第一个不通过的问题"),
    "ended": ("The run ended with", "运行的结束"),
    "look": ("First question to look at", "第一个需要注意的问题"),
    "then": ("And in", "以及"),
    "shown": ("What shows it", "依据"),
    "cause": ("Likeliest cause", "最可能的原因"),
    "worth": ("Worth a look", "值得注意"),
    "change": ("What to change", "建议修改"),
    "next": ("Next", "下一步"),
    "not_checked": ("Not checked", "未能检查"),
    "partly": ("checked in part, the rest needs", "仅部分检查，其余需要"),
    "also": ("Also", "另外"),
    "advice": ("What would be faster", "可以更快之处"),
    "answer": ("Answer to the report", "对报告的回答"),
    "step": ("{title}, question {position} of {count}: {look}", "{title} 第 {position} 问（共 {count} 问）：{look}"),
    "fail": ("stops at question {position} of {count}", "停在第 {position} 问（共 {count} 问）"),
    "warn": ("to look at: question {position} of {count}", "需要注意：第 {position} 问（共 {count} 问）"),
    "sure": ("{share:.0%} sure", "把握 {share:.0%}"),
    "nothing": ("no question fails: {passed} looked at, {skipped} not checked", "没有不通过的问题：检查了 {passed} 问，{skipped} 问未能检查"),
    "nothing_partly": ("no question fails: {passed} looked at, {partly} of them in part (~, --all says what they need), {skipped} not checked",
                       "没有不通过的问题：检查了 {passed} 问，其中 {partly} 问仅部分检查（~，--all 说明所需），{skipped} 问未能检查"),
    "cannot": ("cannot tell: nothing of it could be looked at", "无法判断：没有可以检查的内容"),
    "more": ("… and {count} more (--all, --json)", "…… 还有 {count} 条（--all、--json）"),
    "beside": ("the plan stands beside no run: {why}", "规划未能与运行对照：{why}"),
    "no_run": ("{count} steps that look at a run: give its directory or its logs too", "{count} 个需要运行数据的步骤：请同时给出运行目录或日志"),
    "set": ("set", "设为"),
    "marks": ("✓ passes  ! to look at  ✗ fails  ~ checked in part  · not checked", "✓ 通过  ! 需要注意  ✗ 不通过  ~ 仅部分检查  · 未能检查"),
    "early": ("Earliest training step", "最早的训练步"),
    "at": ("step {step}: {message}", "第 {step} 步：{message}"),
}  # fmt: skip


def draw(document: Document, screen: Console, language: str = "en", *, every: bool = False) -> None:
    """Print it. `every`: the steps of each order, those that pass too."""
    say = _Say(language)
    _sources(document, screen, say)
    if document["orders"]:
        screen.print()
    for order in document["orders"]:
        _order(order, document, screen, say, every=every)
    if document["orders"]:
        screen.print(Text(say("marks"), style="dim"))
    _reported(document, screen, say)
    summary = document["summary"]
    if summary["cause"] is None and summary["ended"] is None:
        _healthy(document, screen, say)
    elif summary["first"] or summary["ended"]:  # else the answers to reports stand above
        _verdict(document, screen, say, every=every)
    _also(document, screen, say)
    _lacking(document, screen, say, every=every)


class _Say:
    """The words of one language."""

    def __init__(self, language: str) -> None:
        self._at = 0 if language == "en" else 1

    def __call__(self, word: str, **values: Any) -> str:
        return WORDS[word][self._at].format(**values)


def _sources(document: Document, screen: Console, say: _Say) -> None:
    for one in document["sources"]:
        screen.print(
            Text.assemble(
                (f"{say('looked')}  ", "dim"), (harmless(one["source"]), "bold cyan"), f"  {harmless(one['what'])}"
            )
        )
    for one in document["unread"]:
        screen.print(
            Text.assemble(
                (f"{say('unread')}  ", "yellow"), (harmless(one["source"]), "bold"), f"  {harmless(one['why'])}"
            )
        )


def _order(order: Mapping[str, Any], document: Document, screen: Console, say: _Say, *, every: bool) -> None:
    """A line for the order, and one for each of its steps that fails or warns; `every`: for each step."""
    rows = {row["id"]: row for row in document["rows"]}
    steps = [(step, rows[step["id"]]) for step in order["steps"]]
    marks = Text(" ").join(Text(*_mark(row)) for _, row in steps)
    stop = _stop([row for _, row in steps], say)
    goal = "" if order["goal"].casefold() == order["title"].casefold() else f"  {order['goal']}"
    screen.print(Text.assemble(marks, (f"  {order['title']}", "bold"), (goal, "dim"), f"  {stop}"))
    if not stop and not every:
        return
    grid = Grid.grid(padding=(0, 1, 0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=2)
    grid.add_column(ratio=5)
    for step, row in steps:
        if not every and row["verdict"] not in ("fail", "warn"):
            continue
        known = (
            row["message"] if row["verdict"] != "skipped" else f"{say('not_checked')}: {', '.join(row['needs'] or [])}"
        )
        if _is_partly(row):
            known = f"{known} ({say('partly')}: {', '.join(row['needs'])})"
        style = "dim" if row["verdict"] == "skipped" else ""
        grid.add_row(Text(*_mark(row)), Text(f"{row['position']} {step['look']}"), Text(harmless(known), style=style))
    screen.print(grid)


def _stop(rows: Rows, say: _Say) -> str:
    """Which question of how many an order stops at: the first that fails, else the first that warns; empty where none does."""
    for verdict in ("fail", "warn"):
        if (at := next((row["position"] for row in rows if row["verdict"] == verdict), None)) is not None:
            return say(verdict, position=at, count=len(rows))
    return ""


def _mark(row: Mapping[str, Any]) -> tuple[str, str]:
    return MARKS["partly" if _is_partly(row) else row["verdict"]]


def _is_partly(row: Mapping[str, Any]) -> bool:
    """Whether a step has nothing that fails, and something that could not be looked at."""
    return row["verdict"] == "pass" and bool(row["needs"])


def _part(document: Document, *names: str) -> Rows:
    """The rows of some parts of the findings."""
    found: list[Mapping[str, Any]] = []
    start = 0
    for name, count in document["parts"].items():
        found += document["rows"][start : start + count] if name in names else []
        start += count
    return found


def _reported(document: Document, screen: Console, say: _Say) -> None:
    """What the reports are answered with, each with its cause and change."""
    for row in _part(document, "reported"):
        sure = "" if row["verdict"] == "skipped" else _sure(row["confidence"], say)
        screen.print()
        _block(screen, say("answer"), [f"{row['message']}{sure}"], MARKS[row["verdict"]][1])
        _block(screen, say("shown"), row["evidence"] or [], say=say)
        _block(screen, say("change"), _changes(row["fix"], say))
        _block(screen, say("next"), [row["next_step"]] if row["next_step"] else [])
        _block(screen, say("not_checked"), row["needs"] or [])


def _sure(confidence: float | None, say: _Say) -> str:
    return "" if confidence is None else f"  ({say('sure', share=confidence)})"


def _verdict(document: Document, screen: Console, say: _Say, *, every: bool) -> None:
    """The first step that fails, what shows it, the cause and the change."""
    most = len(document["rows"]) * 100 if every else MOST
    summary = document["summary"]
    rows = {row["id"]: row for row in document["rows"]}
    screen.print()
    first, cause = rows.get(summary["first"]), rows.get(summary["cause_step"])
    if summary["ended"] is not None:
        _block(screen, say("ended"), [summary["ended"]], "bold red")
        _block(screen, say("shown"), _part(document, "ended")[0]["evidence"] or [], say=say, most=most)
    if first is not None:
        _block(screen, say("first" if first["verdict"] == "fail" else "look"), [_named(first, document, say)], "bold")
        itself = [] if cause is first else [first["message"]]
        _block(screen, say("shown"), [*itself, *(first["evidence"] or [])], say=say, most=most)
    if cause is not None and cause is not first:
        _block(screen, say("then"), [_named(cause, document, say)], "bold")
        _block(screen, say("shown"), cause["evidence"] or [], say=say, most=most)
    _block(screen, say("early"), _earliest(document, first, say))
    if summary["cause"] is None:
        return
    label = say("cause" if summary["verdict"] == "fail" else "worth")
    told = f"{summary['cause']}{_sure(summary['confidence'], say)}"
    _block(screen, label, [told], MARKS[summary["verdict"]][1])
    _block(screen, say("change"), _changes(summary["change"], say), "bold green")
    _block(screen, say("next"), [summary["next_step"]] if summary["next_step"] else [])


def _earliest(document: Document, first: Mapping[str, Any] | None, say: _Say) -> list[str]:
    """The first step of training at which anything fails or warns, where that is not the one that stands above."""
    bad = [
        row
        for row in _part(document, "walked", "besides")
        if row["verdict"] in ("fail", "warn") and row["step"] is not None
    ]
    early = min(bad, key=lambda row: row["step"], default=None)
    known = early is None or early is first or (first is not None and first["step"] == early["step"])
    return [] if early is None or known else [say("at", step=early["step"], message=early["message"])]


def _named(row: Mapping[str, Any], document: Document, say: _Say) -> str:
    order = next(order for order in document["orders"] if order["name"] == row["order"])
    look = order["steps"][row["position"] - 1]["look"]
    return say("step", title=order["title"], position=row["position"], count=len(order["steps"]), look=look)


def _healthy(document: Document, screen: Console, say: _Say) -> None:
    summary = document["summary"]
    if document["orders"] and summary["verdict"] == "skipped":
        screen.print(Text(f"\n{say('cannot')}", style="yellow"))
    elif document["orders"]:
        partly = len(summary["partly"])
        looked = say(
            "nothing_partly" if partly else "nothing", passed=summary["pass"], partly=partly, skipped=summary["skipped"]
        )
        screen.print(Text(f"\n{looked}", style="green"))
    for row in _part(document, "advice"):
        _block(screen, say("advice"), [row["message"]])
        _block(screen, say("change"), _changes(row["fix"], say), "bold green")


def _also(document: Document, screen: Console, say: _Say) -> None:
    """What belongs to no step that was walked. Guesses at causes are left out where one is known well, and are few elsewhere."""
    told, sure = document["summary"]["cause"], document["summary"]["confidence"] or 0.0
    rows = [row for row in _part(document, "known", "besides") if row["message"] != told]
    guesses = [row for row in rows if row["order"] == "report"]
    kept = [] if sure >= WELL_KNOWN else guesses[:GUESSES]
    rows = [row for row in rows if row["order"] != "report" or row in kept]
    beyond = [f"{row['id']}: {row['message']}" for row in rows]
    beside = [say("beside", why=why) for why in document["summary"]["not_beside"]]
    _block(screen, say("also"), [*beyond, *beside], say=say)


def _lacking(document: Document, screen: Console, say: _Say, *, every: bool) -> None:
    """What could not be looked at, and what that would need; steps that need the same together."""
    lacking = document["summary"]["not_checked"]
    if lacking and not document["summary"]["recorded"]:  # of a configuration alone nearly all steps need a run
        _block(screen, say("not_checked"), [say("no_run", count=len(lacking))], "dim")
        return
    together: dict[str, list[str]] = {}
    for one in lacking:
        together.setdefault(", ".join(one["needs"] or []), []).append(one["id"])
    lines = [f"{', '.join(names)}: {needs}" for needs, names in together.items()]
    _block(screen, say("not_checked"), lines, "dim", say=say, most=len(lines) if every else LACKING)


def _changes(fix: Mapping[str, str] | None, say: _Say) -> list[str]:
    """`key: from → to`, or `set key to` where nothing says what it is now."""
    if not fix:
        return []
    now, to = fix.get("from") or "", fix.get("to") or ""
    return [f"{fix['key']}: {now} → {to}" if now else f"{say('set')} {fix['key']} = {to}" if to else fix["key"]]


def _block(
    screen: Console, label: str, lines: Sequence[str], style: str = "", *, say: _Say | None = None, most: int = MOST
) -> None:
    """A label, and beside it lines that wrap; text of a run is printed as it is, never read as markup."""
    if not lines:
        return
    cut = say is not None and most <= MOST  # what is quoted may be a traceback
    shown = [
        Text(harmless(f"{line[:LONG]}…" if cut and len(line) > LONG else line), style=style) for line in lines[:most]
    ]
    if len(lines) > most and say is not None:
        shown.append(Text(say("more", count=len(lines) - most), style="dim"))
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, width=LABEL)
    grid.add_column()
    for at, line in enumerate(shown):
        grid.add_row(Text(label if at == 0 else "", style="dim"), line)
    screen.print(grid)
