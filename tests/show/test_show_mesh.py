"""The map of a job from its ledger, and who holds what: numbers worked out by hand, for a small recorded run and a large plan."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowledger.cli import main
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SampleRow, Trained
from flowledger.ledger.writer import Writer
from flowledger.show import plain, terminal
from flowledger.show.mesh import Question, mesh_table

SIZES = {"B": 6, "A": 8, "K": 2, "L": 4, "E": 4}
# Sample -> (group, prompt, response, dp rank). Samples 0 and 1 share a prompt and a micro-batch; 5 was dropped.
SAMPLES = {0: ("0", 4, 3, 0), 1: ("0", 4, 2, 0), 2: ("1", 5, 3, 1), 3: ("1", 5, 1, 1), 4: ("2", 2, 2, 0)}
MICRO_BATCH = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}


def recorded(path: Path, mesh: dict[str, int], *, config: dict[str, Any] | None = None) -> Path:
    """A run on this mesh whose rank 0 and the first rank of dp 1 recorded what they trained on."""
    book = create(path, Manifest(run=path.name, mesh=mesh, config=config or {}, bindings=SIZES))
    for dp, rank in ((0, 0), (1, mesh["sp"] * mesh["tp"] * mesh["cp"])):
        ink = Writer(book.part("actor", rank, coordinates={"dp": dp}))
        for sample, (group, prompt, response, at) in SAMPLES.items():
            if at == dp:
                trained = [Trained(epoch=0, mini_batch=0, rank=rank, micro_batch=MICRO_BATCH[sample])]
                ink.put(SampleRow(
                    t_ns=sample, step=0, sample_id=str(sample), group_id=group, prompt_length=prompt,
                    response_length=response, trained=trained,
                ))  # fmt: skip
        ink.close()
    book.close("closed")
    return path


ONE = {"dp": 1, "tp": 1, "pp": 1, "sp": 1, "cp": 1, "ep": 1}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    mesh = {**ONE, "dp": 2, "sp": 2, "tp": 2, "pp": 2, "ep": 2}
    with Ledger(recorded(tmp_path_factory.mktemp("mesh") / "a", mesh)) as opened:
        yield opened


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A plan of 10,240 ranks: nothing recorded, 1,000 samples over dp 80: 13 on each but the last four."""
    path = tmp_path_factory.mktemp("mesh") / "large"
    mesh = {**ONE, "dp": 80, "tp": 8, "pp": 8, "cp": 2}
    create(
        path, Manifest(run="large", mesh=mesh, bindings={**SIZES, "B": 1000, "L": 80, "A": 64, "K": 8}, level="plan")
    )
    with Ledger(path) as opened:
        yield opened


def test_the_map_has_a_row_a_rank_with_what_it_holds(ledger: Ledger) -> None:
    rows = mesh_table(ledger).rows
    assert len(rows) == 16
    # tp fastest, then sp, then dp, then pp: rank 13 = pp 1, dp 1, sp 0, tp 1
    shown = {name: rows[13][name] for name in ("pp", "dp", "sp", "tp", "ep", "layers", "heads", "kv_heads", "experts")}
    assert shown == {
        "pp": "1", "dp": "1", "sp": "0", "tp": "1", "ep": "1", "layers": "2-3", "heads": "4-7", "kv_heads": "1",
        "experts": "2-3",
    }  # fmt: skip
    assert (rows[13]["samples"], rows[13]["share"]) == (2, 0.4)
    assert (rows[0]["samples"], rows[0]["layers"], rows[0]["heads"]) == (3, "0-1", "0-3")
    assert rows[0]["host"] and rows[4]["host"] and rows[13]["host"] is None
    assert rows[0]["rank_class"].startswith("first stage") and rows[13]["rank_class"].startswith("last stage")


@pytest.mark.parametrize(
    ("question", "ranks"),
    [
        (Question(sample=2), {4, 5, 6, 7, 12, 13, 14, 15}),
        (Question(layer=1), set(range(8))),
        (Question(sample=2, layer=3), {12, 13, 14, 15}),
        (Question(expert=3), {4, 5, 6, 7, 12, 13, 14, 15}),
    ],
)
def test_who_holds_a_sample_a_layer_an_expert(ledger: Ledger, question: Question, ranks: set[int]) -> None:
    rows = mesh_table(ledger, question=question).rows
    assert {int(row["ranks"]) for row in rows} == ranks
    assert {row["where"] for row in rows} == {"residual"}


@pytest.mark.parametrize(
    ("sample", "token", "sp", "index"),
    [
        # samples 0 and 1 in one row: prompt 4 + response 3, then response 2: 9 tokens, filled to 10, 5 on each rank
        (0, 4, 0, 4), (0, 5, 1, 0), (1, 4, 1, 2), (1, 5, 1, 3),
        (1, 2, 0, 2),  # of the prompt, which sample 0 holds for both
        (4, 3, 0, 3),  # in a row of its own: 4 tokens, but filled to 10 as well, for rows of a pipeline are equally long
    ],
)  # fmt: skip
def test_who_holds_a_token_of_a_packed_row(ledger: Ledger, sample: int, token: int, sp: int, index: int) -> None:
    rows = mesh_table(ledger, question=Question(sample=sample, token=token, layer=0)).rows
    assert {(int(row["sp"]), row["index"]) for row in rows} == {(sp, index)}
    assert [row["dp"] for row in rows] == ["0", "0"]  # both tp ranks


def test_who_holds_a_token_without_shared_prompts_or_a_pipeline(tmp_path: Path) -> None:
    mesh, config = {**ONE, "dp": 2, "sp": 2}, {"actor": {"shared_prompts": False}}
    with Ledger(recorded(tmp_path / "b", mesh, config=config)) as ledger:
        # 7 + 6 tokens: filled to 14, 7 on each rank
        (row,) = mesh_table(ledger, question=Question(sample=1, token=2)).rows
        assert (row["ranks"], row["index"]) == ("1", 2)
        (row,) = mesh_table(ledger, question=Question(sample=4, token=3)).rows
        assert (row["ranks"], row["index"]) == ("1", 1)


def test_a_head_is_shown_where_it_is_projected_and_where_it_attends(ledger: Ledger) -> None:
    rows = mesh_table(ledger, question=Question(sample=0, token=5, head=3, layer=0)).rows
    # tp 0 has heads 0-3; token 5 is on sp 1; in attention sp 1 has the heads 2 and 3
    assert [(row["where"], row["ranks"]) for row in rows] == [("projections", "2"), ("attention", "2")]
    rows = mesh_table(ledger, question=Question(sample=0, token=5, head=1, layer=0)).rows
    assert [(row["where"], row["ranks"]) for row in rows] == [("projections", "2"), ("attention", "0")]


def test_many_ranks_are_shown_by_class(large: Ledger) -> None:
    rows = mesh_table(large).rows
    assert sum(row["rank_count"] for row in rows) == 10_240
    # 1,000 samples over 80: 13 on 76 ranks, 12 on the next, none on three
    assert {row["layers"] for row in rows if row["pp"] == "1-6"} == {"10 each"}
    assert {row["heads"] for row in rows} == {"8 each"}
    assert {(row["layers"], row["dp"], row["samples"]) for row in rows if row["pp"] == "0"} == {
        ("0-9", "0-75", 13), ("0-9", "76", 12), ("0-9", "77-79", 0),
    }  # fmt: skip
    assert {row["pp"] for row in rows} == {"0", "1-6", "7"}
    (row,) = mesh_table(large, question=Question(layer=79)).rows
    assert (row["rank_count"], row["ranks"]) == (1280, "8960-10239")


def test_experts_that_a_framework_deals_in_another_way_are_left_out(tmp_path: Path) -> None:
    config = {"mesh": {**ONE, "dp": 2, "cp": 2, "ep": 4}}  # Megatron's ep rides on cp as well
    create(tmp_path / "megatron", Manifest(run="m", mesh={**ONE, "dp": 2, "cp": 2}, config=config, bindings=SIZES))
    with Ledger(tmp_path / "megatron") as ledger:
        assert {row["experts"] for row in mesh_table(ledger).rows} == {""}


def test_it_prints_in_a_hundred_columns_and_says_the_same_as_json(ledger: Ledger, large: Ledger) -> None:
    for opened in (ledger, large):
        for question in (None, Question(layer=0, head=0)):
            made = mesh_table(opened, question=question)
            screen = Console(width=100, record=True, file=io.StringIO(), highlight=False)
            terminal.draw(made, screen)
            text = screen.export_text()
            assert max(map(len, map(str.rstrip, text.splitlines()))) <= 100 and "layers" in text and "…" not in text
            document = json.loads(plain.table_json(made))
            assert len(document["rows"]) == len(made.rows) and {"pp", "dp", "ep", "cp", "sp", "tp"} <= {
                *document["rows"][0]
            }
    assert "cp" not in [column.name for column in mesh_table(ledger).columns if not column.wide]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(sample=5), "sample 5 was not trained on; 0 to 4 were"),
        (Question(sample=0, token=7), "token 7 is not there; sample 0 has 0 to 6"),
        (Question(sample=5, token=0), "--token 0: sample 5 was not trained on in this step"),
        (Question(token=0), "a token is found in its sample: say which sample"),
        (Question(head=8), "head 8 is not there; they run from 0 to 7"),
    ],
)
def test_what_is_not_there_is_said(ledger: Ledger, question: Question, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        mesh_table(ledger, question=question)


def test_the_command_asks_the_same(
    ledger: Ledger, large: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["flowledger", *words])
        try:
            main()
        except SystemExit as exit_:
            return int(exit_.code or 0)
        return 0

    path = str(ledger.directory.path)
    assert call("show", path, "mesh", "--sample", "2", "--layer", "3", "--json") == 0
    assert [row["ranks"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["12", "13", "14", "15"]
    assert call("show", path, "shapes", "--head", "1") == 2
    assert "--head asks who holds it" in capsys.readouterr().err
    assert call("show", path, "mesh", "--stage", "rollout") == 2
    assert "--stage does not apply to mesh" in capsys.readouterr().err
    assert call("show", str(large.directory.path), "mesh", "--sample", "1", "--token", "1") == 2
    assert "no sample was recorded here" in capsys.readouterr().err
