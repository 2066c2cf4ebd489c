"""Rows of their own lengths: the shape of a padded batch, the bytes of a packed one."""

import pytest
import torch

from flowledger.record import jagged


def rows(*lengths):
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def test_shape_lengths_and_filling_are_those_of_the_padded_form():
    value = rows(3, 1, 4)
    seen, padded = jagged.of(value), value.to_padded_tensor(0)
    assert seen.shape == tuple(padded.shape)
    assert seen.lengths == [3, 1, 4]
    assert seen.filled == 8 / padded.numel()
    assert seen.values.untyped_storage().nbytes() == 8 * 8


def test_rows_that_were_narrowed_where_they_lie_have_their_shape_and_no_row_is_read_amiss():
    padded = torch.arange(12).view(3, 4)
    seen = jagged.of(
        torch.nested.narrow(padded, 1, torch.zeros(3, dtype=torch.int64), torch.tensor([3, 1, 2]), layout=torch.jagged)
    )
    assert (seen.shape, seen.lengths, seen.filled) == ((3, 3), None, 6 / 9)


def test_what_torch_has_noted_serves_where_the_lengths_cannot_be_read():
    value = rows(3, 1, 4)
    assert jagged._noted(rows(2, 2)) in (None, 2)
    value._max_seqlen  # noqa: B018  torch notes it
    assert jagged._noted(value) == 4


def test_a_recorded_tensor_of_own_lengths(tmp_path):
    import flowledger
    from flowledger.ledger.reader import Ledger

    with flowledger.recorder(tmp_path / "run", bindings={"B_prompt": 3, "G": 1}) as rec, rec.stage("rollout"):
        rec.tensors(response_ids=rows(3, 1, 4))
    with Ledger(tmp_path / "run") as ledger:
        (row,) = ledger.rows("SELECT * FROM tensors")
    assert (row["local_shape"], row["numel"], row["bytes"], row["padding"]) == ([3, 4], 8, 64, "jagged")
    assert row["mask_ratio"] == 8 / 12


def test_a_token_stands_in_the_column_that_a_padded_form_of_its_sample_had_for_it():
    from flowledger.record.position import Frame
    from flowledger.record.tokens import Tokens

    written = []
    tokens = Tokens(lambda row, frame, now: written.append(row), groups=1)
    tokens.group(["a", "b"], ["g", "g"])
    frame = Frame("old_log_prob", "stage")
    full = torch.tensor(
        [[0, 0, 11, 12, 13, 0], [0, 21, 22, 23, 24, 25]]
    )  # prompts [B, 3] padded left, responses [B, 3] right
    mask = (full > 0).long()
    tokens.see(["a", "b"], {"full_sequence": full, "attention_mask": mask, "response_mask": mask[:, 3:]}, frame, 0)
    padded = {(row.sample_id, row.position): row.token_id for row in written}
    assert padded[("a", 2)] == 11 and padded[("b", 5)] == 25 and len(padded) == 8
    written.clear()
    own = {
        "full_sequence": torch.nested.nested_tensor(
            [torch.tensor([11, 12, 13]), torch.arange(21, 26)], layout=torch.jagged
        ),
        "old_log_prob": torch.nested.nested_tensor(
            [torch.tensor([-0.2, -0.3]), torch.tensor([-1.0, -2.0, -3.0])], layout=torch.jagged
        ),
    }
    tokens.see_ragged(["a", "b"], {name: jagged.of(value) for name, value in own.items()}, frame, 0)
    assert {(row.sample_id, row.position): row.token_id for row in written} == padded
    written.clear()  # and so it does of a batch that is padded on the right, to its own longest row
    right = torch.tensor([[11, 12, 13, 0, 0], [21, 22, 23, 24, 25]])
    tokens.see(["a", "b"], {"full_sequence": right, "attention_mask": (right > 0).long()}, frame, 0)
    assert {(row.sample_id, row.position): row.token_id for row in written} == padded
    written.clear()
    tokens.see_ragged(["a", "b"], {name: jagged.of(value) for name, value in own.items()}, frame, 0)
    log_probs = {(r.sample_id, r.position): r.old_log_prob for r in written if r.old_log_prob is not None}
    assert log_probs == pytest.approx({("a", 3): -0.2, ("a", 4): -0.3, ("b", 3): -1.0, ("b", 4): -2.0, ("b", 5): -3.0})
