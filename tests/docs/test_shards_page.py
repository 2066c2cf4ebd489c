"""The page on shards and its example: what it says is refused is refused so, and every way to use four processes is one."""

import re
import shlex
from pathlib import Path

import pytest

from flowledger.config import shards
from flowledger.config.read import read
from flowledger.flow.comm import COMM_TYPES
from flowledger.flow.errors import BadInput
from flowledger.run.parallel.ranks import GROUPS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("shards.md", "shards.zh-CN.md")]
EXAMPLE = Path("examples/shards.yaml")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

CHUNKS = "mesh.dp=1 mesh.tp=1 mesh.pp=2 mesh.vpp=2 model.tiny.layers=4"

# What the page changes in the example, and on how many processes.
REFUSED = (
    ("", 2), ("mesh.tp=1 mesh.dp=3", 3), ("mesh.tp=1 mesh.dp=4 mesh.ep=3 model.tiny.experts=6", 4),
    ("mesh.tp=1 mesh.ep=2", 2), ("mesh.dp=1 mesh.sp=4", 8), ("mesh.dp=1 mesh.tp=4", 4),
    ("mesh.dp=1 mesh.tp=1 mesh.pp=3", 3), ("mesh.dp=1 mesh.tp=1 mesh.pp=2 actor.engine.layers_in_stages=[2,1]", 2),
    (f"{CHUNKS} actor.engine.pipeline=interleaved actor.engine.layers_in_first_stage=1", 2), ("mesh.vpp=2", 4), (CHUNKS, 2),
    ("mesh.dp=1 mesh.tp=1 mesh.cp=2 actor.packed=false", 2),
    ("mesh.dp=1 actor.packed=false actor.engine.sequence_parallel=true", 2), ("rollout.weights=shared", 4),
    ("model.lora.rank=4", 4), ("actor.engine.mesh.tp=2", 4),
)  # fmt: skip


def messages(page: Path) -> list[str]:
    """The last cell of each row that shows a message."""
    return re.findall(r"^\| [^`|]+ \| `([^`]+; use [^`]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)


@every_page
def test_what_is_refused_is_refused_in_these_words(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = []
    for words, processes in REFUSED:
        config = read(EXAMPLE, shlex.split(words))
        with pytest.raises(BadInput) as refused:
            shards.check(config, processes)
        said.append(str(refused.value))
    assert said == messages(page)


def test_every_way_that_the_example_names_takes_four_processes() -> None:
    lines = (ROOT / EXAMPLE).read_text(encoding="utf-8").splitlines()
    ways = [re.findall(r"[\w.]+=\S+", line) for line in lines if re.match(r"#   [\w.]+=", line)]
    assert len(ways) == 8
    for way in [[], *ways]:
        shards.check(read(ROOT / EXAMPLE, way), 4)


@every_page
def test_every_group_and_kind_of_communication_is_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = [*GROUPS, *(kind.name for kind in COMM_TYPES)]
    assert not [name for name in names if not re.search(rf"^\| [^|]*`{name}`[^|]* \|", text, re.MULTILINE)]
