"""Length statistics: given as quantiles, read from files and runs; bad input is one clear line."""

import json
from pathlib import Path
from random import Random

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.plan.length_files import read_lengths
from flowledger.plan.lengths import of_samples, parse
from tests.ledger.synthetic import RESPONSE_LENGTHS, synthetic_run


def test_quantiles_are_met_and_between_them_the_line_is_straight() -> None:
    lengths = parse("p50=512,p99=4096,max=8192")
    assert lengths.response.at([0.5, 0.99, 1.0, 0.745]) == pytest.approx([512, 4096, 8192, 2304])
    assert lengths.response.mean == pytest.approx(0.5 * 256.5 + 0.49 * 2304 + 0.01 * 6144)
    assert (lengths.longest(1024), lengths.shortest(1024)) == (9216, 1025)


def test_prompts_have_statistics_of_their_own_or_count_at_their_most() -> None:
    both = parse("p50=100,max=200,prompt_min=10,prompt_max=30")
    assert (both.longest(1000), both.shortest(1000), both.mean(1000)) == (230, 11, pytest.approx(20 + 100.25))
    assert parse("p50=100,max=200").longest(1000) == 1200


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("p50=512", "max is missing"),
        ("p50=512,p99=100,max=8192", "p99 = 100 is less than p50 = 512"),
        ("p50=512,maxx=9", "did you mean max?"),
        ("p50=many,max=9", "p50 = 'many' is no number of tokens"),
        ("512", "no such file or run"),
        ("p50,max=9", "'p50' is no NAME=TOKENS"),
        ("p150=5,max=9", "'p150' is no quantile"),
        ("prompt_max=9", "no response length"),
        ("max=-4", "is no number of tokens"),
    ],
)
def test_bad_statistics_are_one_clear_line(text: str, line: str) -> None:
    with pytest.raises(BadInput) as told:
        read_lengths(text)
    assert line in str(told.value) and "\n" not in str(told.value)


ROWS = [{"response_length": r, "prompt_length": p} for r, p in ((10, 1), (20, 2), (40, 3))]


def _write(folder: Path, kind: str) -> Path:
    path = folder / f"lengths.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"response_length": [10, 20, 40], "prompt_length": [1, 2, 3]}))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif kind == "csv":
        path.write_text(
            "prompt_length,response_length\n" + "\n".join(f"{r['prompt_length']},{r['response_length']}" for r in ROWS)
        )
    else:
        values = ", ".join(f"({row['response_length']}, {row['prompt_length']})" for row in ROWS)
        sql = f"COPY (SELECT * FROM (VALUES {values}) t(response_length, prompt_length)) TO '{path}' (FORMAT parquet)"
        duckdb.connect().execute(sql)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_a_file_of_samples_says_the_same_in_every_form(tmp_path: Path, kind: str) -> None:
    lengths = read_lengths(str(_write(tmp_path, kind)))
    assert (lengths.rows, lengths.longest(100), lengths.shortest(100)) == (3, 43, 11)
    assert lengths.response.mean == pytest.approx((15 + 30) / 2)  # straight lines between the three samples


@pytest.mark.parametrize(("name", "text"), [("a.json", "[10, 20]"), ("a.csv", "10\n20\n"), ("a.jsonl", "10\n20")])
def test_plain_numbers_are_response_lengths(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_lengths(str(tmp_path / name)).longest(5) == 25


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.json", "{", "cannot read it"),
        ("a.json", "[]", "no samples in it"),
        ("a.json", '[{"length": 3}]', "no column response_length; it has length"),
        ("a.jsonl", '{"response_length": "long"}', "'long' is no number of tokens"),
        ("a.jsonl", '{"response_length": null}', "None is no number of tokens"),
        ("a.csv", "response_length,prompt_length\n3\n", "cannot read it"),
        ("a.txt", "3", "a file is one of"),
        ("a.parquet", "3", "cannot read it"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput) as told:
        read_lengths(str(tmp_path / name))
    assert line in str(told.value) and "\n" not in str(told.value)


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=60))
def test_quantiles_of_samples_rise_and_stay_within_them(values: list[int]) -> None:
    lengths = of_samples(values, None, "test")
    at = lengths.response.at([n / 40 for n in range(41)])
    assert at == sorted(at)
    assert (lengths.response.shortest, lengths.response.longest) == (min(values), max(values))
    assert min(values) <= lengths.response.mean + 1e-6 and lengths.response.mean <= max(values) + 1e-6


def test_drawing_follows_the_statistics_and_the_seed() -> None:
    lengths = parse("min=100,p50=512,p99=4096,max=8192")
    drawn = lengths.sample(20_000, prompt_tokens=0, limit=8192, random=Random(1))
    assert drawn == lengths.sample(20_000, prompt_tokens=0, limit=8192, random=Random(1))
    assert sorted(drawn)[10_000] == pytest.approx(512, rel=0.05)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.response.mean, rel=0.03)
    assert max(lengths.sample(999, prompt_tokens=50, limit=300, random=Random(2))) == 300


def test_a_run_gives_the_lengths_of_its_own_samples(tmp_path: Path) -> None:
    lengths = read_lengths(str(synthetic_run(tmp_path / "run", steps=2)))
    assert lengths.rows == 2 * len(RESPONSE_LENGTHS)
    assert (lengths.response.shortest, lengths.response.longest) == (min(RESPONSE_LENGTHS), max(RESPONSE_LENGTHS))
    with pytest.raises(BadInput):
        read_lengths(str(tmp_path))  # a directory that is no run
