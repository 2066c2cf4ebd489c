"""Samples that are there twice, not at all, cut, or said to be what they are not."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import Changes, results
from flowledger.run.responses import LENGTH, STOP

ROLLOUT, SHARES = "flowledger.run.stages:rollout", "flowledger.run.batching:shares"


def copied_in_group() -> Changes:
    """The first response of the step stands in the place of the second, too."""

    def make(original: Function) -> Function:
        def rollout(**given: Any) -> Any:
            made = original(**given)
            order = torch.arange(len(given["sample_id"]), device=made.response_ids.device)
            order[1] = 0
            rows = {
                one.name: value[order]
                for one in fields(made)
                if isinstance(value := getattr(made, one.name), Tensor) and len(value) == len(order)
            }
            return replace(made, **rows)

        return rollout

    return {ROLLOUT: make}


def _micro_batches(change: Any) -> Changes:
    def make(original: Function) -> Function:
        def shares(**given: Any) -> Any:
            made = original(**given)
            for share in made:
                for batch in share.batches.mini_batches:
                    object.__setattr__(batch, "micro_batches", change(batch.micro_batches))
            return made

        return shares

    return {SHARES: make}


def lost() -> Changes:
    """The last micro-batch of each mini-batch is never trained on."""
    return _micro_batches(lambda parts: parts[:-1])


def trained_twice() -> Changes:
    """The first one is trained on twice."""
    return _micro_batches(lambda parts: (parts[0], *parts))


def truncated_is_finished() -> Changes:
    """Responses that were cut off are said to have stopped."""
    return {ROLLOUT: results(finish_reason=lambda codes: torch.where(codes == LENGTH, STOP, codes))}


def prompt_cut_twice() -> Changes:
    """Prompts are cut from the left once more before they are sampled from."""

    def make(original: Function) -> Function:
        def rollout(**given: Any) -> Any:
            mask = given["attention_mask"].clone()
            mask[:, :-5] = 0
            return original(**given | {"attention_mask": mask, "prompt_length": mask.sum(-1)})

        return rollout

    return {ROLLOUT: make}


def ids_reused() -> Changes:
    """Every step names its samples as the first one did."""

    def first(ids: Tensor) -> Tensor:
        return torch.arange(len(ids), device=ids.device)

    return {"flowledger.run.stages:prompt": results(sample_id=first)}
