"""What ranks learn of each other: the first reason speaks for all, and silence on another machine is noticed."""

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch.distributed as dist

from flowledger.ledger.manifest import Process
from flowledger.run.parallel import company as companies
from flowledger.run.parallel.company import Company, Member, Word
from flowledger.run.place import place_of


def met(size: int, host: str = "elsewhere") -> list[Company]:
    """Ranks that have met, as far away as `host`."""
    store = dist.HashStore()
    members = [Member(rank, Process(host=host, pid=100 + rank, started=0.0)) for rank in range(size)]
    for rank in range(size):
        store.set(f"flowledger/beat/{rank}", "0")
    return [Company(members, rank, store) for rank in range(size)]


def test_the_first_reason_is_everybody_s_reason_even_where_all_say_the_same() -> None:
    ranks = met(3)
    assert [rank.said() for rank in ranks] == [None] * 3
    assert ranks[2].say("bad_input", "no such model") == Word(2, "bad_input", "no such model")
    assert ranks[0].say("bad_input", "no such model").rank == 2
    assert ranks[1].say("interrupted", "interrupted").kind == "bad_input"
    assert {rank.said() for rank in ranks} == {Word(2, "bad_input", "no such model")}


def test_a_rank_of_another_machine_that_falls_silent_is_found_by_the_one_before_it(monkeypatch) -> None:
    monkeypatch.setattr(companies, "SILENCE_S", 0.3)
    first, second, third = met(3)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:  # the second says nothing
        first.beat()
        third.beat()
        time.sleep(0.02)
    assert first.silent() == second.this
    assert third.silent() is None


def test_a_rank_that_is_silent_is_given_up_unless_it_is_seen_to_run(monkeypatch) -> None:
    monkeypatch.setattr(companies, "SILENCE_S", 0.1)
    child, here = subprocess.Popen(["sleep", "60"]), Process.this()
    try:
        there = Process.here(child.pid)
        store = dist.HashStore()
        store.set("flowledger/beat/1", "0")
        company = Company([Member(0, here), Member(1, there)], 0, store)
        time.sleep(0.15)
        assert company.silent() is None  # it holds the interpreter, say
        os.kill(child.pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while company.silent() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert company.silent() == company.members[1]
        assert company.dead() is None
        assert company.members[1].silence == "has given no sign of life for 0 s (it was stopped by SIGSTOP)"
        company.beat()  # this process was stopped itself: what it has not heard counts from now on
        assert company.silent() is None
    finally:
        child.kill()
        child.wait()


def test_a_process_of_this_machine_is_gone_when_it_has_ended_or_another_has_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    here = Process.this()
    there = Process.here(child.pid)
    assert not here.is_gone() and not there.is_gone()
    assert msgspec.structs.replace(there, started=there.started - 3600).is_gone()
    child.kill()
    until = time.monotonic() + 10
    while not there.is_gone() and time.monotonic() < until:  # a zombie first
        time.sleep(0.01)
    assert there.is_gone()
    child.wait()
    assert there.is_gone() and not msgspec.structs.replace(there, host="elsewhere").is_gone()
    assert str(Member(0, here)) == f"rank 0 ({here.host}, pid {os.getpid()})"


def test_a_rank_waits_for_the_others_to_close_their_parts(monkeypatch) -> None:
    monkeypatch.setattr(companies, "LEAVING_S", 0.2)
    ranks = met(2)
    ranks[0].leave()
    assert not ranks[0].all_left()
    ranks[1].leave()
    assert ranks[0].all_left()


def test_an_exception_outside_of_a_step_has_no_place() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    assert place_of(raised.value) == ""
