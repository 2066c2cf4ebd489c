"""The page of algorithms: its recipes train, the row it shows is complete, and the types are those of the code."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from flowledger.config.read import read
from flowledger.run import loop
from flowledger.run.algorithms.estimate import AdvantageInputs, Estimate
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss
from flowledger.tables import algorithms

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("algorithms.md", "algorithms.zh-CN.md")]
RECIPE = re.compile(r"^\| ([^|]+) \| `([\w.]+=\S+(?: [\w.]+=\S+)*)` \|", re.MULTILINE)
RECIPES = RECIPE.findall(PAGES[0].read_text(encoding="utf-8"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_both_pages_have_the_same_recipes(page: Path) -> None:
    assert len(RECIPES) == 8
    assert RECIPE.findall(page.read_text(encoding="utf-8")) == RECIPES


@pytest.mark.usefixtures("rewards_here")
@pytest.mark.parametrize(("name", "settings"), RECIPES, ids=[name for name, _ in RECIPES])
def test_a_recipe_is_a_change_and_trains(name: str, settings: str) -> None:
    short = ("steps=2", "threads=1", "record.level=off")
    plain = read(ROOT / "examples/tiny.yaml", short)
    config = read(ROOT / "examples/tiny.yaml", [*settings.split(), *short])
    assert config != plain
    with loop.prepared(config) as world:
        reports = list(loop.train(world))
    assert len(reports) == 2
    assert all(report.metrics["grad_norm"] > 0 for report in reports)


@every_page
def test_the_row_that_is_shown_is_one_that_the_table_takes(page: Path) -> None:
    block = re.search(r"^```toml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert block
    (raw,) = tomllib.loads(block[1])["algorithm"]
    assert algorithms._row(raw).name == "best_of_group"


@every_page
@pytest.mark.parametrize("kind", [AdvantageInputs, Estimate, LossInputs, TokenLoss])
def test_every_field_of_a_type_is_named_in_its_row(page: Path, kind: type) -> None:
    row = re.search(rf"^\| `{kind.__name__}` \| .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert row
    assert not [one.name for one in fields(kind) if f"`{one.name}`" not in row[0]]
