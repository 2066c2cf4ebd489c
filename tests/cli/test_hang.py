"""Ranks that would wait for each other for ever: the run ends, and says who waits, where, and what the other does instead."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowledger.flow.seams import Function, replaced
from flowledger.ledger.reader import Ledger
from flowledger.record import waiting as _  # noqa: F401  forked ranks find imported what they need
from flowledger.run.batching import Share
from tests.cli.test_launch import Ranks, ranks, state  # noqa: F401  `ranks` is a fixture

LIMIT_S = 1.0
LATEST_S = 60.0  # of a rank that would hang for ever, after its start
RECORD = {"level": "steps", "ops_every": 0, "hang_after_s": LIMIT_S}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not hear are not waited for."""
    monkeypatch.setattr("flowledger.run.parallel.watch.GRACE_S", 0.5)
    monkeypatch.setattr("flowledger.run.parallel.watch.TICK_S", 0.2)
    monkeypatch.setattr("flowledger.record.waiting.LOOK_S", 0.2)


def changed(target: str, make: Callable[[Function], Function]) -> Any:
    return replaced([(target, make)])


def sleepy(original: Function) -> Function:
    def reward(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(1000)
        return original(*args, **kwargs)

    return reward


def uneven(original: Function) -> Function:
    """Rank 1 forgets the last micro-batch of each mini-batch."""

    def shares(**given: Any) -> tuple[Share, ...]:
        found = original(**given)
        if os.environ["RANK"] == "1":
            for share in found:
                for mini in share.batches.mini_batches:
                    object.__setattr__(mini, "micro_batches", mini.micro_batches[:-1])
        return found  # type: ignore[no-any-return]  # what it replaces is any function

    return shares


def ended(started: Ranks) -> Iterator[str]:
    assert started.codes() == [1, 1]
    assert time.monotonic() - started.began < LATEST_S
    yield from started.errors()


@pytest.mark.usefixtures("hurried")
def test_a_rank_that_does_not_come_is_named_with_where_it_is(ranks: Any, tmp_path: Path) -> None:  # noqa: F811
    with changed("flowledger.run.stages:reward", sleepy):
        started = ranks(record=RECORD)
    (line,) = ended(started)
    said = r"flowledger: rank 1 has waited \d+ s in \w+ over dp \(0, 1\) at \w+, step 0; rank 0 is not there: it is in reward, step 0, since \d+ s"
    assert re.fullmatch(said, line), line
    assert state(tmp_path / "run") == "crashed"
    with Ledger(tmp_path / "run") as ledger:
        (finding,) = ledger.rows("SELECT message, verdict, next_step FROM findings WHERE id = 'hang'")
    assert line == f"flowledger: {finding['message']}"
    assert f"py-spy dump --pid {started.pids[0]}" in finding["next_step"]


@pytest.mark.usefixtures("hurried")
def test_unequal_micro_batches_are_found_by_who_waits_and_by_their_number(ranks: Any, tmp_path: Path) -> None:  # noqa: F811
    with changed("flowledger.run.batching:shares", uneven):
        started = ranks(record=RECORD, rollout={"samples_per_prompt": 4})
    (line,) = ended(started)
    said = r"flowledger: rank (.) has waited \d+ s in .*; rank (.) is not there: it waits in .*"  # each for the other
    assert sorted(re.fullmatch(said, line).groups()) == ["0", "1"], line  # type: ignore[union-attr]  # no match fails
    with Ledger(tmp_path / "run") as ledger:
        found = {
            row["id"]: row["message"] for row in ledger.rows("SELECT id, message FROM findings WHERE verdict = 'fail'")
        }
    assert f"flowledger: {found['hang']}" == line
    assert "rank 0 goes through" in found["unequal_micro_batches"]
