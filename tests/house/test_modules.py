"""The page's modules: short, and without any way by which text of a run could become code."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "src" / "flowledger" / "show" / "page"
MODULES = sorted(PAGE.glob("*.js"))
# What reads a string as HTML or as code, or asks somebody else.
DANGEROUS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|document\.write|\beval\(|new Function"
    r"|srcdoc|javascript:|importScripts|https?://(?!www\.w3\.org/)"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_reads_text_as_code(path: Path) -> None:
    assert DANGEROUS.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["host.innerHTML = name", "eval(name)", 'fetch("https://cdn.example/x.js")'])
def test_one_that_does_is_seen(text: str) -> None:
    assert DANGEROUS.search(text)


def test_modules_stay_short_enough_to_be_one_concept() -> None:
    assert {path.name: n for path in MODULES if (n := len(path.read_text().splitlines())) > 400} == {}


def test_every_module_belongs_to_the_page() -> None:
    """A file that nobody imports is not in the page."""
    needed, waiting = set[str](), ["main.js"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += re.findall(r'from "\./([\w-]+\.js)"', (PAGE / name).read_text(encoding="utf-8"))
    assert {path.name for path in MODULES} - needed == set()
