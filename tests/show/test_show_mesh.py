"""The map of a job from its ledger, and who holds what: numbers worked out by hand, for a small recorded run and a large plan."""

import io
import json
import re
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
from flowledger.show.columns import Table
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


def drawn(made: Table, width: int = 100) -> str:
    screen = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    terminal.draw(made, screen)
    return screen.export_text()


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
    assert {row["where"] for row in rows} == {"residual" if question.expert is None else "experts"}


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


def test_a_model_without_experts_is_known_to_have_none(tmp_path: Path) -> None:
    dense = {name: size for name, size in SIZES.items() if name != "E"}
    for name, sizes, words in (("dense", dense, "the model has no experts"), ("nothing", {}, "not known here")):
        create(tmp_path / name, Manifest(run=name, mesh=ONE, bindings=sizes))
        with Ledger(tmp_path / name) as ledger, pytest.raises(BadInput, match=f"expert 0.*{words}"):
            mesh_table(ledger, question=Question(expert=0))


def test_experts_that_a_framework_deals_in_another_way_are_left_out(tmp_path: Path) -> None:
    config = {"mesh": {**ONE, "dp": 2, "cp": 2, "ep": 4}}  # Megatron's ep rides on cp as well
    create(tmp_path / "megatron", Manifest(run="m", mesh={**ONE, "dp": 2, "cp": 2}, config=config, bindings=SIZES))
    with Ledger(tmp_path / "megatron") as ledger:
        assert {row["experts"] for row in mesh_table(ledger).rows} == {""}


def test_it_prints_in_a_hundred_columns_and_says_the_same_as_json(ledger: Ledger, large: Ledger) -> None:
    for opened in (ledger, large):
        for question in (None, Question(layer=0, head=0)):
            made = mesh_table(opened, question=question)
            text = drawn(made)
            assert max(map(len, map(str.rstrip, text.splitlines()))) <= 100 and "layers" in text and "…" not in text
            document = json.loads(plain.table_json(made))
            assert len(document["rows"]) == len(made.rows) and {"pp", "dp", "ep", "cp", "sp", "tp"} <= {
                *document["rows"][0]
            }
    assert "cp" not in [column.name for column in mesh_table(ledger).columns if not column.wide]


@pytest.mark.parametrize("width", [100, 200])
def test_the_ranks_are_listed_however_many_and_columns_that_are_empty_are_left_out(tmp_path: Path, width: int) -> None:
    """1,024 ranks, dp 16 of 8 tp over pp 8: those of one dp rank are eight runs of eight."""
    sizes = {**SIZES, "B": 16, "L": 8, "A": 8, "K": 8}
    create(tmp_path / "p", Manifest(run="p", mesh={**ONE, "dp": 16, "tp": 8, "pp": 8}, bindings=sizes, level="plan"))
    with Ledger(tmp_path / "p") as ledger:
        text = drawn(mesh_table(ledger, question=Question(sample=0)), width)
    runs = [f"{128 * stage}-{128 * stage + 7}" for stage in range(8)]
    assert all(re.search(rf"(?<!\d){run}(?!\d)", text) for run in runs) and "…" not in text
    heading = text.partition("───")[0].split()
    assert {"ranks", "many", "samples", "step"} <= {*heading} and not {"index", "from", "host"} & {*heading}


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question(sample=5), "sample 5 was not trained on; 0 to 4 were"),
        (Question(sample=0, token=7), "token 7 is not there; sample 0 has 0 to 6"),
        (Question(sample=5, token=0), "sample 5 was not trained on; 0 to 4 were, in the last step"),
        (Question(token=0), "a token is found in its sample: say which sample"),
        (Question(head=8), "head 8 is not there; they run from 0 to 7"),
    ],
)
def test_what_is_not_there_is_said(ledger: Ledger, question: Question, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        mesh_table(ledger, question=question)


def test_a_sample_is_looked_up_in_the_step_that_trained_on_it(tmp_path: Path) -> None:
    """Samples 0 and 1 in step 0, 2 and 3 in step 1."""
    book = create(tmp_path / "steps", Manifest(run="steps", mesh=ONE, bindings=SIZES))
    ink = Writer(book.part("actor", 0, coordinates={"dp": 0}))
    for step, sample in ((0, 0), (0, 1), (1, 2), (1, 3)):
        trained = [Trained(epoch=0, mini_batch=0, rank=0, micro_batch=0)]
        ink.put(
            SampleRow(
                t_ns=sample, step=step, sample_id=str(sample), prompt_length=1, response_length=1, trained=trained
            )
        )
    ink.close()
    book.close("closed")
    with Ledger(tmp_path / "steps") as ledger:
        for asked, step, words in (
            (7, None, "sample 7 was not trained on; 2 to 3 were, in the last step"),
            (2, 0, "sample 2 was not trained on; 0 to 1 were, in step 0; it was in step 1: use --step 1"),
            (7, 0, "sample 7 was not trained on; 0 to 1 were, in step 0"),
            (None, 7, "run steps has no step 7; it has steps 0 to 1"),
        ):
            with pytest.raises(BadInput, match=f"^{words}$"):
                mesh_table(ledger, step=step, question=Question(sample=asked))
        for sample, due in ((0, 0), (3, 1)):
            made = mesh_table(ledger, question=Question(sample=sample))
            assert [row["ranks"] for row in made.rows] == ["0"] and made.summary["step"] == due
            assert drawn(made).startswith(f"who holds sample {sample} (trained on in step {due})\n")


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


PLANNED = {**SIZES, "B": 16, "B_mini": 8, "B_micro": 4, "G": 4, "S_prompt": 6, "S_resp": 4}


def planned(path: Path, config: dict[str, Any]) -> Ledger:
    """A plan: 16 samples of at most 10 tokens over dp 2 and sp 2, two of each rank's 8 in a micro-batch."""
    create(path, Manifest(run="p", mesh={**ONE, "dp": 2, "sp": 2}, bindings=PLANNED, config=config, level="plan"))
    return Ledger(path)


@pytest.mark.parametrize(
    ("sample", "token", "rank", "index"),
    [
        # rows of two samples, 20 tokens, 10 on each sp rank: the first sample on sp 0, the second on sp 1
        (0, 3, 0, 3), (3, 3, 1, 3), (2, 9, 0, 9), (9, 0, 3, 0),
    ],
)  # fmt: skip
def test_a_plan_places_a_token_with_every_sample_at_its_limit(
    tmp_path: Path, sample: int, token: int, rank: int, index: int
) -> None:
    with planned(tmp_path / "p", {"framework": "verl", "raw": {"trainer.balance_batch": True}}) as ledger:
        table = mesh_table(ledger, question=Question(sample=sample, token=token))
    assert [(row["ranks"], row["index"]) for row in table.rows] == [(str(rank), index)]
    assert table.summary["notes"] == [
        "before balancing: with trainer.balance_batch any dp rank may train it",
        "planned: every sample at its limit of 10 tokens, micro-batches of 2 in a row; a run's are shorter",
    ]


def test_a_plan_says_that_balancing_may_move_a_sample(tmp_path: Path) -> None:
    off = {"framework": "verl", "raw": {"trainer.balance_batch": False}}
    with planned(tmp_path / "off", off) as ledger:
        assert "notes" not in mesh_table(ledger, question=Question(sample=3)).summary
    with planned(tmp_path / "turns", {"framework": "slime", "raw": {"balance_data": False}}) as ledger:
        (note,) = mesh_table(ledger, question=Question(sample=3)).summary["notes"]
        assert "slime deals samples in turn" in note
    with planned(tmp_path / "own", {"framework": "flowledger"}) as ledger:
        table = mesh_table(ledger, question=Question(sample=3))
        assert "notes" not in mesh_table(ledger, question=Question(layer=1)).summary
    screen = Console(file=io.StringIO(), width=200)
    terminal.draw(table, screen)
    assert "before balancing: flowledger deals samples to dp ranks by length" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_plan_of_the_own_loop_packs_a_prompt_once(tmp_path: Path) -> None:
    """Two of a group of 4 on each dp rank, in one row: 6 + 4 + 4 = 14 tokens, 7 on each sp rank."""
    with planned(tmp_path / "own", {"framework": "flowledger"}) as ledger:
        (row,) = mesh_table(ledger, question=Question(sample=1, token=7)).rows
        assert (row["ranks"], row["index"]) == ("1", 4)  # its response begins at 10: token 7 is at 11, 4 on sp 1
        (row,) = mesh_table(ledger, question=Question(sample=1, token=2)).rows
        assert (row["ranks"], row["index"]) == ("0", 2)  # of the prompt, which sample 0 holds for both
        with pytest.raises(BadInput, match="token 10 is not there; sample 1 has 0 to 9"):
            mesh_table(ledger, question=Question(sample=1, token=10))
