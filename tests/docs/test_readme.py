"""The README and the pages say what is so: commands run, links lead somewhere, tables and pictures are those of the code."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from difflib import unified_diff
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel
from tests.docs.terminal import typed

from flowledger.config.read import read
from flowledger.config.schema import RunConfig
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import ROWS, columns
from flowledger.show.explain import explain

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
PAGES = (*READMES, *sorted(DOCS.glob("*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARKED = re.compile(r"^```bash\nflowledger (\S+)[^\n]*\n```\n(<!-- \w+: [^\n]* -->\n)?```text\n", re.MULTILINE)
UNMARKED = {"sql"}  # its rows stand in the order of their times
NEEDS_WEIGHTS = "smollm2"  # 135M parameters: `make run` is the test of these
EXIT = {"check": 1}  # the README checks settings that break a rule


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[str]:
    """Every line of the page's bash blocks."""
    return [line for language, content in blocks(page) if language == "bash" for line in content.splitlines()]


def flowledger(page: Path, verb: str = "") -> list[list[str]]:
    """The words after `flowledger` of each such command that can run here."""
    found = [shlex.split(line)[1:] for line in commands(page) if line.startswith(f"flowledger {verb}")]
    return [words for words in found if not any(NEEDS_WEIGHTS in word for word in words)]


def shown(page: Path) -> Iterator[tuple[str, str]]:
    """Each command with the output that stands below it, or an empty text."""
    for (language, content), (following, output) in pairwise([*blocks(page), ("", "")]):
        if language == "bash" and content.startswith("flowledger") and NEEDS_WEIGHTS not in content:
            yield content.strip().removeprefix("flowledger "), output if following == "text" else ""


def headings(output: str) -> list[str]:
    """The words without digits of the first line, and of the line above each rule: column headings, not values."""
    lines = [line for line in output.splitlines() if line.strip() != "…"]
    above = [line for line, below in pairwise(lines) if below.strip().startswith("──")]
    return [word for line in [*lines[:1], *above] for word in line.split() if not re.search(r"[\d…]", word)]


def script(name: str) -> ModuleType:
    """A script of docs/, loaded by its place."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, DOCS / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted key of every setting."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner = next((part for part in _parts(field.annotation) if issubclass(part, BaseModel)), None)
        yield from settings(inner, f"{key}.") if inner else [key]


def tails(key: str) -> list[str]:
    """`a.b.c`, `b.c`, `c`: a table whose title names the section leaves it out."""
    parts = key.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _parts(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _parts(part)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples in it, where the README's commands are run."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@cache
def printed(words: str, place: Path) -> tuple[str, str]:
    """What the script that fills the pages starts a process for."""
    done = typed(words, place, COLUMNS="100", NO_COLOR="1")
    verb = words.split()[0]
    assert done.returncode == EXIT.get(verb, done.returncode if verb == "diagnose" else 0), (
        f"flowledger {words}: exit code {done.returncode}\n{done.stderr}"
    )
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def outputs(place: Path) -> list[tuple[list[str], str, str]]:
    """Every flowledger command of the README, run in order: words, what the README shows, what came out."""
    return [(shlex.split(words), output, "".join(printed(words, place))) for words, output in shown(READMES[0])]


def test_every_verb_of_the_readme_prints_the_headings_it_shows(outputs: list[tuple[list[str], str, str]]) -> None:
    assert {words[0] for words, _, _ in outputs} == {
        "plan", "check", "run", "record", "show", "diff", "sample", "sql", "explain", "import", "diagnose", "watch",
        "selftest", "export",
    }  # fmt: skip
    for words, readme, real in outputs:
        assert headings(readme), f"flowledger {' '.join(words)} shows no headings"
        missing = [word for word in headings(readme) if word not in real]
        assert not missing, f"flowledger {' '.join(words)} does not print {missing}:\n{real[:2000]}"


def test_sql_of_the_pages_works_on_the_run_of_the_readme(
    place: Path, outputs: list[tuple[list[str], str, str]]
) -> None:
    statements = [words[2] for page in PAGES for words in flowledger(page, "sql")]
    assert len(statements) > len(READMES)
    with Ledger(place / "runs" / "first") as ledger:
        for statement in statements:
            assert ledger.query(statement)[1], f"{statement!r} gives no rows"


def test_both_readmes_have_the_same_commands() -> None:
    english, chinese = map(commands, READMES)
    assert english == chinese
    assert "make run" in english
    assert "make test" in english


def test_run_commands_of_the_pages_are_valid_configurations(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    runs = [words for page in PAGES for words in flowledger(page, "run")]
    assert len(runs) > len(READMES)
    for words in runs:
        overrides = [word for word in words[2:] if "=" in word]
        assert read(words[1], overrides).steps >= 1


def test_explain_knows_the_words_that_pages_ask_for() -> None:
    for page in PAGES:
        for words in flowledger(page, "explain"):
            assert explain(words[1], "zh")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)\)", page.read_text(encoding="utf-8"))
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert links
    assert not dead


def anchors(page: Path) -> set[str]:
    """What a `#…` behind a link may name: the headings, lower case, without punctuation, dashes for spaces."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_name_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+\.md)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert not [f"{file}#{title}" for file, title in links if title not in anchors(page.parent / file)]


@pytest.mark.parametrize("page", [page for page in PAGES if not page.name.endswith(".zh-CN.md")], ids=lambda p: p.name)
def test_a_page_has_a_chinese_twin_with_the_same_sections(page: Path) -> None:
    twin = page.with_name(page.name.replace(".md", ".zh-CN.md"))
    levels = [
        re.findall(r"^#+(?= )", BLOCK.sub("", file.read_text(encoding="utf-8")), re.MULTILINE) for file in (page, twin)
    ]
    assert levels[0] == levels[1]


@pytest.mark.parametrize("name", ["ledger.md", "ledger.zh-CN.md"])
def test_every_column_and_view_of_the_ledger_is_described(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    common, *sections = re.split(r"^## (?=`\w+`$)", text, flags=re.MULTILINE)
    described = {section.partition("\n")[0].strip("`"): common + section for section in sections}
    for row in ROWS:
        for column, kind in columns(row).items():
            assert f"| `{column}` | {kind} | " in described[row.table], f"{row.table}.{column}"
    views = re.findall(
        r"^CREATE VIEW (\w+)", (ROOT / "src/flowledger/ledger/views.sql").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert views
    assert not [view for view in views if f"`{view}`" not in text]


@pytest.mark.parametrize("name", ["ledger.md", "ledger.zh-CN.md"])
def test_every_finding_is_described(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    found = {word for source in sources for word in re.findall(r'FindingRow\(\s*id="(\w+)"', source)}
    assert {"rows_dropped", "call_failed", "observed_differs_from_configuration"} <= found
    assert not [word for word in sorted(found) if f"\n| `{word}` |" not in text]


@pytest.mark.parametrize("name", ["the-flow.md", "the-flow.zh-CN.md"])
def test_every_stage_and_tensor_is_named_in_the_flow(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert not [word for word in (*stages(), *tensors()) if f"\n| `{word}` |" not in text]


@pytest.mark.parametrize("name", ["getting-started.md", "getting-started.zh-CN.md"])
def test_every_setting_is_described(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    keys = list(settings(RunConfig))
    assert {"steps", "rollout.samples_per_prompt", "reward.components.kind", "mesh.tp", "async.max_staleness"} <= {
        *keys
    }
    assert not [key for key in keys if not any(f"`{tail}`" in text for tail in tails(key))]


def test_tables_and_outputs_in_pages_are_those_of_the_product(
    place: Path, outputs: list[tuple[list[str], str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_tables = script("fill_tables.py")
    monkeypatch.setattr(fill_tables, "printed", printed)
    stale = [
        line
        for page in fill_tables.pages()
        for line in unified_diff(
            page.read_text(encoding="utf-8").splitlines(), fill_tables.filled(page, place).splitlines(), page.name, n=0
        )
    ]
    assert outputs
    assert not stale, "\n".join(["run: python docs/fill_tables.py", *stale])


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_every_output_of_a_readme_is_filled_from_the_product(page: Path) -> None:
    found = MARKED.findall(page.read_text(encoding="utf-8"))
    assert len(found) > 10
    assert {verb for verb, mark in found if not mark} == UNMARKED


def test_what_differs_from_run_to_run_makes_no_page_stale() -> None:
    steady = script("fill_tables.py").steady
    first = " step 1  reward 0.085  len 16  tok/s 308\n rows 10,827, 2.5 MiB, 0.08 s (13.88%)  [16, 4]  resid 146M 1.5e-03\n ───"
    assert steady(first) == steady(
        " step 1 reward 0.1 len 16  tok/s 1,238\n rows 9,999, 2.6 MiB,\n10.1 s (9%) [16, 4] resid 1.1G -1.7e-05\n ─────"
    )
    for other in ("[16, 5]", "[16]"):
        assert steady(first) != steady(first.replace("[16, 4]", other))
    assert steady("laws: 4 hold, 2 not checked") != steady("laws: 3 hold, 3 not checked")


def test_an_output_is_shortened_to_the_lines_that_are_asked_for() -> None:
    shortened = script("fill_tables.py").shortened
    text = " stage  a\n ────────\n x      1\n        2\n        row\n y/     3\n forward\n z      4\n"
    assert shortened(text, "^ stage | ^ x | !row | ^ y") == (
        " stage  a\n ────────\n x      1\n        2\n …\n y/     3\n forward\n …\n"
    )


def test_pictures_are_those_of_the_flow() -> None:
    pictures = script("images/draw_flow.py").pictures()
    stale = [path.name for path, content in pictures.items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run: python docs/images/draw_flow.py"


def test_headings_are_words_and_not_values() -> None:
    assert headings(" stage  time  share\n prompt  4 ms  1%") == ["stage", "time", "share"]
    assert headings("step 1/3  reward 0.073") == ["step", "reward"]
    assert headings("plan x1\n a  b\n ─────\n c  d") == ["plan", "a", "b"]
    assert headings("") == []
