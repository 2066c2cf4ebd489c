"""What a run ends with: the three ledgers, the stages, one sample's passport."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.text import Text

from flowledger.ledger.reader import Ledger
from flowledger.show import passport, tables, terminal
from flowledger.show.columns import Table

Section = tuple[str, Callable[[Console], None]]  # heading, what draws it


def draw(ledger: Ledger, screen: Console) -> None:
    """Every section under a rule, shortened to what a newcomer needs."""
    for heading, fill in sections(ledger):
        screen.rule(Text(heading, style="bold"), align="left")
        fill(screen)


def sections(ledger: Ledger) -> Iterator[Section]:
    """Stages, the three ledgers, one sample's passport, metrics, findings.

    Shapes and lifetimes are those of the last step whose operators were watched, for of it most is known; of the shape
    ledger the rows where a tensor is made, of memory the first step and the last.
    """
    last = ledger.rows("SELECT max(step) AS step FROM spans WHERE event <> 'begin'")[0]["step"]
    watched = ledger.rows("SELECT max(step) AS step FROM memory WHERE instant = 'peak' AND source <> 'plan'")[0]["step"]
    most = last if watched is None else watched
    for name, step in (("stages", last), ("shapes", most), ("memory", None), ("lifetimes", most)):
        made = tables.table(ledger, name, step=step)
        heading = name if step is None else f"{name} of step {step}"
        yield heading, partial(terminal.draw, shortened(made))
    chosen = telling_sample(ledger)
    if chosen is not None:
        yield f"passport of sample {chosen}", partial(passport.draw, passport.passport(ledger, chosen))
    for name in ("metrics", "findings"):
        yield name, partial(terminal.draw, tables.table(ledger, name))


def shortened(made: Table) -> Table:
    """A table without what repeats itself: reads in the shape ledger, the steps between in memory."""
    if made.name == "shapes":
        return replace(made, rows=[row for row in made.rows if "write" in row["access"]])
    if made.name == "memory":
        steps = {row["step"] for row in made.rows if row["step"] is not None}
        ends = {min(steps, default=None), max(steps, default=None)}
        return replace(made, rows=[row for row in made.rows if row["step"] in ends and row["stage"] is not None])
    return made


def telling_sample(ledger: Ledger, within: tuple[int, int] | None = None) -> str | None:
    """The sample that shows most: one whose tokens were recorded, with the largest advantage; else any that was trained on.

    `within`: the first and the last step that it may be of; what is of no step is of any.
    """
    rows = ledger.rows(
        "SELECT s.sample_id FROM samples_merged s LEFT JOIN (SELECT DISTINCT sample_id FROM tokens) t ON s.sample_id = t.sample_id "
        "WHERE s.source <> 'plan' AND ($first IS NULL OR coalesce(s.step, $first) BETWEEN $first AND $last) "
        "ORDER BY t.sample_id IS NULL, abs(coalesce(s.advantage, 0)) DESC, s.sample_id LIMIT 1",
        dict(zip(("first", "last"), within or (None, None), strict=True)),
    )
    return rows[0]["sample_id"] if rows else None


def conclude(ledger: Ledger, screen: Console, marked: str = "") -> None:
    """The laws that do not hold and what was found in a line each, the recorder's own cost, and where to look next.

    What could not be checked beside the laws is counted only: `diagnose` says of each what it lacks. `marked`: what is no
    alarm, and marked in the report.
    """
    findings = ledger.rows(
        "SELECT id, \"order\", verdict, message, needs FROM findings WHERE source <> 'plan' ORDER BY position, id"
    )
    for row in findings:
        if row["verdict"] in ("warn", "fail") or (row["verdict"] == "skipped" and row["order"] == "laws"):
            needs = f" (needs {', '.join(row['needs'])})" if row["needs"] else ""
            screen.print(f"{row['verdict']}: {row['message']}{needs}", markup=False)
    laws = _counted([row["verdict"] for row in findings if row["order"] == "laws"], LAWS)
    others = _counted([row["verdict"] for row in findings if row["order"] != "laws"], OTHERS)
    parts = [f"laws: {laws}" if laws else "", f"other findings: {others}" if others else ""]
    screen.print("; ".join([*filter(None, parts), f"run {ledger.directory.state}"]))
    if marked:
        screen.print(marked, markup=False)
    screen.print(own_cost(ledger))
    where = ledger.directory.path
    report = where / "report.html"
    more = f"   report: {report}" if report.exists() else ""
    screen.print(f"look: flowledger show {where} shapes|memory|lifetimes|stages{more}", markup=False)


# Verdict -> what is said of so many.
LAWS = {"pass": "hold", "fail": "broken", "skipped": "not checked"}
OTHERS = {"fail": "failed", "warn": "to look at", "skipped": "not checked"}


def _counted(verdicts: Sequence[str], said: Mapping[str, str]) -> str:
    return ", ".join(f"{n} {word}" for verdict, word in said.items() if (n := verdicts.count(verdict)))


def own_cost(ledger: Ledger) -> str:
    """The recorder's own figures: CPU seconds of all ranks, and their share of the ranks' steps, watched ones apart; rows, bytes, drops."""
    totals = ledger.directory.manifest.recorder
    steps = ledger.rows(
        "WITH own AS (SELECT step, value - coalesce(lag(value) OVER (ORDER BY step), 0) AS cpu FROM metrics_by_step "
        "WHERE name = 'recorder/cpu_s' AND source <> 'plan') "
        "SELECT step IN (SELECT step FROM memory WHERE instant = 'peak' AND source <> 'plan') AS watched, count(*) AS n, "
        "sum(cpu) AS cpu, sum(seconds) AS seconds FROM own JOIN step_seconds USING (step) GROUP BY watched ORDER BY watched"
    )
    (ranks,) = ledger.rows(
        "SELECT count(DISTINCT process) AS n FROM metrics WHERE name = 'recorder/cpu_s' AND step IS NOT NULL"
    )
    shares = ", ".join(
        f"{row['cpu']:.2f} s CPU in {row['n']} step{'s' * (row['n'] > 1)}{' watched operator by operator' * row['watched']} "
        f"({row['cpu'] / row['seconds'] / ranks['n']:.2%})"
        for row in steps
    )
    dropped = f", {totals['dropped']:,} dropped" if "dropped" in totals else ""  # where ranks died, nobody knows
    return (
        f"recorder: {shares or 'no step measured'}; {totals.get('rows', 0):,} rows, "
        f"{totals.get('bytes', 0) / 2**20:.1f} MiB{dropped}"
    )
