"""What was written and what is restored have the same numbers, and another content has others."""

from flowledger.record.checkpoint_files import tell


def numbers(folder, rank, way="written"):
    found = {}
    tell(folder, rank, way, found.__setitem__)
    return {name.rpartition("_")[2]: value for name, value in found.items()}


def test_a_rank_counts_its_own_files(tmp_path):
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"a" * 10_000)
    (tmp_path / "optim_world_size_2_rank_0.pt").write_bytes(b"b" * 5)
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(b"c" * 7)
    (tmp_path / "rank_0").mkdir()
    found = numbers(tmp_path, 0)
    assert (found["files"], found["bytes"]) == (2, 10_005)
    assert numbers(tmp_path, 0, "restored") == found
    assert numbers(tmp_path, 1)["bytes"] == 7


def test_another_end_size_or_name_is_another_checksum(tmp_path):
    seen = set()
    for name, content in (
        ("model_rank_0.pt", b"a" * 9000), ("model_rank_0.pt", b"a" * 8999 + b"b"), ("model_rank_0.pt", b"b" + b"a" * 8999),
        ("model_rank_0.pt", b"a" * 9001), ("optim_rank_0.pt", b"a" * 9000),
    ):  # fmt: skip
        file = tmp_path / name
        file.write_bytes(content)
        seen.add(numbers(tmp_path, 0)["checksum"])
        file.unlink()
    assert len(seen) == 5


def test_a_folder_that_is_not_there_has_nothing(tmp_path):
    assert numbers(tmp_path / "none", 0) == {"files": 0, "bytes": 0, "checksum": 0}
