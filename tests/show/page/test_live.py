"""The live page: what is new in a run comes by itself, whatever becomes of the run."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger.manifest import Process
from flowledger.ledger.reader import Ledger
from flowledger.show.page.growing import FITS, Growing
from flowledger.show.page.views import BY_NAME
from tests.show.page import live_server
from tests.show.page.live_server import Browser, Written, ready, serving

HOSTILE = "</script><script>window.hurt = 1</script><!-- \u2028 <img src=x onerror=window.hurt=1>"


def until(events: Iterator[tuple[str, Any, str]], name: str, holds: Callable[[Any], bool]) -> Any:
    """The first event of a name of which something holds."""
    return next(data for kind, data, _ in events if kind == name and holds(data))


def listens(browser: Browser, view: str, **more: object) -> str:
    """What a page that has just been opened asks for."""
    live = browser.document()["live"]
    words = {"run": live["run"], "version": live["version"], "view": view, **more}
    return "&".join(f"{name}={str(value).replace(' ', '%20').replace('+', '%2B')}" for name, value in words.items())


@pytest.fixture(params=["whole", "vast"])
def fits(request: pytest.FixtureRequest) -> int:
    """The same is asked of a run that is opened and of one that is added up."""
    return FITS if request.param == "whole" else 0


def test_steps_come_as_they_are_written(tmp_path: Path, fits: int) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    with serving(tmp_path / "run", fits=fits) as browser:
        assert ready(browser)["about"]["latest"] == {"step": 0, "seconds": 2.0}
        with browser.listening(listens(browser, "overview")) as events:
            for step in (1, 2):
                book.step(step, seconds=2.0 + step)
                assert until(events, "pulse", _is_at(step))["latest"]["seconds"] == 2.0 + step
                parts = until(events, "views", lambda told, step=step: _last_step(told) == step)
                assert parts["overview"]["choices"] == [""]
            book.step(3, ends=False)
            time.sleep(0.1)
            book.step(4)
            assert (
                until(events, "pulse", lambda told: told["latest"]["step"] > 2)["latest"]["step"] == 4
            )  # 3 has not ended


def _is_at(step: int) -> Callable[[Any], bool]:
    return lambda told: bool(told["latest"]["step"] == step)


def _last_step(told: Any) -> int | None:
    rows = told["overview"]["at"][""]["time"].get("rows", [])
    return max((row["step"] for row in rows), default=None)


def test_what_it_shows_of_a_run_is_what_the_ledger_says(tmp_path: Path, fits: int) -> None:
    book = Written(tmp_path / "run")
    for step in range(5):
        book.step(step, seconds=1.0 + step)
    with serving(tmp_path / "run", fits=fits) as browser:
        ready(browser)
        rows = browser.ask("/view/overview").json[""]["time"]["rows"]
        heat = json.dumps(browser.ask("/view/mesh?step=4").json)
    with Ledger(tmp_path / "run") as ledger:
        stages = {(row["step"], row["stage"]): row for row in ledger.rows("FROM stages")}
    assert rows
    for row in rows:
        known = stages[row["step"], row["stage"]]
        assert (row["seconds"], row["share"], row["slowest_rank"]) == (known["seconds"], known["share"], 0)
    assert "4.5" in heat  # rank 1 spent 5 - 0.5 seconds in step 4


def test_two_that_look_at_different_things_get_each_their_own(tmp_path: Path) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    with serving(tmp_path / "run") as browser:
        ready(browser)
        with (
            browser.listening(listens(browser, "mesh", step=0)) as one,
            browser.listening(listens(browser, "signals")) as other,
        ):
            book.step(1)
            mesh, signals = until(one, "views", bool), until(other, "views", bool)
            assert (set(mesh), set(mesh["mesh"]["at"])) == ({"mesh"}, {"step=0"})
            assert set(signals) == {"signals"}


def test_one_that_comes_back_hears_only_what_it_has_missed(tmp_path: Path) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    with serving(tmp_path / "run") as browser:
        ready(browser)
        query = listens(browser, "overview")
        with browser.listening(query) as events:
            book.step(1)
            last = next(number for kind, _, number in events if kind == "views")
        with browser.listening(query.replace("version=", "was=") + f"&version={last}", seconds=1.5) as events:
            assert [kind for kind, _, _ in _of_a_while(events)] == ["pulse"]  # where it stands, and no view again


def _of_a_while(events: Iterator[tuple[str, Any, str]]) -> Iterator[tuple[str, Any, str]]:
    try:
        yield from events
    except (TimeoutError, AssertionError):
        return


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path / "run", fits=0) as browser:
        page = browser.document()
        assert page["live"]["run"] == ""
        assert "There is no run at" in page["views"]["overview"]["at"][""]["missing"][0]["en"]
        assert browser.ask("/view/memory").json[""]["absent"] is True
        with browser.listening("view=overview&run=&version=0") as events:
            Written(tmp_path / "run").step(0)
            assert until(events, "begun", bool)["run"].startswith("run 2026")
        assert ready(browser)["about"]["run"] == "run"


def test_another_run_at_the_same_place_is_begun_anew(tmp_path: Path) -> None:
    Written(tmp_path / "run").step(7)
    with serving(tmp_path / "run", fits=0) as browser:
        first = ready(browser)
        with browser.listening(listens(browser, "overview")) as events:
            shutil.rmtree(tmp_path / "run")
            time.sleep(0.1)
            assert browser.document()["about"]["run"] == "run"  # the page stays as it was
            Written(tmp_path / "run", "another", "2026-01-02T00:00:00+00:00").step(0)
            assert until(events, "begun", bool)["run"] != first["live"]["run"]
        again = ready(browser)
        assert (again["about"]["run"], again["about"]["latest"]["step"]) == ("another", 0)


def test_the_death_of_a_run_is_told_and_so_is_its_coming_back(tmp_path: Path, fits: int) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        known = Process.here(launcher.pid)
        book = Written(tmp_path / "run", launcher=known)
        book.step(0)
        with serving(tmp_path / "run", fits=fits) as browser:
            assert ready(browser)["about"]["state"] == "open"
            with browser.listening(listens(browser, "overview")) as events:
                launcher.kill()
                launcher.wait()
                assert until(events, "about", lambda told: told["state"] == "crashed")
                book.parts = [book.run.part("actor", rank) for rank in range(2)]  # started again, from its checkpoint
                book.step(1)
                assert until(events, "pulse", _is_at(1))
                book.run.close()
                assert until(events, "about", lambda told: told["state"] == "closed")


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    book.find(HOSTILE)
    with serving(tmp_path / "run") as browser:
        ready(browser)
        page = browser.ask("/").body.decode()
        assert "<script>window.hurt" not in page and "<img src=x" not in page
        assert browser.document()["views"]["overview"]["at"][""]["findings"][0]["message"] == HOSTILE
        with browser.listening(listens(browser, "overview")) as events:
            book.find(f"{HOSTILE}\n\nevent: begun\ndata: {{}}\n\n")
            book.step(1)
            found = until(events, "views", lambda told: len(told["overview"]["at"][""]["findings"]) == 2)
            assert found["overview"]["at"][""]["findings"][1]["message"].endswith(
                "data: {}\n\n"
            )  # an event's end in it ends none


def test_in_a_browser_it_draws_what_is_new_and_keeps_the_focus(tmp_path: Path, opened: Callable[..., Any]) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    book.find(HOSTILE)
    with serving(tmp_path / "run") as server:
        ready(server)
        page = opened(server.url, "#overview")
        page.locator("#live[data-step='0']").wait_for()
        page.locator("#overview h2").focus()
        book.step(1, seconds=3.0)
        page.locator("#live[data-step='1']").wait_for()
        page.locator("#overview", has_text="3.00 s").wait_for()
        assert page.evaluate("document.activeElement.tagName") == "H2"
        assert page.evaluate("window.hurt === undefined")
        page.goto(f"{server.url}#mesh?step=1")
        page.locator("#mesh[data-drawn]").wait_for()


def test_a_browser_says_that_the_server_is_away_and_comes_back_by_itself(tmp_path: Path, browser: Any) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    with browser.new_context() as context:
        page = context.new_page()
        with serving(tmp_path / "run") as server:
            ready(server)
            page.goto(server.url)
            page.locator("#live[data-step='0']").wait_for()
        page.locator("#live", has_text="connection lost").wait_for()
        book.step(1)
        with serving(tmp_path / "run", port=server.port):
            page.locator("#live[data-step='1']", has_text="live").wait_for()
            page.locator("#overview", has_text="1").wait_for()


def test_a_look_that_fails_is_told_once_and_the_next_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    book = Written(tmp_path / "run")
    book.step(0)
    with serving(tmp_path / "run", fits=0) as browser:
        ready(browser)
        with monkeypatch.context() as broken:
            broken.setattr(Growing, "read", lambda _: 1 / 0)
            time.sleep(0.2)
        with browser.listening(listens(browser, "overview")) as events:
            book.step(1)
            assert until(events, "pulse", _is_at(1))
    assert capfd.readouterr().err.count("could not be brought up to date: ZeroDivisionError") == 1


def test_a_run_of_which_nothing_can_be_said_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise BadInput("Out of Range Error: too large")

    Written(tmp_path / "run").step(0)
    monkeypatch.setattr(live_server, "rows_alone", fails)
    monkeypatch.setitem(BY_NAME, "memory", replace(BY_NAME["memory"], choices=fails, data=fails))
    with serving(tmp_path / "run") as browser:
        page = ready(browser)
        (first,) = page["views"]["overview"]["at"].values()
        assert first["missing"][-1]["en"].startswith("Findings and metrics cannot be shown")
        assert page["views"]["memory"]["choices"] == [""] and page["views"]["mesh"]["choices"] == ["step=0"]
        told = browser.ask("/view/memory")
        assert told.status == 200 and told.json[""]["missing"][0]["en"].startswith("This cannot be shown")
        assert not browser.ask("/view/mesh?step=0").json["step=0"].get("absent")
        with browser.listening("view=memory&run=" + quote(page["live"]["run"]) + "&version=0") as events:
            assert until(events, "views", bool)["memory"]["at"][""]["absent"]


def test_a_run_that_is_removed_is_told_and_stays_on_the_page(tmp_path: Path, fits: int) -> None:
    Written(tmp_path / "run").step(0)
    with serving(tmp_path / "run", fits=fits) as browser:
        ready(browser)
        with browser.listening(listens(browser, "overview")) as events:
            (tmp_path / "run").rename(tmp_path / "away")
            assert until(events, "about", lambda told: told["state"] == "gone")["run"] == "run"
            assert browser.document()["about"]["latest"]["step"] == 0
            (tmp_path / "away").rename(tmp_path / "run")
            until(events, "about", lambda told: told["state"] != "gone")
