"""A plan beside the log of a run: lengths against their limits, the peak against the planned one, and nothing made up."""

import pytest

from flowledger.diagnose import logged
from flowledger.diagnose.planned import Planned, read
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.record.importers.imported import import_into

GIB = 1024**3
STAGES = {"rollout": 70 * GIB, "update_actor": 50 * GIB, "old_log_prob": 20 * GIB}


def plan(prompt: int, response: int) -> Planned:
    kinds = dict.fromkeys(("grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch"), 0)
    peaks = [
        {"step": "later", "stage": stage, "ranks": "all", "rank": 0, "rank_count": 8, "allocated": size, "instant": "x", "param": size,
         "residue": 3 * GIB, **kinds}
        for stage, size in STAGES.items()
    ]  # fmt: skip
    shapes = [
        {
            "tensor_name": name,
            "stage": "rollout",
            "dims": f"B, {symbol}",
            "logical_shape": [4, size],
            "local_shape": [4, size],
        }
        for name, symbol, size in (("prompt_ids", "S_prompt", prompt), ("response_ids", "S_resp", response))
    ]
    document = {
        "schema": 1, "verb": "plan", "run": "mine", "chain": [], "checks": [], "rows": peaks, "shapes": shapes,
        "summary": {"framework": "verl", "model": "m", "world": 8, "mesh": {}},
    }  # fmt: skip
    return read(document, "plan")


@pytest.fixture
def log(tmp_path):
    def imported(line: str) -> Ledger:
        (tmp_path / "my.log").write_text(line)
        import_into([tmp_path / "my.log"], tmp_path / "run")
        return Ledger(tmp_path / "run")

    return imported


LINE = (
    "step:1 - actor/pg_loss:0.1 - prompt_length/max:801.0 - response_length/max:16384.0 - perf/max_memory_allocated_gb:40.0\n"
    "step:2 - actor/pg_loss:0.1 - prompt_length/max:700.0 - response_length/max:900.0 - perf/max_memory_allocated_gb:62.5\n"
)


def test_lengths_are_held_against_their_limits_and_the_peak_against_that_of_the_trainer(log):
    with log(LINE) as ledger:
        assert logged.is_log(ledger)
        found = logged.document(plan(2048, 16384), ledger)
        rows = {row["what"]: (row["planned"], row["recorded"], row["outcome"]) for row in found["rows"]}
        assert rows == {
            "prompt_length/max": (2048, 801, "explained"),
            "response_length/max": (16384, 16384, "equal"),
            "memory/allocated_peak": (
                50 * GIB,
                round(62.5 * GIB),
                "compared",
            ),  # not rollout's: the engine is another process
        }
        assert found["agrees"] and found["verdict"].endswith("peak planned -20.0%")
        other = logged.document(plan(512, 16384), ledger)
        assert not other["agrees"] and "prompt_length/max 801 where at most 512 were planned" in other["verdict"]


def test_a_log_without_a_peak_says_so_and_one_with_nothing_alike_is_refused(log, tmp_path):
    with log("step:1 - actor/pg_loss:0.1 - response_length/max:8.0\n") as ledger:
        assert "tells of no peak" in logged.document(plan(4, 8), ledger)["lacks"]
    (tmp_path / "other.log").write_text("step:1 - actor/pg_loss:0.1\n")
    import_into([tmp_path / "other.log"], tmp_path / "other")
    with (
        Ledger(tmp_path / "other") as ledger,
        pytest.raises(BadInput, match="tells of no length and no peak of memory"),
    ):
        logged.document(plan(4, 8), ledger)
