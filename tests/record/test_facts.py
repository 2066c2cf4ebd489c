"""What calls tell beside tensors."""

import torch

from flowledger.record.facts import Facts
from flowledger.record.numbering import Numbering
from flowledger.record.position import Frame
from flowledger.record.tokens import Tokens


def test_equal_decode_steps_in_a_row_are_one_row_and_weights_keep_the_mean():
    told: list[tuple[str, float, float]] = []
    facts = Facts(
        None, metric=lambda name, value, _frame, _now, weight: told.append((name, value, weight)), meet=print, bind=dict,
        numbering=Numbering(0, 1, level="tensors"),
    )  # fmt: skip
    facts.schedule(
        [("generation_metadata", torch.tensor([[4, 2], [4, 2], [4, 2], [3, 0]]))], Frame("rollout", "stage"), 0
    )
    running = [(value, weight) for name, value, weight in told if name == "rollout/running"]
    assert running == [(4, 3.0), (3, 1.0)]
    assert sum(value * weight for value, weight in running) / 4 == (4 + 4 + 4 + 3) / 4
    assert [(value, weight) for name, value, weight in told if name == "rollout/waiting"] == [(2, 3.0), (0, 1.0)]


def test_a_dropped_sample_has_no_log_prob_of_a_stage_that_computed_none():
    rows = []
    tokens = Tokens(lambda row, _frame, _now: rows.append(row), groups=1)
    tokens.group(["0", "1"], ["0", "0"])
    stage = Frame("old_log_prob", "stage")
    tokens.dropped.add("1")
    tokens.see(["0", "1"], {"full_sequence": torch.ones(2, 3), "old_log_prob": torch.tensor([[-1.0], [0.0]])}, stage, 0)
    assert [(row.sample_id, row.old_log_prob) for row in rows if row.position == 2] == [("0", -1.0), ("1", None)]


def test_a_token_that_the_environment_wrote_has_no_number_of_the_policy():
    rows = []
    tokens = Tokens(lambda row, _frame, _now: rows.append(row), groups=1)
    tokens.group(["0"], ["0"])
    rollout = {
        "full_sequence": torch.ones(1, 4),
        "attention_mask": torch.ones(1, 4),
        "response_mask": torch.tensor([[1, 0, 1]]),
    }
    tokens.see(["0"], {**rollout, "rollout_log_prob": torch.tensor([[-1.0, 0.0, -2.0]])}, Frame("rollout", "stage"), 0)
    made = {
        "values": torch.zeros(1, 3),
        "token_level_reward": torch.zeros(1, 3),
        "loss_mask": torch.tensor([[1, 0, 1]]),
    }
    tokens.see(["0"], {**made, "ratio": torch.ones(1, 3)}, Frame("update_actor", "call"), 0)
    told = {
        (row.position, name): getattr(row, name)
        for row in rows
        for name in row.__struct_fields__
        if getattr(row, name) is not None
    }
    for name, want in (("rollout_log_prob", [-1.0, None, -2.0]), ("value", [0, None, 0]), ("ratio", [1, None, 1])):
        assert [told.get((position, name)) for position in (1, 2, 3)] == want
    for name, masks in (("loss_mask", [1, 0, 1]), ("response_mask", [1, 0, 1]), ("reward", [0, 0, 0])):
        assert [told.get((position, name)) for position in (1, 2, 3)] == masks
