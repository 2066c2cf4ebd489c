"""Logical shapes from the parts of ranks: parts cut by torch are put together again, and a part that does not fit is a breach."""

import itertools
from pathlib import Path

import pytest
import torch

from flowledger.diagnose import laws
from flowledger.ledger import directory, manifest, writer
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import TensorRow

WHOLE = {  # tensor, stage, dims -> logical shape, axes that cut, dim by dim
    ("full_sequence", "update_actor", "B_prompt*G, S_prompt + S_resp"): ((8, 6), {0: ("dp",)}),
    ("sample_id", "update_actor", "B_prompt*G"): ((8,), {0: ("dp",)}),  # the same placement, fewer dims
    ("logits", "update_actor", "T_logit, V"): ((12, 10), {0: ("dp",), 1: ("tp",)}),
    ("params", "update_actor", "P"): ((30,), {}),
    ("rollout_log_prob", "rollout", "B_prompt*G, S_resp"): ((8, 3), {0: ("dp", "tp")}),  # every rank samples
}


def cut(shape: tuple[int, ...], axes: dict[int, tuple[str, ...]], at: dict[str, int]) -> list[int]:
    """What torch.chunk leaves for a rank, axis by axis, on a mesh of dp 2 and tp 2."""
    whole = torch.zeros(shape)
    for dim, names in axes.items():
        for name in names:
            whole = whole.chunk(2, dim)[at[name]]
    return list(whole.shape)


def recorded(path: Path, spoilt: tuple[str, int] | None = None) -> Path:
    """A run of four ranks that each wrote what it holds; `spoilt`: (tensor, rank) with a row too many."""
    book = directory.create(path, manifest.Manifest(run="cut", level="tensors", mesh={"dp": 2, "tp": 2}))
    for rank, (dp, tp) in enumerate(itertools.product(range(2), repeat=2)):
        ink = writer.Writer(book.part("actor", rank, coordinates={"dp": dp, "tp": tp}))
        for (name, stage, dims), (shape, axes) in WHOLE.items():
            local = cut(shape, axes, {"dp": dp, "tp": tp})
            local[0] += (name, rank) == spoilt
            placement = [f"{axis}: Shard({dim})" for dim, names in axes.items() for axis in names]
            if stage == "rollout":
                placement = ["dp: Shard(0)"]
            numel = int(torch.tensor(local).prod())
            ink.put(
                TensorRow(
                    rank=rank, rank_count=4, step=0, role="actor", stage=stage, tensor_name=name, dims=dims,
                    local_shape=local, logical_shape=None if axes else list(shape), placement=placement,
                    dtype="float32", numel=numel, bytes=4 * numel, access="read",
                )
            )  # fmt: skip
        ink.close()
    book.close()
    return path


def test_parts_that_torch_cut_give_the_whole(tmp_path: Path) -> None:
    with Ledger(recorded(tmp_path / "run")) as ledger:
        rows = ledger.rows("SELECT DISTINCT tensor_name, stage, dims, logical_shape FROM accesses")
        (law,) = [one for one in laws.check(ledger) if one.id == "shapes_conserved"]
    assert {(row["tensor_name"], row["stage"], row["dims"]): tuple(row["logical_shape"]) for row in rows} == {
        place: shape for place, (shape, _) in WHOLE.items()
    }
    assert law.verdict == "pass"


def test_without_the_part_of_one_rank_the_whole_stays_unknown(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run")
    (part,) = path.glob("parts/actor-r3-*")
    (file,) = part.glob("tensors-*.jsonl")
    file.write_bytes(b"")
    with Ledger(path) as ledger:
        rows = ledger.rows("SELECT DISTINCT tensor_name, logical_shape FROM accesses WHERE tensor_name <> 'sample_id'")
    found = {row["tensor_name"]: row["logical_shape"] for row in rows if row["tensor_name"] != "logits"}
    assert found == {"params": [30], "full_sequence": [8, 6], "rollout_log_prob": None}  # rank 1 has what 3 would have


@pytest.mark.parametrize("spoilt", [("full_sequence", 3), ("rollout_log_prob", 0)])
def test_a_part_that_does_not_fit_breaks_the_law(tmp_path: Path, spoilt: tuple[str, int]) -> None:
    with Ledger(recorded(tmp_path / "run", spoilt)) as ledger:
        (law,) = [one for one in laws.check(ledger) if one.id == "shapes_conserved"]
    assert law.verdict == "fail"
    assert law.message.partition("not so. ")[2].startswith(spoilt[0])


def moved(path: Path, sampled: tuple[int, ...], group_size: int = 4) -> Path:
    """Five prompts of four samples on the four ranks of a mesh of dp 2 and tp 2: as they were sampled, and as they are dealt."""
    config = {"rollout": {"samples_per_prompt": group_size}}
    book = directory.create(
        path, manifest.Manifest(run="moved", level="tensors", mesh={"dp": 2, "tp": 2}, config=config)
    )
    for rank in range(4):
        ink = writer.Writer(book.part("actor", rank, coordinates={"dp": rank // 2, "tp": rank % 2}))
        for access, rows in (("read", sampled[rank]), ("write", 10)):
            ink.put(
                TensorRow(
                    rank=rank, rank_count=4, step=0, role="actor", stage="balance", tensor_name="sample_id",
                    dims="B_prompt*G", local_shape=[rows], placement=["dp: Shard(0)"], dtype="int64", numel=rows,
                    bytes=8 * rows, access=access,
                )
            )  # fmt: skip
        ink.close()
    book.close()
    return path


@pytest.mark.parametrize(
    ("sampled", "verdict"),
    [
        ((*(4 * len(prompts) for prompts in torch.arange(5).chunk(4)), 0), "pass"),  # 2, 2 and 1 prompts
        ((5, 5, 5, 5), "fail"),  # of samples that stay together some were torn apart
        ((4, 8, 8, 0), "fail"),
    ],
)
def test_ranks_that_sample_share_whole_prompts(tmp_path: Path, sampled: tuple[int, ...], verdict: str) -> None:
    with Ledger(moved(tmp_path / "run", sampled)) as ledger:
        rows = ledger.rows("SELECT access, logical_shape, count(*) AS ranks FROM accesses GROUP BY ALL")
        (law,) = [one for one in laws.check(ledger) if one.id == "shapes_conserved"]
    assert {(row["access"], *row["logical_shape"], row["ranks"]) for row in rows} == {("read", 20, 4), ("write", 20, 4)}
    assert law.verdict == verdict, law.message
