"""Links as anybody may write them: every one opens a page, and shows what it names where that is there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

Open = Callable[..., Any]
Made = Callable[..., Path]
STEPS = ("0", "1")  # of the run that was recorded

# A link, and the view that it opens. Words that every object in JavaScript knows name no view, no column and no stage.
STRANGE = {
    "#%E0%A4%A": "overview",
    "#constructor": "overview",
    "#toString?rank=1": "overview",
    "#__proto__": "overview",
    "#memory?step=100%": "memory",
    "#memory?step=%E0%A4%A&stage=constructor": "memory",
    "#overview?__proto__=1": "overview",
    "#mesh?heat=constructor&stage=toString&rank=-1": "mesh",
    "#mesh?heat=__proto__&stage=__proto__&rank=1e3": "mesh",
    "#shapes?sort=nosuch&tensor=constructor": "shapes",
    "#shapes?sort=constructor&kind=toString": "shapes",
    "#flow?tensor=__proto__&stage=constructor": "flow",
    "#sample?sample=%00&token=1e9": "sample",
}


def shown(page: Any) -> str:
    """The view that is open and drawn, once it is."""
    page.wait_for_selector("main > section:not([hidden])[data-drawn]")
    name: str = page.locator("main > section:not([hidden])").get_attribute("id")
    return name


def test_a_link_of_any_words_opens_a_page(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded))
    for link, view in STRANGE.items():
        page.evaluate("link => { location.hash = link }", link)
        page.wait_for_selector(f"#{view}:not([hidden])")
        assert (link, shown(page)) == (link, view)
        assert page.locator(f"#{view} .body > *").count() > 0, link


@pytest.mark.parametrize("link", ["#%E0%A4%A", "#constructor", "#memory?step=100%"])
def test_so_it_does_where_the_page_opens_with_it(opened: Open, made: Made, recorded: Path, link: str) -> None:
    assert shown(opened(made(recorded), link)) == STRANGE[link]


@pytest.mark.parametrize("name", ["%41", "100%", "a?b&c=d", "a+b c", "#", "样本"])
def test_a_sample_of_any_name_is_found(opened: Open, made: Made, recorded: Path, tmp_path: Path, name: str) -> None:
    file, old = renamed(made(recorded), tmp_path, name)
    page = opened(file, f"#sample?sample={quote(name, safe='')}")
    assert page.locator("#sample [data-sample]").get_attribute("data-sample") == name != old
    assert page.locator("#sample > .missing").count() == 0


def test_a_sample_is_found_on_the_mesh_without_its_step(opened: Open, made: Made, recorded: Path) -> None:
    at = document(made(recorded).read_text(encoding="utf-8"))["views"]["mesh"]["at"]
    steps = {one["sample_id"]: key for key, data in at.items() for one in data["samples"]}
    assert set(steps.values()) == {f"step={step}" for step in STEPS}
    for key in sorted(set(steps.values())):
        sample = next(name for name, where in steps.items() if where == key)
        page = opened(made(recorded), f"#mesh?{quote_pair('sample', sample)}")
        page.wait_for_selector(f"#mesh a[href*='{quote(sample, safe='')}']")
        assert page.locator("#mesh .body .missing").count() == 0


def test_signs_that_turn_the_direction_are_shown_and_not_obeyed(
    opened: Open, made: Made, recorded: Path, tmp_path: Path
) -> None:
    text = made(recorded).read_text(encoding="utf-8")
    about = document(text)["about"]["run"]
    page = opened(written(tmp_path, text, lambda told: told["about"].update(run=f"\u202e{about}\u2066")))
    assert page.locator("h1").inner_text() == f"\ufffd{about}\ufffd"
    assert page.title() == f"\ufffd{about}\ufffd · flowledger"


def test_a_view_that_cannot_be_drawn_says_so(browser: Any, made: Made, recorded: Path, tmp_path: Path) -> None:
    """Also in the console, so that no test misses it; the other views are drawn all the same."""

    def spoil(told: dict[str, Any]) -> None:
        for part in told["views"]["shapes"]["at"].values():
            part["rows"] = 7

    file = written(tmp_path, made(recorded).read_text(encoding="utf-8"), spoil)
    with browser.new_context() as context:
        page, errors = context.new_page(), list[str]()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(f"{file.resolve().as_uri()}#shapes")
        assert shown(page) == "shapes" and page.locator("#shapes h2").inner_text() == "Shapes"
        assert page.locator("#shapes .missing").inner_text().startswith("This view cannot be drawn: ")
        assert len(errors) == 1 and "TypeError" in errors[0]
        page.click("nav a[data-view=memory]")
        page.wait_for_selector("#memory[data-drawn]:not([hidden])")
        assert len(errors) == 1


def test_another_language_leaves_the_page_where_it_was(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#overview", height=400)
    page.locator("#overview details.folded summary").last.click()
    page.evaluate("window.scrollTo(0, 300)")
    page.evaluate("document.getElementById('language').click()")
    page.wait_for_function("() => document.documentElement.lang === 'zh-CN'")
    shown(page)
    page.wait_for_function("() => window.scrollY === 300")
    assert page.locator("#overview details.folded").last.get_attribute("open") is not None


DATA = re.compile(r'(<script[^>]*id="data"[^>]*>)(.*?)(</script>)', re.DOTALL)


def document(text: str) -> dict[str, Any]:
    """What a page was made of."""
    found = DATA.search(text)
    assert found
    told: dict[str, Any] = json.loads(found[2])
    return told


def written(folder: Path, text: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The page with something in its data changed."""
    told = document(text)
    change(told)
    data = json.dumps(told, ensure_ascii=True).replace("<", "\\u003c")
    out = folder / "changed.html"
    out.write_text(DATA.sub(lambda found: found[1] + data + found[3], text), encoding="utf-8")
    return out


def renamed(file: Path, folder: Path, name: str) -> tuple[Path, str]:
    """The page with a sample of that name in the place of one that it holds, and the name that this one had."""
    text = file.read_text(encoding="utf-8")
    old: str = [*document(text)["views"]["sample"]["at"]][-1].removeprefix("sample=")

    def rename(told: dict[str, Any]) -> None:
        at = told["views"]["sample"]["at"]
        part = at.pop(f"sample={old}")
        part["sample"]["sample_id"] = name
        at[quote_pair("sample", name)] = part

    return written(folder, text, rename), old


def quote_pair(name: str, value: str) -> str:
    return f"{name}={quote(value, safe='')}"
