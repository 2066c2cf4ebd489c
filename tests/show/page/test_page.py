"""The page as a whole: one file, no network, every view on every kind of ledger, links, languages, lights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowledger.show.page import html, script
from flowledger.show.page.choice import Choice, choice_of
from flowledger.show.page.views import VIEWS

Open = Callable[..., Any]
Made = Callable[..., Path]
NAMES = [view.name for view in VIEWS]
KINDS = ("recorded", "planned", "imported")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Path:
    """A run, a plan, an imported log."""
    path: Path = request.getfixturevalue(request.param)
    return path


def test_every_view_opens_on_every_kind_of_ledger(opened: Open, made: Made, kind: Path) -> None:
    page = opened(made(kind))
    for name in NAMES:
        page.evaluate(f"location.hash = '#{name}'")
        page.wait_for_selector(f"#{name}[data-drawn]:not([hidden])")
        assert page.locator(f"#{name} h2").inner_text()
        assert page.locator(f"#{name} .body > *, #{name} .missing").count() > 0


def test_a_page_speaks_both_languages_and_remembers_which(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#shapes")
    assert page.locator("#shapes h2").inner_text() == "Shapes"
    page.click("#language")
    page.wait_for_function("() => document.querySelector('#shapes h2')?.innerText === '形状'")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"


def test_every_word_stands_in_both_languages() -> None:
    from flowledger.show.page.document import words

    assert {key: sorted(pair) for key, pair in words().items() if sorted(pair) != ["en", "zh"]} == {}


def test_one_is_not_many(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded))
    code = "".join(script._wrapped(name, script.source(name)) for name in ("own.js", "words.js"))
    words = {"law": {"en": "{n|one part is|# parts are} whole in {step}", "zh": "{n} 个"}}
    said = page.evaluate(
        f"words => {{ {code} const {{ speak, t }} = module_words; const made = []; for (const lang of ['en', 'zh']) {{ speak(lang, words);"
        " for (const n of [1, '1', 4, '1,000']) made.push(t('law', { n, step: 7 })); } return made; }",
        words,
    )
    assert said[:4] == [
        "one part is whole in 7",
        "one part is whole in 7",
        "4 parts are whole in 7",
        "1,000 parts are whole in 7",
    ]
    assert said[4:] == ["1 个", "1 个", "4 个", "1,000 个"]


def test_every_word_that_a_module_asks_for_is_there() -> None:
    from flowledger.show.page.document import words

    known = words()
    folder = Path(script.__file__).parent
    asked = {key for file in folder.glob("*.js") for key in re.findall(r'\bt\("(\w+)"', file.read_text())}
    assert asked - known.keys() == set()


def test_the_light_can_be_turned(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), dark=True)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


UNDRAWN = "#signals .signal:not(:has(svg))"


def test_all_charts_are_drawn_where_the_page_is_printed_or_idle(opened: Open, made: Made, recorded: Path) -> None:
    from playwright.sync_api import expect

    page = opened(made(recorded), "#signals", height=300)
    page.add_init_script("window.requestIdleCallback = () => {}")
    page.reload()
    page.wait_for_selector("#signals .signal svg")
    assert page.locator(UNDRAWN).count() > 0, "they would all be in sight"
    page.emulate_media(media="print")
    expect(page.locator(UNDRAWN)).to_have_count(0)
    idle = opened(made(recorded), "#signals", height=300)
    expect(idle.locator("#signals .signal")).not_to_have_count(0)
    expect(idle.locator(UNDRAWN)).to_have_count(0)


def test_the_way_back_works(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#shapes")
    page.click("nav a[data-view=overview]")
    page.wait_for_selector("#overview:not([hidden])")
    page.go_back()
    page.wait_for_selector("#shapes:not([hidden])")


def test_a_page_allows_nothing_but_itself(made: Made, recorded: Path) -> None:
    text = made(recorded).read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "unsafe" not in text.split("<style>")[0]
    assert (
        re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text.split("<body>")[1].split("<script>")[0]) == []
    )


def test_data_cannot_end_its_element() -> None:
    told = html.as_data({"run": "</script><script>alert(1)</script><!--", "also": "\u2028"})
    assert "<" not in told and "\u2028" not in told
    assert json.loads(told) == {"run": "</script><script>alert(1)</script><!--", "also": "\u2028"}


def test_modules_keep_to_two_forms_of_import_and_export(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"main.js": 'import { a } from "./a.js";\na();', "a.js": "export default 3;"}
    monkeypatch.setattr(script, "source", sources.__getitem__)
    with pytest.raises(ValueError, match=r"a.js: export default 3"):
        script.script.__wrapped__()


def test_modules_may_not_need_each_other_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "main.js": 'import { a } from "./a.js";\na();',
        "a.js": 'import { b } from "./b.js";\nexport const a = b;',
        "b.js": 'import { a } from "./a.js";\nexport const b = a;',
    }
    monkeypatch.setattr(script, "source", sources.__getitem__)
    with pytest.raises(ValueError, match="circle"):
        script.script.__wrapped__()


@pytest.mark.parametrize(
    "choice", [Choice(), Choice(step=3), Choice(rank=0, sample="a b&c=1", step=2)], ids=lambda one: one.key or "open"
)
def test_a_choice_is_found_again_by_its_key(choice: Choice) -> None:
    from urllib.parse import parse_qsl

    assert choice_of(dict(parse_qsl(choice.key))) == choice


def test_values_are_written_as_a_terminal_writes_them(opened: Open, made: Made, recorded: Path) -> None:
    """Compared with `show/words.py`, value by value, in the browser's own arithmetic."""
    from flowledger.show import words

    cases = [
        *(("bytes", value) for value in (0, 523, 999, 1000, 1024, 4096, 10_189, 123_456_789, 5e12, -2048)),
        *(("count", value) for value in (0, 7, 1234, 1_000_000)),
        *(
            ("number", value)
            for value in (0, 1, -3, 0.5, 1 / 3, 1e-5, 123456.0, 1234567.0, 2.5e-7, -0.00012345, 99999.5)
        ),
        *(("percent", value) for value in (0, 0.05, 0.0994, 0.1, 0.5, 1, -0.3)),
        *(("seconds", value) for value in (0.0004, 0.0123, 0.5, 1.5, 12.26)),
        *(("milliseconds", value) for value in (0.4, 12.3, 500, 1500)),
        *(("shape", value) for value in ([], [4], [4, 3])),
    ]
    page = opened(made(recorded))
    code = script._wrapped("forms.js", script.source("forms.js"))
    written = page.evaluate(
        f"cases => {{ {code} return cases.map(([form, value]) => module_forms.written(value, form)); }}", cases
    )
    assert written == [words.written(value, form) for form, value in cases]


def test_the_plan_of_another_job_is_refused(recorded: Path, planned: Path, tmp_path: Path) -> None:
    from flowledger.cli.page import write_html
    from flowledger.flow.errors import BadInput

    with pytest.raises(BadInput, match="the plan is of verl"):
        write_html(recorded, tmp_path / "page.html", plan=planned, lang="en")
    assert not (tmp_path / "page.html").exists()
