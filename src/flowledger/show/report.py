"""What a run ends with: the three ledgers, the stages, one sample's passport; and the same as one HTML file."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowledger.ledger.reader import Ledger
from flowledger.show import passport, tables, terminal

ORDER = ("stages", "shapes", "memory", "lifetimes", "metrics")
REPORT_WIDTH = 150


def draw(ledger: Ledger, screen: Console, *, brief: bool = False) -> None:
    """Every table that a newcomer needs, each under a rule; then the passport of one sample.

    `brief` keeps of the shape ledger the rows where a tensor is made, and of memory the first step and the last.
    """
    last = ledger.rows("SELECT max(step) AS step FROM spans WHERE event <> 'begin'")[0]["step"]
    for name in ORDER:
        screen.rule(f"[bold]{name}[/]", align="left")
        step = None if name in ("metrics", "memory") else last
        made = tables.table(ledger, name, step=step)
        terminal.draw(shortened(made) if brief else made, screen)
    chosen = telling_sample(ledger)
    if chosen is not None:
        screen.rule(f"[bold]sample {chosen}[/]", align="left")
        passport.draw(passport.passport(ledger, chosen), screen)
    screen.rule("[bold]findings[/]", align="left")
    terminal.draw(tables.table(ledger, "findings"), screen)


def shortened(made: tables.Table) -> tables.Table:
    """A table without what repeats itself: reads in the shape ledger, the steps between in memory."""
    if made.name == "shapes":
        return replace(made, rows=[row for row in made.rows if "write" in row["access"]])
    if made.name == "memory":
        steps = {row["step"] for row in made.rows if row["step"] is not None}
        ends = {min(steps, default=None), max(steps, default=None)}
        return replace(made, rows=[row for row in made.rows if row["step"] in ends and row["stage"] is not None])
    return made


def telling_sample(ledger: Ledger) -> str | None:
    """The sample that shows most: one whose tokens were recorded, with the largest advantage; else any that was trained on."""
    rows = ledger.rows(
        "SELECT s.sample_id FROM samples_merged s LEFT JOIN (SELECT DISTINCT sample_id FROM tokens) t ON s.sample_id = t.sample_id "
        "WHERE s.source <> 'plan' ORDER BY t.sample_id IS NULL, abs(coalesce(s.advantage, 0)) DESC, s.sample_id LIMIT 1"
    )
    return rows[0]["sample_id"] if rows else None


def write_html(ledger: Ledger, path: Path) -> None:
    """The same tables as one file that needs no network. Raises OSError where it cannot be written."""
    page = Console(
        record=True,
        width=REPORT_WIDTH,
        file=io.StringIO(),
        highlight=False,
        force_terminal=True,
        color_system="truecolor",
    )
    page.print(f"[bold]flowledger[/] run [bold]{ledger.run}[/]  ({ledger.directory.state})")
    draw(ledger, page)
    path.write_text(page.export_html(inline_styles=False), encoding="utf-8")


def conclude(ledger: Ledger, screen: Console) -> None:
    """The findings in a line each where they are not a pass, the recorder's own cost, and where to look next."""
    findings = ledger.rows(
        "SELECT id, verdict, message, needs FROM findings WHERE source <> 'plan' ORDER BY position, id"
    )
    for row in findings:
        if row["verdict"] != "pass":
            needs = f" (needs {', '.join(row['needs'])})" if row["needs"] else ""
            screen.print(f"{row['verdict']}: {row['message']}{needs}", markup=False)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in findings) for verdict in ("pass", "warn", "fail", "skipped")
    }
    said = {"pass": "hold", "warn": "warn", "fail": "are broken", "skipped": "not checked"}
    laws = ", ".join(f"{n} {said[verdict]}" for verdict, n in counts.items() if n)
    screen.print(f"laws: {laws}; run {ledger.directory.state}")
    screen.print(own_cost(ledger))
    where = ledger.directory.path
    screen.print(
        f"look: flowledger show {where} shapes|memory|lifetimes|stages   report: {where / 'report.html'}", markup=False
    )


def own_cost(ledger: Ledger) -> str:
    """The recorder's own figures: CPU seconds and their share of the steps, watched ones apart; rows, bytes, drops."""
    totals = ledger.directory.manifest.recorder
    steps = ledger.rows(
        "WITH own AS (SELECT step, value - coalesce(lag(value) OVER (ORDER BY step), 0) AS cpu FROM metrics_by_step "
        "WHERE name = 'recorder/cpu_s' AND source <> 'plan') "
        "SELECT step IN (SELECT step FROM memory WHERE instant = 'peak' AND source <> 'plan') AS watched, count(*) AS n, "
        "sum(cpu) AS cpu, sum(seconds) AS seconds FROM own JOIN step_seconds USING (step) GROUP BY watched ORDER BY watched"
    )
    shares = ", ".join(
        f"{row['cpu']:.2f} s CPU in {row['n']} step{'s' * (row['n'] > 1)}{' watched operator by operator' * row['watched']} "
        f"({row['cpu'] / row['seconds']:.2%})"
        for row in steps
    )
    return (
        f"recorder: {shares or 'no step measured'}; {totals.get('rows', 0):,} rows, "
        f"{totals.get('bytes', 0) / 2**20:.1f} MiB, {totals.get('dropped', 0):,} dropped"
    )
