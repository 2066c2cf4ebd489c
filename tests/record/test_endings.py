"""Why a response ended, from its last token and its length, in a padded batch and in one without padding."""

import pytest
import torch

from flowledger.record import endings, jagged

END, OTHER, TOOL = 9, 5, 3
LIMIT = 4
# The tokens of each response, and why it ended where END ends one and LIMIT cuts it off.
ENDED = (
    ([OTHER, END], "stop"),
    ([OTHER, END, OTHER, OTHER], "length"),  # a token that ends a response ends it where it stands last
    ([OTHER] * 4, "length"),
    ([OTHER, OTHER, OTHER, END], "stop"),  # as long as the limit, and ended by itself
    ([OTHER, TOOL], None),  # neither: whoever ended it does not say why
    ([], None),
)
RESPONSES, WHY = [torch.tensor(tokens, dtype=torch.long) for tokens, _ in ENDED], [why for _, why in ENDED]
FACTS = {"end_tokens": {END}, "response_limit": LIMIT}


def padded(pad: int = END) -> dict[str, torch.Tensor]:
    """Responses [6, 4] beside prompts of two tokens, filled up with a token that ends one."""
    rows = [torch.cat([row, torch.full((LIMIT - len(row),), pad)]) for row in RESPONSES]
    mask = torch.stack([(torch.arange(LIMIT) < len(row)).long() for row in RESPONSES])
    return {
        "response_ids": torch.stack(rows), "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(len(rows), 2, dtype=torch.long), mask], 1),
    }  # fmt: skip


def test_of_a_padded_batch():
    assert endings.of_batch(padded(), {}, FACTS) == WHY
    values = padded()
    del values["attention_mask"]
    assert endings.of_batch(values, {}, FACTS) == WHY


def test_of_one_without_padding():
    nested = torch.nested.nested_tensor(RESPONSES, layout=torch.jagged)
    assert endings.of_batch({}, {"response_ids": jagged.of(nested)}, FACTS) == WHY


def test_what_an_environment_wrote_at_its_end_counts():
    values = padded()
    values["response_mask"] = values["response_mask"].clone()
    values["response_mask"][0, 1] = 0  # not the policy's own token
    assert endings.of_batch(values, {}, FACTS)[0] == "stop"


def test_without_a_limit_what_has_not_stopped_was_cut_off():
    assert endings.reasons([END, OTHER, None], [2, 2, 0], {END}, None) == ["stop", "length", "length"]


@pytest.mark.parametrize("facts", [{}, {"response_limit": LIMIT}, {"end_tokens": set()}])
def test_who_does_not_know_what_ends_a_response_says_nothing(facts):
    assert endings.of_batch(padded(), {}, facts) == []


def test_a_batch_without_responses_says_nothing():
    assert endings.of_batch({"response_mask": torch.ones(2, 2)}, {}, FACTS) == []
    assert endings.of_batch({"response_ids": torch.ones(2, 2)}, {}, FACTS) == []  # no mask says where they end
