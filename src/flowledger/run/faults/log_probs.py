"""Log-probs of another token, sample, policy, temperature or place than the one they stand for."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.run import update
from flowledger.run.batches import RefLogProbs
from flowledger.run.faults.changes import Changes, results, words
from flowledger.run.faults.masks import moved

STAGES = "flowledger.run.stages"
FORWARD = "flowledger.run.forward:micro_batch_forward"


def old_log_prob_shifted() -> Changes:
    """Each token has the log-prob of the one before it."""
    return {f"{STAGES}:old_log_prob": results(old_log_prob=lambda values: moved(values, 1))}


def rollout_log_prob_shifted() -> Changes:
    """The same of what the rollout says."""
    return {f"{STAGES}:rollout": results(rollout_log_prob=lambda values: moved(values, 1))}


def old_log_prob_permuted() -> Changes:
    """Each sample has the log-probs of the next."""
    return {f"{STAGES}:old_log_prob": results(old_log_prob=lambda values: values.roll(1, 0))}


def old_log_prob_permuted_later() -> Changes:
    """The same on the way into the update."""
    return {f"{STAGES}:update_actor": words(old_log_prob=lambda values: values.roll(1, 0))}


def old_is_new() -> Changes:
    """The update takes its own log-probs for the old ones, so that the ratio is 1 for ever."""
    return {"flowledger.run.update:micro_batch": words(old_log_prob=lambda values: None)}


def old_after_update() -> Changes:
    """From the second mini-batch on old log-probs are made again by the policy that has learnt since."""
    began = {"step": None}

    def make(original: Function) -> Function:
        def mini_batch(**given: Any) -> Any:
            again = began["step"] is given["sums"]  # one for each update
            began["step"] = given["sums"]
            columns = {
                name: values for name, values in given["columns"].items() if not (again and name == "old_log_prob")
            }
            return original(**given | {"columns": columns})

        return mini_batch

    return {"flowledger.run.update:mini_batch": make}


def ref_is_actor() -> Changes:
    """The reference is the policy itself, as it is now."""
    known: dict[str, Any] = {}

    def keep(original: Function) -> Function:
        def old_log_prob(**given: Any) -> Any:
            known["model"] = given["model"]
            return original(**given)

        return old_log_prob

    def make(original: Function) -> Function:
        def ref_log_prob(*, reference: Any, config: Any, batches: Any, ranks: Any, **columns: Tensor) -> RefLogProbs:
            made = update.log_probs(
                stage="ref_log_prob", model=known["model"], config=config, ranks=ranks, batches=batches, columns=columns
            )
            return RefLogProbs(ref_log_prob=made["new_log_prob"])

        return ref_log_prob

    return {f"{STAGES}:old_log_prob": keep, f"{STAGES}:ref_log_prob": make}


def temperature_of_trainer() -> Changes:
    """Training divides logits by another temperature than sampling."""
    return {FORWARD: words(temperature=lambda value: 1.5 * value)}


def temperature_of_rollout() -> Changes:
    """Sampling says log-probs at another temperature than it samples with."""

    def make(original: Function) -> Function:
        def sample(**given: Any) -> Any:
            token_ids, _ = original(**given)
            logits = given["logits"].float() / (2.0 * given["temperature"])
            return token_ids, logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]

        return sample

    return {"flowledger.run.sampling:sample": make}


def retokenised() -> Changes:
    """Responses go through text on their way to training: some ids come back as others."""

    def again(ids: Tensor, width: int) -> Tensor:
        made = ids.clone()
        response = made[:, -width:]
        response[(response >= 128) & (response < 256)] = ord("?")  # bytes that are no text by themselves
        return made

    def make(original: Function) -> Function:
        def rollout(**given: Any) -> Any:
            made = original(**given)
            return replace(made, full_sequence=again(made.full_sequence, made.response_ids.shape[1]))

        return rollout

    return {f"{STAGES}:rollout": make}


def positions_of_row() -> Changes:
    """Position ids run on through a packed row, from one sample into the next."""
    return {
        "flowledger.run.forward:pack": results(
            positions=lambda ids: torch.arange(ids.numel(), device=ids.device).view_as(ids)
        )
    }


def positions_with_padding() -> Changes:
    """Position ids count the padding on the left."""
    return {
        f"{STAGES}:rollout": results(
            position_ids=lambda ids: torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        )
    }


def labels_shifted() -> Changes:
    """After the sequence was cut for several ranks each state is asked for the token after its own next one."""

    def make(original: Function) -> Function:
        def packed(*args: Any, **given: Any) -> Any:
            hidden, wanted = original(*args, **given)
            return torch.roll(hidden, 1, 0), wanted

        return packed

    return {"flowledger.run.forward:_packed": make}
