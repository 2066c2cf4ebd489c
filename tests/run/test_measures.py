"""Lengths of a step by hand, where an environment speaks between the policy's turns."""

import torch

from flowledger.run import measures
from flowledger.run.batches import Prompts, Rollouts
from flowledger.run.figures import figures
from flowledger.run.parallel.ranks import ALONE
from flowledger.run.prompts import Problem


def test_lengths_count_the_environment_and_the_mask_ratio_does_not() -> None:
    sampled = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    written = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    prompt = torch.tensor([[0, 1]] * 2 + [[1, 1]] * 2)
    nothing, ids = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.long)
    numbers = measures._sampled(
        Prompts(
            prompt_ids=ids[:2, :2], attention_mask=prompt[::2], position_ids=ids[:2, :2],
            prompt_length=torch.tensor([1, 2]), sample_id=torch.arange(4), group_id=torch.arange(4) // 2,
            problems=(Problem(text="p", answer=None, index=0),) * 2,
        ),
        Rollouts(
            response_ids=ids[:, 2:], response_mask=sampled, full_sequence=ids,
            attention_mask=torch.cat([prompt, written], 1), position_ids=ids, rollout_log_prob=nothing[:, 2:],
            finish_reason=torch.tensor([0, 1, 0, 2]), turns=torch.tensor([2, 3, 2, 0]), environment_errors=(None,) * 4,
            generation_metadata=ids[:, :2],
        ),
    )  # fmt: skip
    of = figures(numbers, ALONE.group("world"))
    made = {f"{name}/{one}": getattr(of[name], one) for name in numbers for one in ("mean", "min", "max")}
    made |= measures._tokens(of, 6) | {name: of[name].mean for name in ("truncation_ratio", "abort_ratio")}
    assert (made["response_length/mean"], made["response_length/min"], made["response_length/max"]) == (14 / 4, 0, 6)
    assert made["turns/mean"] == (2 + 3 + 2 + 0) / 4  # the third met an answer without tokens, which no mask shows
    assert abs(made["environment_tokens"] - (2 + 2) / 14) < 1e-6
    assert made["total_tokens"] == 14 + 6
    assert abs(made["mask_ratio"] - 10 / 24) < 1e-6
    assert (made["truncation_ratio"], made["abort_ratio"]) == (1 / 4, 1 / 4)
