"""A plan drawn for a terminal: the batch chain, the checks, the memory ledger, and the answer beneath them.

Takes the document that a plan is (`plan --json` prints the same), and knows nothing of how it was computed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.kinds import KINDS
from flowledger.show import terminal
from flowledger.show.columns import Column, Table
from flowledger.show.words import human_bytes

Document = Mapping[str, Any]
Rows = list[dict[str, Any]]

SHORT = {
    "optimizer": "optim",
    "activation": "activ",
    "kv_cache": "kv",
    "comm_buffer": "comm",
    "temporary": "temp",
    "residue": "resid",
}
TABLES = ("chain", "checks", "memory", "shapes", "lifetimes")
DEFAULT = ("chain", "checks", "memory")

CHAIN = (
    Column("quantity"), Column("value", form="number"), Column("unit"), Column("key"), Column("arithmetic"),
    Column("source", wide=True), Column("note", wide=True),
)  # fmt: skip
CHECKS = (
    Column("verdict"), Column("id"), Column("fires_at", "fires at"), Column("message"), Column("severity", wide=True),
    Column("versions", wide=True), Column("fix", form="map", wide=True), Column("next_step", wide=True),
)  # fmt: skip
MEMORY = (
    Column("stage"), Column("ranks"), *(Column(kind, SHORT.get(kind, kind), "bytes") for kind in KINDS),
    Column("allocated", "alloc", "bytes"), Column("reserved", "resv", "bytes"), Column("share", "of device", "percent"),
    Column("host_used", "host", "bytes"), Column("instant", wide=True), Column("after", "stays", "bytes", wide=True),
    Column("free", form="bytes", wide=True), Column("step", wide=True), Column("rank_count", "count", "count", wide=True),
)  # fmt: skip
SHAPES = (
    Column("stage"), Column("tensor_name", "tensor"), Column("logical_shape", form="shape"),
    Column("local_shape", "local shard shape", "shape"), Column("mask", "mask / broadcast"), Column("owner_rank"),
    Column("lifetime"), Column("common_bug"), Column("rank", form="count", wide=True), Column("rank_count", "ranks", "count", wide=True), Column("layer", form="count", wide=True), Column("dims", wide=True),
    Column("padding", wide=True), Column("kind", wide=True), Column("dtype", wide=True),
    Column("bytes", form="bytes", wide=True), Column("access", wide=True), Column("owner", wide=True),
)  # fmt: skip
LIFETIMES = (
    Column("born_at", "made in"), Column("tensor_name", "tensor"), Column("readers", "read by"),
    Column("last_read_at", "last read", wide=True), Column("freed_at", "freed in"), Column("lifetime"),
    Column("bytes", form="bytes"), Column("kind", wide=True), Column("owner", wide=True),
)  # fmt: skip
COMPARE = (
    Column("stage"), Column("before", form="bytes"), Column("after", form="bytes"), Column("change", form="bytes"),
)  # fmt: skip
ADVICE = (
    Column("key", "change"), Column("before"), Column("after"), Column("saves", form="bytes"), Column("fits", form="flag"),
    Column("peak_stage", "peak then in"), Column("costs"),
)  # fmt: skip
LARGEST = (
    Column("what"), Column("key"), Column("now", form="count"), Column("largest", "largest that fits", "count"),
    Column("limited_by", "limited by"),
)  # fmt: skip

TRACE = (
    Column("stage"), Column("phase", "peak in"), Column("traced", form="bytes"), Column("planned", "closed form", "bytes"),
    Column("deviation", form="percent"), Column("agrees", "within 2 %", "flag"), Column("reason"),
    Column("seconds", form="seconds", wide=True),
)  # fmt: skip


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The tables asked for. Raises BadInput for one that a plan does not have."""
    for name in names:
        if name not in (*TABLES, "all"):
            raise BadInput(f"--table {name!r}: a plan has {', '.join(TABLES)}, or all{nearest(name, TABLES)}")
    return TABLES if "all" in names else tuple(dict.fromkeys(names)) or DEFAULT


def draw(document: Document, screen: Console, tables: Sequence[str], *, wide: bool = False) -> None:
    """Print the chosen tables, then the answers."""
    screen.print(_head(document))
    for name in tables:
        DRAWN[name](document, screen, wide)
    for name, heading, columns, rows in _questions(document):
        screen.print(Text(heading, style="bold"))
        terminal.draw(Table(f"plan_{name}", document["run"], columns, rows), screen, wide=wide)
    _answer(document, screen)


def _head(document: Document) -> Text:
    summary = document["summary"]
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in summary["mesh"].items() if degree > 1) or "one rank"
    framework = " ".join(part for part in (summary["framework"], summary["framework_version"]) if part)
    size = (
        f"{summary['parameters'] / 1e9:.2f} B parameters"
        if summary["parameters"] >= 1e7
        else f"{summary['parameters']:,} parameters"
    )
    device = f"{summary['world']} × {summary['gpu'] or 'CPU process'}"
    return Text.assemble(
        ("plan ", "bold"),
        (document["run"], "bold cyan"),
        f"  {framework}  {summary['model']} ({size})  {device}  {mesh}",
    )


def _chain(document: Document, screen: Console, wide: bool) -> None:
    terminal.draw(Table("plan_chain", document["run"], CHAIN, document["chain"]), screen, wide=wide)


def _checks(document: Document, screen: Console, wide: bool) -> None:
    draw_checks(document["checks"], document["run"], screen, wide=wide)


def draw_checks(rows: Rows, run: str, screen: Console, *, wide: bool = False) -> None:
    """What fails and warns; what passed or could not be checked is counted, and listed with --wide."""
    shown = [row for row in rows if wide or row["verdict"] in ("fail", "warn")]
    if shown:
        terminal.draw(Table("plan_checks", run, CHECKS, shown), screen, wide=wide)
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(
        f"{verdicts.count(name)} {word}"
        for name, word in (("fail", "fail"), ("warn", "warn"), ("pass", "hold"), ("skipped", "not checked"))
    )
    screen.print(Text(f"checks: {counts}", style="dim"))


def _memory(document: Document, screen: Console, wide: bool) -> None:
    """Later steps, each stage on its fullest rank class; with --wide every class, and the first step too."""
    rows = [row | {"share": row["reserved"] / row["limit"] if row["limit"] else None} for row in document["rows"]]
    if not wide:
        rows = list(_fullest(row for row in rows if row["step"] == "later").values())
    columns = MEMORY if document["summary"]["limit"] else tuple(one for one in MEMORY if one.name != "share")
    kept = tuple(one for one in columns if one.form != "bytes" or any(row[one.name] for row in rows))
    terminal.draw(Table("plan_memory", document["run"], kept, rows), screen, wide=wide)


def _fullest(rows: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["stage"] not in found or row["allocated"] > found[row["stage"]]["allocated"]:
            found[row["stage"]] = row
    return found


def _shapes(document: Document, screen: Console, wide: bool) -> None:
    rows = document["shapes"] if wide else _narrow(document["shapes"])
    drawn = [
        row | {"place": "/".join(filter(None, (row["stage"], row["phase"]))), "dims": (row["dims"] or "").strip("[] "), **NOT_OBSERVED}
        for row in rows
    ]  # fmt: skip
    terminal.draw(Table("shapes", document["run"], SHAPES, drawn, section="place"), screen, wide=wide)


NOT_OBSERVED = {"logical_shape_min": None, "local_shape_min": None, "mask_fits": None}


def _narrow(rows: Rows) -> Rows:
    """One line a tensor, place and form: on the first rank that has it, once for all layers, read and written alike."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["stage"], row["phase"], row["tensor_name"], row["dims"]), row)
    return list(found.values())


def _lifetimes(document: Document, screen: Console, wide: bool) -> None:
    terminal.draw(Table("plan_lifetimes", document["run"], LIFETIMES, document["lifetimes"]), screen, wide=wide)
    for stage, names in document["survives"].items():
        screen.print(Text.assemble((f"after {stage}: ", "bold"), ", ".join(dict.fromkeys(names)) or "nothing"))


DRAWN: dict[str, Callable[[Document, Console, bool], None]] = {
    "chain": _chain,
    "checks": _checks,
    "memory": _memory,
    "shapes": _shapes,
    "lifetimes": _lifetimes,
}


def _questions(document: Document) -> list[tuple[str, str, tuple[Column, ...], Rows]]:
    """The what-if tables that were asked for: name, heading, columns, rows."""
    found: list[tuple[str, str, tuple[Column, ...], Rows]] = []
    if compare := document.get("compare"):
        found.append(("compare", f"with {', '.join(compare['set'])}", COMPARE, compare["rows"]))
    if "advice" in document:
        found.append(("advice", "single changes that lower the peak", ADVICE, document["advice"]))
    if "largest" in document:
        found.append(("largest", "largest that fits", LARGEST, document["largest"]))
    if "trace" in document:
        found.append(
            ("trace", "the model's own code under FakeTensor, beside the closed form", TRACE, document["trace"])
        )
    return found


def _answer(document: Document, screen: Console) -> None:
    """Does it start, does it fit, where is the peak: one line each, the worst first."""
    summary = document["summary"]
    worst = next(
        row for row in document["rows"]
        if (row["stage"], row["ranks"], row["step"]) == (summary["peak_stage"], summary["peak_ranks"], summary["peak_step"])
    )  # fmt: skip
    made = sorted(((worst[kind], kind) for kind in KINDS if worst[kind]), reverse=True)[:5]
    of = ", ".join(f"{kind} {human_bytes(size)}" for size, kind in made)
    where = f"{worst['stage']} at {worst['instant']}" + ("" if worst["ranks"] == "all" else f" on {worst['ranks']}")
    screen.print(
        f"[bold]peak[/bold] {human_bytes(worst['allocated'])} allocated, about {human_bytes(worst['reserved'])} reserved, in "
        f"{where}: {of}"
    )
    _estimates(document, screen)
    _starts(summary, screen)
    _fits(summary, screen)
    for line in (*document["reading"]["notes"], *(f"assumed {one}" for one in document["reading"]["assumed"])):
        screen.print(Text(line, style="dim"))
    if ignored := document["reading"]["ignored"]:
        screen.print(
            Text(
                f"{len(ignored)} key{'s' * (len(ignored) > 1)} ignored, for no figure here depends on them: "
                f"{', '.join(ignored)}",
                style="dim",
            )
        )


def _estimates(document: Document, screen: Console) -> None:
    for row in document["estimates"]:
        if row["planned"]:
            screen.print(
                Text(
                    f"rough form {row['name']} ≈ {row['formula']} = {human_bytes(row['estimate'])}; "
                    f"planned {human_bytes(row['planned'])}", style="dim",
                )
            )  # fmt: skip


def _starts(summary: Mapping[str, Any], screen: Console) -> None:
    if summary["starts"]:
        screen.print(
            "[green]starts[/green]: no rule is broken" + (f", {summary['warns']} warnings" if summary["warns"] else "")
        )
    else:
        screen.print(f"[bold red]will not run[/bold red]: {summary['fails']} broken rules, above")


def _fits(summary: Mapping[str, Any], screen: Console) -> None:
    if summary["limit"] is None:
        screen.print("name a device with --gpu to hold the peak against its memory", style="dim")
        return
    free = abs(summary["free"])
    if summary["fits"]:
        screen.print(
            f"[green]fits[/green]: {human_bytes(free)} of {human_bytes(summary['limit'])} stay free at the worst instant"
        )
    elif summary["free"] >= 0:
        screen.print("[bold red]does not fit[/bold red]: the inference engine cannot start, see memory.engine above")
    else:
        screen.print(
            f"[bold red]does not fit[/bold red]: {human_bytes(free)} more than {human_bytes(summary['limit'])} are needed; "
            "--advise ranks what would help"
        )
