"""Masks lie on the tokens that they are meant for: the response mask on the response, the loss mask on what is trained."""

from collections.abc import Iterator

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.sequences import TOKENS, Told, Trace, told
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

RESPONSE = "the response mask covers each token that the policy chose, from the first after the prompt to the last"
LOSS = "the loss mask is the response mask of the samples that are kept"
SHIFTED = "a shift by one, or an end token that was masked out, looks like this"


def check(ledger: Ledger) -> list[FindingRow]:
    """`response_mask_wrong` and `loss_mask_wrong`."""
    data = told(ledger)
    if not data.ours:
        needs = ("a run whose prompts and masks the manifest describes: framework = flowledger",)
        return [
            answer(name, text, seen=0, needs=needs)
            for name, text in (("response_mask_wrong", RESPONSE), ("loss_mask_wrong", LOSS))
        ]
    seen = [one for one in data.sequences if one.has("response_mask") and one.has("attention_mask")]
    masked = [one for one in data.sequences if one.has("loss_mask")]
    return [
        answer(
            "response_mask_wrong", RESPONSE, seen=len(seen), breaches=[b for one in seen for b in _response(one, data)],
            needs=() if seen else (TOKENS,), cause=SHIFTED, next_step="print response_ids and response_mask side by side",
        ),
        answer(
            "loss_mask_wrong", LOSS, seen=len(masked), breaches=[b for one in masked for b in _loss(one, data)] + list(_in_loss(data)),
            needs=() if masked else (TOKENS,), cause=SHIFTED, next_step="print response_mask and loss_mask side by side",
        ),
    ]  # fmt: skip


def response_places(one: Trace, data: Told) -> list[int] | None:
    """Indices of the tokens after the prompt; None where the sample does not say how long its prompt is."""
    sample = data.samples.get((one.step, one.sample_id))
    if sample is None or sample.prompt_length is None:
        return None
    attended = [at for at, on in enumerate(one["attention_mask"]) if on]
    return attended[sample.prompt_length :]


def _response(one: Trace, data: Told) -> Iterator[Breach]:
    places, mask = response_places(one, data), one["response_mask"]
    if places is None:
        return
    alone = data.setting("rollout.environment") is None
    first, last = places[:1], places[-1:] if _ended(one, data) else []
    due = set(places) if alone else {*first, *last}
    for at, position in enumerate(one.positions):
        on = bool(mask[at])
        if at in due and not on:
            yield Breach(
                step=one.step,
                stage="rollout",
                text=f"sample {one.sample_id} position {position} is response, and its response_mask is 0",
            )
            return
        if on and at not in places:
            where = "prompt" if at < (places or [len(mask)])[0] else "behind the end"
            yield Breach(
                step=one.step,
                stage="rollout",
                text=f"sample {one.sample_id} position {position} is {where}, and its response_mask is 1",
            )
            return


def _ended(one: Trace, data: Told) -> bool:
    return data.samples[one.step, one.sample_id].finish_reason == "stop"


def _loss(one: Trace, data: Told) -> Iterator[Breach]:
    sample = data.samples.get((one.step, one.sample_id))
    reason = sample.dropped_reason if sample else None
    rejects = bool(data.setting("algorithm.rollout_correction.rejections"))
    for position, response, loss in zip(one.positions, one["response_mask"], one["loss_mask"], strict=True):
        due = bool(response) and reason is None
        if rejects and not loss:  # whatever was rejected
            continue
        if bool(loss) != due:
            why = (
                f"a sample that was dropped ({reason})"
                if reason
                else "a response token"
                if response
                else "no response token"
            )
            yield Breach(
                step=one.step,
                stage="filter",
                text=f"sample {one.sample_id} position {position} is {why}, and its loss_mask is {loss or 0}",
            )
            return


def _in_loss(data: Told) -> Iterator[Breach]:
    """Where the loss itself was handed another mask than the one before the update."""
    before = {
        (one.step, one.sample_id): dict(zip(one.positions, one["loss_mask"], strict=True)) for one in data.sequences
    }
    for one in data.passes:
        mask = before.get((one.step, one.sample_id))
        if mask is None:
            continue
        for position, loss in zip(one.positions, one["loss_mask"], strict=True):
            if loss is not None and (was := mask.get(position)) is not None and loss != was:
                yield Breach(
                    step=one.step,
                    stage="update_actor",
                    text=f"sample {one.sample_id} position {position}: loss_mask is {was} before the update and {loss} in the loss",
                )
                break
        else:
            here = {position for position, loss in zip(one.positions, one["loss_mask"], strict=True) if loss}
            if gone := sorted(position for position, on in mask.items() if on and position not in here):
                yield Breach(
                    step=one.step,
                    stage="update_actor",
                    text=f"sample {one.sample_id} position {gone[0]}: loss_mask is 1 before the update and 0 in the loss",
                )
