"""The passport on the page: the numbers of `flowledger sample RUN ID --json`, and text that stays text."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SampleRow, TokenRow, Trained
from flowledger.ledger.writer import Writer
from flowledger.show import passport
from flowledger.show.page import sample, sample_strip
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from flowledger.show.report import telling_sample
from tests.ledger.synthetic import synthetic_run

Open = Callable[..., Any]
Made = Callable[..., Path]
HOSTILE = (
    "<script>document.title = 'caught'</script>", "</script><img src=x onerror=\"document.title = 'caught'\">", "\u202egnirts", "שלום", "مرحبا",
    "👩‍👩‍👧", "\x00\x1b[31m", "a" * 3000, "\n", "\t", " ", "${x}", "{{y}}", "&lt;b&gt;", "'\"`",
)  # fmt: skip
ID = "<img src=x onerror=alert(2)>"
LONG = 300  # tokens: more than stand on the page at once


def hostile_run(path: Path) -> Path:
    """Two samples whose every text is an attack or hard to write: a long one that was trained, and one that was dropped."""
    book = create(path, Manifest(run="<b>hostile</b>", level="tokens", config={"name": "x"}))
    ink, dice = Writer(book.part("actor", 0), capacity=100_000), random.Random(0)
    for name, count in ((ID, LONG), ("1", 12)):
        ink.put(SampleRow(
            step=0, stage="rollout", t_ns=1, sample_id=name, group_id="<i>g</i>", prompt_length=4, response_length=count - 4,
            finish_reason="<u>stop</u>", rewards={"<s>": 1.0, "b": 0.5}, reward=1.0 if name == ID else 0.0,
            advantage=1.0 if name == ID else None, dropped_reason=None if name == ID else "<b>timeout</b>",
        ))  # fmt: skip
        if name == ID:
            trained = [Trained(epoch=0, mini_batch=0, rank=0, micro_batch=2, start=0, stop=count)]
            ink.put(SampleRow(step=0, stage="update_actor", t_ns=2, sample_id=name, trained=trained))
        for at in range(count):
            own = at >= 4 and not 8 <= at < 10  # an environment wrote tokens 8 and 9
            numbers = (
                {"rollout_log_prob": -dice.random(), "new_log_prob": -dice.random(), "ratio": 1.5, "clipped": at == 5}
                if own
                else {}
            )
            ink.put(TokenRow(
                step=0, t_ns=3, sample_id=name, position=at, token_id=1000 + at, text=HOSTILE[at % len(HOSTILE)], attention_mask=1,
                response_mask=int(own), loss_mask=int(own), **numbers,
            ))  # fmt: skip
    ink.close()
    book.close("closed")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_run(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="module")
def book(recorded: Path) -> Iterator[Book]:
    with Ledger(recorded) as ledger:
        yield Book(ledger=ledger)


def told(ledger: Ledger, name: str) -> dict[str, Any]:
    """What the command line says of a sample."""
    found: dict[str, Any] = json.loads(passport.passport_json(passport.passport(ledger, name), ledger.run))
    return found


# --------------------------------------------------------------------------------------------------------- numbers


def test_the_strip_has_the_numbers_of_the_command_line(book: Book) -> None:
    for choice in sample.choices(book):
        assert choice.sample is not None
        shown, said = sample.data(book, choice), told(book.ledger, choice.sample)
        assert shown["sample"]["sample_id"] == choice.sample and shown["sample"]["reward"] == said["sample"]["reward"]
        known = {name for row in said["tokens"] for name, value in row.items() if value is not None}
        columns = shown["strip"]["columns"]
        assert set(columns) == known - {"run", "source", "sample_id", "step"}
        for name, values in columns.items():
            assert values == [
                pytest.approx(row[name], rel=1e-8) if isinstance(row[name], float) else row[name]
                for row in said["tokens"]
            ]


def test_gaps_are_the_differences_that_sql_finds(book: Book) -> None:
    name = sample.choices(book)[0].sample
    rows = book.ledger.rows(
        "SELECT old_log_prob - rollout_log_prob AS old_rollout, new_log_prob - old_log_prob AS new_old, ref_log_prob - new_log_prob AS ref_new "
        "FROM tokens_merged WHERE sample_id = ? ORDER BY position",
        [name],
    )
    gaps = sample.data(book, Choice(sample=name))["strip"]["gaps"]
    assert set(gaps) == {"old_rollout", "new_old", "ref_new"}
    for gap, values in gaps.items():
        assert values == [None if row[gap] is None else pytest.approx(row[gap], abs=1e-9) for row in rows]


def test_hops_and_group_are_those_of_the_command_line(book: Book) -> None:
    name = str(sample.choices(book)[0].sample)
    shown, said = sample.data(book, Choice(sample=name)), told(book.ledger, name)
    for hop, row in zip(shown["hops"], said["rows"], strict=True):
        assert {key: hop[key] for key in row if key != "values"} == {key: row[key] for key in row if key != "values"}
    assert {hop["stage"]: hop["ranks"] for hop in shown["hops"]}["rollout"] == [0]
    group = [(row["sample_id"], row["reward"], row["advantage"], len(row["trained"] or ())) for row in said["group"]]
    assert [(one["sample_id"], one["reward"], one["advantage"], one["trained"]) for one in shown["group"]] == group
    assert [(part["rank"], part["start"], part["stop"]) for part in shown["trained"]] == [
        (part["rank"], part["start"], part["stop"]) for part in said["sample"]["trained"]
    ]


def test_the_first_sample_is_the_one_that_the_report_shows_and_the_file_holds_few(book: Book) -> None:
    names = [choice.sample for choice in sample.choices(book)]
    assert names[0] == telling_sample(book.ledger) and len(set(names)) == len(names) <= sample.MOST
    group = {row["sample_id"] for row in told(book.ledger, str(names[0]))["group"]}
    assert set(names[: len(group)]) == group  # a click on its group leads to samples that are there


def test_it_says_why_it_is_shown_first(book: Book) -> None:
    names = [str(choice.sample) for choice in sample.choices(book)]
    first, other = (sample.data(book, Choice(sample=name)) for name in names[:2])
    (widest,) = book.ledger.rows(
        "SELECT max(abs(advantage)) AS size FROM samples_merged SEMI JOIN tokens USING (sample_id) WHERE samples_merged.source <> 'plan'"
    )
    assert abs(first["sample"]["advantage"]) == pytest.approx(widest["size"])
    assert f"{widest['size']:.4g}" in first["why"]["en"] and first["why"]["zh"]
    assert "why" not in other


def test_the_list_has_every_sample_of_the_ledger(book: Book) -> None:
    first, second = (sample.data(book, choice) for choice in sample.choices(book)[:2])
    assert "list" not in second
    listed = [dict(zip(first["list"]["names"], row, strict=True)) for row in first["list"]["rows"]]
    rows = book.ledger.rows("FROM samples_merged WHERE source <> 'plan'")
    assert first["list"]["all"] == len(rows) == len(listed)
    rewards = {
        row["sample_id"]: (row["step"], row["reward"], row["prompt_length"] + row["response_length"]) for row in rows
    }
    assert {one["sample_id"]: (one["step"], one["reward"], one["length"]) for one in listed} == rewards


def test_long_samples_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch, hostile: Path) -> None:
    monkeypatch.setattr(sample_strip, "MOST", 100)
    with Ledger(hostile) as ledger:
        shown = sample.data(Book(ledger=ledger), Choice(sample=ID))
    assert len(shown["strip"]["columns"]["position"]) == 100 and shown["strip"]["left_out"] == LONG - 100
    assert f"100 of {LONG} tokens" in shown["missing"][0]["en"]


# ---------------------------------------------------------------------------------------------------- what lacks


def test_below_level_tokens_the_level_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a", level="tensors")) as ledger:
        shown = sample.data(Book(ledger=ledger), Choice(sample="1"))
    assert shown["strip"]["count"] == 0 and shown["hops"] and len(shown["group"]) == 2
    assert all("record.level=tokens" in shown["missing"][0][lang] for lang in ("en", "zh"))


def test_a_sample_outside_the_written_groups_says_whose_tokens_there_are(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a")) as ledger:
        shown = sample.data(Book(ledger=ledger), Choice(sample="7"))
    assert "those of 4, 5 are" in shown["missing"][0]["en"]


def test_plans_logs_and_unknown_samples_say_what_is_missing(planned: Path, imported: Path, book: Book) -> None:
    for path, word in ((planned, "plan"), (imported, "No sample was recorded")):
        with Ledger(path) as ledger:
            shown = sample.data(Book(ledger=ledger), sample.choices(Book(ledger=ledger))[0])
        assert shown["absent"] and word in shown["missing"][0]["en"] and shown["missing"][0]["zh"]
    assert "has no sample '999'" in sample.data(book, Choice(sample="999"))["missing"][0]["en"]


def test_a_dump_without_tokens_shows_its_texts(tmp_path: Path) -> None:
    book = create(tmp_path / "a", Manifest(run="a", level="import"))
    ink = Writer(book.part("driver", 0))
    ink.put(SampleRow(step=5, stage="reward", t_ns=1, sample_id="5-0", reward=1.0))
    for position, text in enumerate((HOSTILE[0], "an answer")):
        ink.put(TokenRow(step=5, t_ns=1, sample_id="5-0", position=position, text=text))
    ink.close()
    with Ledger(tmp_path / "a") as ledger:
        shown = sample.data(Book(ledger=ledger), Choice(sample="5-0"))
    assert [one["text"] for one in shown["texts"]] == [HOSTILE[0], "an answer"] and shown["strip"]["count"] == 0
    assert shown["missing"] == []


# --------------------------------------------------------------------------------------------------- in a browser


def test_tokens_are_walked_by_keyboard_and_links_restore_them(
    opened: Open, made: Made, recorded: Path, book: Book
) -> None:
    name = str(sample.choices(book)[1].sample)
    tokens = told(book.ledger, name)["tokens"]
    page = opened(made(recorded), f"#sample?sample={name}&token={tokens[-2]['position']}")
    panel = "#sample .sample-panel dl"
    assert page.get_attribute(panel, "data-token") == str(tokens[-2]["position"])
    page.focus("#sample .sample-token.chosen")
    page.keyboard.press("ArrowRight")
    assert (
        page.get_attribute(panel, "data-token") == str(tokens[-1]["position"])
        and f"token={tokens[-1]['position']}" in page.url
    )
    shown = dict(
        page.evaluate(
            "[...document.querySelectorAll('#sample .sample-panel dl > div')].map((one) => [...one.children].map((e) => e.textContent))"
        )
    )
    assert float(shown["rollout"]) == pytest.approx(tokens[-1]["rollout_log_prob"], rel=1e-3)
    assert float(shown["advantage"]) == pytest.approx(tokens[-1]["advantage"], rel=1e-3) and shown["token id"] == str(
        tokens[-1]["token_id"]
    )
    dimmed = page.evaluate(
        "[...document.querySelectorAll('#sample .sample-token')].map((e) => e.classList.contains('masked'))"
    )
    assert dimmed == [not row["loss_mask"] for row in tokens]
    page.click("#sample .sample-group a >> nth=0")
    page.wait_for_function(f"document.querySelector('#sample [data-sample]').dataset.sample !== '{name}'")
    page.reload()
    page.wait_for_selector("#sample [data-sample]")
    assert page.get_attribute("#sample [data-sample]", "data-sample") != name


def test_on_a_phone_nothing_lies_over_the_tokens_and_each_mask_has_its_name(
    opened: Open, made: Made, recorded: Path
) -> None:
    page = opened(made(recorded), "#sample", width=390)
    panel = "getComputedStyle(document.querySelector('#sample .sample-panel')).position"
    assert page.evaluate(panel) == "static"
    labels = page.locator("#sample .sample-line").first.locator(".sample-label").all_text_contents()
    assert [label for label in labels if label.endswith(" mask")] == ["attention mask", "response mask", "loss mask"]
    rows = page.locator("#sample .sample-line").first.locator(".sample-token").first.locator(".sample-mask")
    heights = [rows.nth(at).bounding_box() for at in range(3)]
    assert all(high["y"] + high["height"] < low["y"] for high, low in itertools.pairwise(heights))
    page.click("#sample .sample-token >> nth=1")
    assert page.evaluate(panel) == "sticky"
    page.click("#sample .sample-token >> nth=1")  # again: let go
    assert page.evaluate(panel) == "static" and "token" not in page.evaluate("location.hash")
    assert page.evaluate(
        "[...document.querySelectorAll('#sample .sample-line')].every((e) => e.getBoundingClientRect().right <= innerWidth)"
    )


def test_hostile_text_stays_text(opened: Open, made: Made, hostile: Path) -> None:
    at = 8 * len(HOSTILE) + 2  # a token that would turn the writing round, far from the start
    page = opened(made(hostile), f"#sample?token={at}", lang="zh", dark=True)
    assert page.title().startswith("<b>hostile</b>")
    assert page.locator("#sample img, #sample script, #sample b, #sample u, #sample i, #sample s").count() == 0
    assert page.get_attribute("#sample [data-sample]", "data-sample") == ID
    assert page.get_attribute("#sample .sample-panel dl", "data-token") == str(at)
    assert "�gnirts" in page.text_content("#sample .sample-panel")
    assert page.locator("#sample .sample-token").count() < LONG and page.locator("#sample .sample-map").count() == 1
    page.focus("#sample .sample-token.chosen")
    page.keyboard.press("End")
    assert page.get_attribute("#sample .sample-panel dl", "data-token") == str(LONG - 1)
    page.keyboard.press("Home")
    assert page.locator("#sample path.sample-region.environment").count() == 1
    page.click("#sample .sample-picker summary")
    page.fill("#sample .sample-picker input", "timeout")
    page.click("#sample .sample-list tbody tr")
    page.wait_for_function("document.querySelector('#sample [data-sample]').dataset.sample === '1'")
    assert "<b>timeout</b>" in page.text_content("#sample .missing")
    untold = page.evaluate(
        "[...document.querySelectorAll('#sample *')].flatMap((e) => [...e.childNodes]).filter((n) => n.nodeType === 3 && /^(sample|mesh)_/.test(n.data)).map((n) => n.data)"
    )
    assert untold == []
