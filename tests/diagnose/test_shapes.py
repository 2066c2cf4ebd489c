"""What was observed against what was configured."""

from pathlib import Path

import pytest

from flowledger.diagnose import shapes
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import TensorRow
from flowledger.ledger.writer import Writer


@pytest.mark.parametrize(
    ("role", "rank", "found"), [("actor", 0, 1), ("driver", None, 1), ("agent_loop", None, 0), ("reward", None, 0)]
)
def test_a_batch_has_the_size_that_is_bound_and_what_takes_samples_one_by_one_has_none(
    tmp_path: Path, role: str, rank: int | None, found: int
) -> None:
    book = create(tmp_path / "run", Manifest(run="run", bindings={"B_prompt": 4, "G": 4}))
    ink = Writer(book.part(role, rank))
    ink.put(
        TensorRow(
            tensor_name="response_ids", stage="rollout", step=1, access="write", dims="B_prompt*G, S_resp",
            logical_shape=[1, 7], local_shape=[1, 7], dtype="int64", numel=7, bytes=56,
        )
    )  # fmt: skip
    ink.close()
    with Ledger(book.path) as ledger:
        told = [finding.message for finding in shapes.differing_from_configuration(ledger)]
    assert told == ["response_ids: B_prompt*G is 16 by the configuration, and 1 was observed"] * found
