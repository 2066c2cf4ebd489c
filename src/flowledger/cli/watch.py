"""The verb `watch`: the alarms of a run while it goes on."""

import sys
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.cli.look import Language
from flowledger.cli.options import Json, RunArgument
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowledger.diagnose.alarms.live import Event, Watch
    from flowledger.diagnose.alarms.rules import Rule
    from flowledger.diagnose.alarms.webhook import Webhook

SEVERITIES = ("info", "warning", "error", "critical")
PATIENCE_S = 900.0  # after a run died without a word: it may be started again


class StopOn(StrEnum):
    """From which severity on an alarm ends the run."""

    error = "error"
    critical = "critical"


def watch(
    run: RunArgument,
    every: Annotated[
        float, typer.Option("--every", min=0.1, max=3600, metavar="S", help="seconds between looks")
    ] = 5.0,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="POST each alarm there as JSON")
    ] = None,
    stop_on: Annotated[
        StopOn | None, typer.Option("--stop-on", help="end the run at an alarm of this severity")
    ] = None,
    rules: Annotated[Path | None, typer.Option("--rules", metavar="FILE", help="alarms of your own, in YAML")] = None,
    once: Annotated[bool, typer.Option("--once", help="look once at what is there, and end")] = False,
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="[PORT|HOST:PORT]", help="the page of the run beside it, live, for a browser"),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="with --serve: a plan (plan -o PLAN) beside the run")
    ] = None,
    lang: Annotated[Language, typer.Option(help="language of messages, and of the page")] = Language.en,
    json: Json = False,
) -> None:
    """Print each alarm of a run when it fires and when it is over, until the run is closed.

    Exit codes: 0 no alarm, 1 an alarm fired, 2 bad input, 130 Ctrl-C.
    """
    from flowledger.diagnose.alarms.rules import compiled

    rows = alarms(rules)
    compiled(rows)

    def watched() -> int:
        return _watch(run, rows, lang.value, every, webhook, stop_on, once=once, json=json)

    if plan is not None and serve is None:
        raise BadInput("--plan is for the page: give --serve as well")
    if serve is None:
        check_run(run)
        fired = watched()
    else:
        from flowledger.cli.serve import serve as serve_page

        if once:
            raise BadInput("--once looks once and ends, and --serve goes on: leave one of them out")
        fired = serve_page(run, serve, plan, lang.value, watched)
    if fired:
        raise typer.Exit(1)


def _watch(
    run: Path, rows: "Sequence[Rule]", lang: str, every: float, webhook: str | None, stop_on: StopOn | None, *, once: bool, json: bool,
) -> int:  # fmt: skip
    """How many alarms fired until the run was closed."""
    from flowledger.diagnose.alarms.live import Watch
    from flowledger.diagnose.alarms.webhook import Webhook, where

    hook = Webhook(webhook) if webhook else None
    watched = Watch(run, rows, lang)
    teller = _Teller(run, hook, json=json)
    try:
        _follow(watched, teller, every, stop_on, once=once)
        if once and not json:
            teller.glance()
    finally:
        teller.conclude(watched)
        if hook is not None:
            hook.close()
            if hook.lost:
                print(
                    f"flowledger: {hook.lost} of {hook.lost + hook.sent} alarms did not reach {where(hook.url)}: {hook.failure}",
                    file=sys.stderr,
                )
    return teller.fired


def check_run(path: Path) -> None:
    """Raises BadInput for a log, or a directory of logs, with what makes a run of it."""
    from flowledger.ledger.directory import MANIFEST

    if path.is_file() or (path.is_dir() and not any(path.glob(MANIFEST)) and not any(path.glob(f"*/{MANIFEST}"))):
        raise BadInput(
            f"{path} is no run ({'a file' if path.is_file() else f'it has no {MANIFEST}'}): make a run of it with flowledger import {path} -o RUN, and watch RUN --once; "
            f"or look at it with flowledger diagnose {path}"
        )


def check_is_there(path: Path) -> None:
    """Raises BadInput for a run that was removed since it was opened: its state would be that of its last manifest."""
    if not (path / "parts").is_dir() and not any(path.glob("*.parquet")):
        raise BadInput(f"run {path} was removed while it was watched; nothing more can be said of it")


def alarms(file: Path | None) -> "Sequence[Rule]":
    """The alarms of flowledger, and those of a user's file. Raises BadInput for a file that has none, or wrong ones."""
    from flowledger.diagnose.alarms import rules

    return rules.joined(rules.built_in(), rules.read(file)) if file else rules.built_in()


def _follow(watched: "Watch", teller: "_Teller", every: float, stop_on: StopOn | None, *, once: bool) -> None:
    died: float | None = None
    stopped = False
    while True:
        check_is_there(teller.run)
        state = watched.state  # before the look: what a closed run has written is there
        events = watched.look()
        for event in events:
            teller.tell(event)
        for line in watched.strangers():
            teller.say(line)
        worst = max((SEVERITIES.index(event.finding.severity) for event in events if event.counts), default=0)
        if stop_on is not None and not stopped and state == "open" and worst >= SEVERITIES.index(stop_on.value):
            stopped = True
            teller.say(watched.stop())
        if once or state not in ("open", "died"):
            return
        if state == "died":
            if died is None:
                died = time.monotonic()
                teller.say(f"the run died without a word; waiting {PATIENCE_S / 60:.0f} minutes for it to come back")
            elif time.monotonic() - died > PATIENCE_S:
                return
        else:
            died = None
        time.sleep(every)


class _Teller:
    """Where alarms go: lines, or a JSON object a line, and the webhook."""

    def __init__(self, run: Path, hook: "Webhook | None", *, json: bool) -> None:
        self.run, self._hook, self._json = run, hook, json
        self._rows: list[dict[str, Any]] = []
        self.fired = 0

    def tell(self, event: "Event") -> None:
        self.fired += event.counts
        row = _row(self.run, event)
        self._rows.append(row)
        if self._hook is not None:
            self._hook.send(row)
        if not self._json:
            for line in _lines(event):
                print(line, flush=True)

    def say(self, text: str) -> None:
        print(f"flowledger: {text}", file=sys.stderr, flush=True)

    def glance(self) -> None:
        """What is no alarm, and marked in the page of the run: metrics outside their healthy range."""
        from flowledger.cli.outside import outside
        from flowledger.ledger.reader import Ledger

        with suppress(BadInput), Ledger(self.run) as ledger:  # removed meanwhile, or its numbers cannot be added up
            if line := outside(ledger):
                print(line, flush=True)

    def conclude(self, watched: "Watch") -> None:
        """What it came to, at the end."""
        from flowledger.show import plain

        state = watched.state if self.run.is_dir() else "removed"
        steps = "no finished step" if watched.last_step is None else f"steps up to {watched.last_step}"
        if self._json:
            print(
                plain.as_json(
                    "watch",
                    self.run.name,
                    self._rows,
                    summary={"fired": self.fired, "last_step": watched.last_step, "state": state},
                )
            )
        else:
            print(f"{self.fired or 'no'} alarm{'s' * (self.fired != 1)} in {steps}; run {state}")


def _row(run: Path, event: "Event") -> dict[str, Any]:
    found = event.finding
    return {
        "run": run.name, "event": event.kind, "id": found.id, "severity": found.severity, "verdict": found.verdict,
        "step": event.step, "stage": found.stage, "rank": found.rank, "message": found.message,
        "evidence": found.evidence, "next_step": found.next_step,
    }  # fmt: skip


def _lines(event: "Event") -> list[str]:
    from flowledger.show.words import harmless

    found = event.finding
    step = "" if event.step is None else f"step {event.step}: "
    if event.kind == "over":
        return [harmless(f"over      {step}{found.id}{f' ({found.stage})' if found.stage else ''}")]
    head = f"{found.severity:<9} {step}{found.id}: {found.message}"
    return [harmless(head), *([harmless(f"          next: {found.next_step}")] if found.next_step else [])]
