"""A loss that is divided by the wrong number, clipped by the wrong bounds, or has a term of the wrong sign."""

from dataclasses import replace
from typing import Any

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import Changes, Maker, results, words

LOSS, TOTALS = "flowledger.run.loss:micro_batch_loss", "flowledger.run.update:mini_batch_totals"


def _totals(change: Any) -> Maker:
    def make(original: Function) -> Function:
        def mini_batch_totals(*args: Any, **given: Any) -> Any:
            return change(original(*args, **given))

        return mini_batch_totals

    return make


def normaliser_of_micro_batch() -> Changes:
    """Each micro-batch divides by its own tokens, so that short ones weigh more."""

    def make(original: Function) -> Function:
        def micro_batch_loss(**given: Any) -> Any:
            own = max(1, int(given["loss_mask"].sum()))
            return original(**given | {"totals": replace(given["totals"], tokens=own)})

        return micro_batch_loss

    return {LOSS: make}


def normaliser_of_samples() -> Changes:
    """The sum over tokens is divided by samples."""
    return {TOTALS: _totals(lambda made: replace(made, tokens=made.sequences))}


def padded_samples_counted() -> Changes:
    """Samples that were dropped count among those that the mean is taken over."""
    return {TOTALS: _totals(lambda made: replace(made, sequences=made.rows))}


def divisor_twice() -> Changes:
    """The loss is divided by the ranks that share a sequence, which its normaliser knows already."""
    return {TOTALS: results(tokens=lambda number: 2 * number)}


def kl_sign() -> Changes:
    """The policy is paid for leaving the reference."""
    return {LOSS: words(kl_coef=lambda value: -value)}


def kl_reward_sign() -> Changes:
    """The same in the reward."""
    return {"flowledger.run.advantage:penalised": words(coef=lambda value: -value)}


def kl_turned() -> Changes:
    """The KL is that of the reference from the policy."""

    def make(original: Function) -> Function:
        def token_kl(*, new_log_prob: Any, ref_log_prob: Any, **given: Any) -> Any:
            return original(new_log_prob=ref_log_prob, ref_log_prob=new_log_prob, **given)

        return token_kl

    return {"flowledger.run.loss:token_kl": make}


def _algorithm(**changes: str) -> Maker:
    """Settings of the loss that take the value of another, or with a minus their own, negative."""

    def changed(settings: Any) -> Any:
        taken = {
            name: -getattr(settings, other[1:]) if other.startswith("-") else getattr(settings, other)
            for name, other in changes.items()
        }
        return settings.model_copy(update=taken)

    return words(algorithm=changed)


def entropy_sign() -> Changes:
    """Entropy is punished where it was to be paid for."""
    return {LOSS: _algorithm(entropy_coef="-entropy_coef")}


def clip_swapped() -> Changes:
    """The lower bound of the ratio is taken for the upper one, and the other way round."""
    return {LOSS: _algorithm(clip_low="clip_high", clip_high="clip_low")}


def advantage_sign() -> Changes:
    """The loss pushes the policy away from what was good."""
    return {LOSS: words(advantages=lambda values: -values)}
