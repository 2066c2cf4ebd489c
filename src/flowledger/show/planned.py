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
from flowledger.tables.metrics import metric

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
OWN_LOOP = "flowledger"  # the framework of this project's own loop
MOST_NAMED = 6  # checks that lack an input, by name beneath the table
TABLES = ("chain", "checks", "memory", "shapes", "lifetimes")
DEFAULT = ("chain", "checks", "memory")

CHAIN = (
    Column("quantity"), Column("value", form="setting"), Column("unit"), Column("key"), Column("arithmetic"),
    Column("source", wide=True), Column("note", wide=True),
)  # fmt: skip
CHECKS = (
    Column("verdict"), Column("id"), Column("fires_at", "fires at"), Column("message"), Column("needs", "lacks", wide=True),
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
    Column("bytes", "largest form", "bytes"), Column("kind", wide=True), Column("owner", wide=True),
)  # fmt: skip
COMPARE = (
    Column("stage"), Column("before", form="bytes"), Column("after", form="bytes"), Column("change", form="bytes"),
)  # fmt: skip
ADVICE = (
    Column("key", "change"), Column("before"), Column("after"), Column("saves", form="bytes"), Column("fits", form="flag"),
    Column("peak_stage", "peak then in"), Column("costs"),
)  # fmt: skip
LARGEST = (
    Column("what"), Column("key"), Column("now", form="count"), Column("largest", "largest that fits"),
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
        if rows:
            terminal.draw(Table(f"plan_{name}", document["run"], columns, rows), screen, wide=wide)
        else:
            screen.print("none", style="dim")
    if compare := document.get("compare"):
        _changed(compare, screen)
    _answer(document, screen, wide=wide)


def _changed(compare: Mapping[str, Any], screen: Console) -> None:
    """What became of the second plan: what it breaks, and whether it fits."""
    after = compare["after"]
    for line in compare["broken"]:
        screen.print(Text.assemble(("with it fails ", "bold red"), line))
    screen.print(Text.assemble(("with it: ", "bold"), _verdict_of(after)))


def _verdict_of(summary: Mapping[str, Any]) -> str:
    starts = "starts" if summary["starts"] else f"will not run ({_count(summary['fails'], 'broken rule')})"
    where = f"peak {human_bytes(summary['peak_reserved'])} in {summary['peak_stage']}"
    if summary["limit"] is None:
        return f"{starts}; {where}"
    free = summary["free"]
    fits = f"{human_bytes(free)} stay free" if free >= 0 else f"does not fit: {human_bytes(-free)} too many"
    return f"{starts}; {where}; {fits}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _head(document: Document) -> Text:
    summary = document["summary"]
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in summary["mesh"].items() if degree > 1) or "one rank"
    framework = " ".join(part for part in (summary["framework"], summary["framework_version"]) if part)
    size = (
        f"{summary['parameters'] / 1e9:.2f} B parameters"
        if summary["parameters"] >= 1e7
        else f"{summary['parameters']:,} parameters"
    )
    device = f"{summary['world']} × {summary['gpu'] or ('CPU process' if summary['framework'] == OWN_LOOP else 'GPU (not named)')}"
    return Text.assemble(
        ("plan ", "bold"),
        (document["run"], "bold cyan"),
        f"  {framework}  {summary['model']} ({size})  {device}  {mesh}",
    )


def _chain(document: Document, screen: Console, wide: bool) -> None:
    terminal.draw(Table("plan_chain", document["run"], CHAIN, document["chain"]), screen, wide=wide)


def _checks(document: Document, screen: Console, wide: bool) -> None:
    _verdicts(document["checks"], document["run"], screen, wide=wide)


def draw_checks(rows: Rows, run: str, reading: Mapping[str, Any], screen: Console, *, wide: bool = False) -> None:
    """The checks alone, and how the input was read."""
    _verdicts(rows, run, screen, wide=wide)
    _how_read(reading, screen)


def _verdicts(rows: Rows, run: str, screen: Console, *, wide: bool) -> None:
    """What fails and warns; what passed is counted, and listed with --wide; what was not checked is named."""
    shown = [row for row in rows if wide or row["verdict"] in ("fail", "warn")]
    if shown:
        terminal.draw(Table("plan_checks", run, CHECKS, shown), screen, wide=wide)
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(
        f"{verdicts.count(name)} {word}"
        for name, word in (("fail", "fail"), ("warn", "warn"), ("pass", "hold"), ("skipped", "not checked"))
    )
    lacking = [
        f"{row['id']} (needs {', '.join(row['needs'] or ['more'])})" for row in rows if row["verdict"] == "skipped"
    ]
    named = f": {', '.join(lacking[:MOST_NAMED])}{' …' if len(lacking) > MOST_NAMED else ''}" if lacking else ""
    screen.print(Text(f"checks: {counts}{named}", style="dim"))


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
    held = _held(document["shapes"])
    drawn = [
        row | {"held_by": held[*_form(row), row["owner_rank"]], "place": "/".join(filter(None, (row["stage"], row["phase"]))), "dims": (row["dims"] or "").strip("[] "), **NOT_OBSERVED}
        for row in rows
    ]  # fmt: skip
    terminal.draw(Table("shapes", document["run"], SHAPES, drawn, section="place"), screen, wide=wide)


NOT_OBSERVED = {"logical_shape_min": None, "local_shape_min": None, "mask_fits": None}


def _narrow(rows: Rows) -> Rows:
    """One line a tensor, place and form: on the first rank that has it, once for all layers, read and written alike."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found.setdefault(_form(row), row)
    return list(found.values())


def _form(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["stage"], row["phase"], row["tensor_name"], row["dims"]


def _held(rows: Rows) -> dict[tuple[Any, ...], int]:
    """Tensor, place, form and owner ranks -> how many ranks hold it (of one that comes layer by layer, a layer)."""
    classes = {(*_form(row), row["owner_rank"], row["layer"], row["rank"]): row["rank_count"] or 1 for row in rows}
    layers: dict[tuple[Any, ...], int] = {}
    for (*layer, _), count in classes.items():
        layers[tuple(layer)] = layers.get(tuple(layer), 0) + count
    found: dict[tuple[Any, ...], int] = {}
    for (*held, _), count in layers.items():
        found[tuple(held)] = min(count, found.get(tuple(held), count))
    return found


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
    if document.get("together"):
        found.append(("advice", "together: each on top of those above it", ADVICE, document["together"]))
    if "largest" in document:
        rows = [row | {"largest": row["largest"] or "none: not even 1"} for row in document["largest"]]
        found.append(("largest", "largest that fits", LARGEST, rows))
    if "trace" in document:
        found.append(
            ("trace", "the model's own code under FakeTensor, beside the closed form", TRACE, document["trace"])
        )
    return found


def _answer(document: Document, screen: Console, *, wide: bool) -> None:
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
    if wide:
        _estimates(document, screen)
    _starts(summary, screen)
    _fits(summary, screen, asked="advice" in document)
    _how_read(document["reading"], screen)


def _how_read(reading: Mapping[str, Any], screen: Console) -> None:
    """What a user should know of how the input was read, what was assumed, and what nobody used."""
    for line in (*reading["notes"], *(f"assumed {one}" for one in reading["assumed"])):
        screen.print(Text(line, style="dim"))
    if ignored := reading["ignored"]:
        screen.print(Text(f"ignored, for no figure here depends on it: {', '.join(ignored)}", style="dim"))


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
            "[green]starts[/green]: no rule is broken"
            + (f", {_count(summary['warns'], 'warning')}" if summary["warns"] else "")
        )
    else:
        screen.print(
            f"[bold red]will not run[/bold red]: {_count(summary['fails'], 'broken rule')}, see the checks (--table checks)"
        )


def _fits(summary: Mapping[str, Any], screen: Console, *, asked: bool) -> None:
    if summary["limit"] is None:
        pool = "" if summary["framework"] == OWN_LOOP else ", and sizes an engine's KV pool (80 GiB until then)"
        screen.print(f"no device is named: --gpu holds the peak against its memory{pool}", style="dim")
        return
    free = abs(summary["free"])
    if summary["fits"]:
        share, (least, _) = (
            free / summary["limit"],
            metric("memory/headroom").healthy or (0.0, 1.0),
        )  # a run's alarm begins there
        how = "[green]fits[/green]" if share >= least else "[yellow]fits narrowly[/yellow]"
        rest = (
            ""
            if share >= least
            else f", {share:.1%}: a run would be warned below {least:.0%}, for fragmentation is not planned"
        )
        screen.print(
            f"{how}: {human_bytes(free)} of {human_bytes(summary['limit'])} stay free at the worst instant{rest}"
        )
    elif summary["free"] >= 0:
        screen.print("[bold red]does not fit[/bold red]: the inference engine cannot start, see memory.engine above")
    else:
        screen.print(
            f"[bold red]does not fit[/bold red]: {human_bytes(free)} more than {human_bytes(summary['limit'])} are needed"
            + ("" if asked else "; --advise ranks what would help")
        )
