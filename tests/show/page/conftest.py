"""Pages in a real browser: Chromium, without a network, where nothing may be written to the console."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser a file: its event loop runs as long as it is open, and tests elsewhere have loops of their own.

    Where there is none, CI fails and other machines skip.
    """
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        told = "no Chromium here (Debian: apt-get install chromium)"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """`opened(file, "#memory?rank=0", dark=…, lang=…, width=…)`: the page with that view drawn. Nothing may go wrong in it."""
    contexts, wrong = [], list[str]()

    def open_page(
        file: Path | str, link: str = "", *, width: int = 1280, height: int = 900, dark: bool = False, lang: str = "en"
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        if isinstance(file, Path):
            context.route("**/*", lambda route: route.continue_() if _local(route.request.url) else route.abort())
            context.on(
                "request", lambda request: None if _local(request.url) else wrong.append(f"asks for {request.url}")
            )
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}") if said.type in LOUD else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.add_init_script(f"try {{ localStorage.setItem('flowledger.lang', '{lang}') }} catch {{}}")
        page.goto((file.resolve().as_uri() if isinstance(file, Path) else file) + link)
        page.wait_for_selector("main > section:not([hidden])[data-drawn]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


LOUD = ("error", "warning")


def _local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "about:"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made(run, plan=…)`: the page of a run as a file; each is built once."""
    from flowledger.cli.page import write_html

    built: dict[tuple[Path, Path | None], Path] = {}

    def make(run: Path, plan: Path | None = None) -> Path:
        if (run, plan) not in built:
            out = tmp_path_factory.mktemp("page") / "page.html"
            write_html(run, out, plan=plan, lang="en")
            built[run, plan] = out
        return built[run, plan]

    return make


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the loop with a reference and a critic: two steps at level tokens, operators watched in the first."""
    from tests.diagnose.test_laws import record
    from tests.run.worlds import config

    path: Path = record(
        tmp_path_factory.mktemp("recorded") / "run",
        config(steps=2, ref={"path": "start"}, algorithm={"advantage": "gae", "kl_coef": 0.1}, critic={"lr": 1e-3}),
    )
    return path


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a launch of verl on eight ranks, as a ledger."""
    return plan(Path("examples") / "verl_qwen3_8b_fsdp.sh", tmp_path_factory.mktemp("planned") / "plan", gpu="h100-80g")


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left of a run in its log."""
    from flowledger.cli import imports

    path = tmp_path_factory.mktemp("imported") / "run"
    imports.imported([REPOSITORY / "examples" / "crash.log"], path)
    return path


def plan(source: Path, out: Path, **how: Any) -> Path:
    """A plan written as a ledger."""
    from flowledger.cli import plan as verb

    verb.plan(str(REPOSITORY / source), out=out, **how)
    return out


REPOSITORY = Path(__file__).resolve().parents[3]
