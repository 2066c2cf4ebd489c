"""Why responses ended, told from what they end in: an engine knows, and most frameworks tell nobody."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flowledger.record.jagged import Jagged


def reasons(
    last: Sequence[int | None], lengths: Sequence[int], ends: Collection[int], limit: int | None
) -> list[str | None]:
    """`stop` or `length` of each response [B], from its last token (None: it has none) and its length.

    One that ends in a token of `ends` has stopped. Another was cut off, by the limit where that is known; one that is
    shorter than the limit was ended by something else, and nobody says what: None.
    """
    cut = ("length" if limit is None or length >= limit else None for length in lengths)
    return ["stop" if token in ends else other for token, other in zip(last, cut, strict=True)]


def of_batch(values: Mapping[str, Any], ragged: Mapping[str, Jagged], facts: Mapping[str, Any]) -> list[str | None]:
    """The same of a batch, from its response_ids [B, S_resp], padded (with a mask beside them) or not; nothing where it
    lies on a device, or nobody has said which tokens end a response (`@end_tokens`)."""
    ends, limit = facts.get("end_tokens"), facts.get("response_limit")
    found = _of_padded(values) if "response_ids" in values else _of_ragged(ragged.get("response_ids"))
    return reasons(*found, ends, limit) if ends and found is not None else []


def _of_ragged(responses: Jagged | None) -> tuple[list[int | None], list[int]] | None:
    if responses is None or not responses.lengths or not responses.values.is_cpu:
        return None
    ends = list(accumulate(responses.lengths))
    found = responses.values[[max(0, end - 1) for end in ends]].tolist() if ends[-1] else [0] * len(ends)
    return _but_empty(found, responses.lengths), responses.lengths


def _of_padded(values: Mapping[str, Any]) -> tuple[list[int | None], list[int]] | None:
    """The mask is one over prompt and response where there is such a one: a response may end in what an environment wrote."""
    responses, whole = values["response_ids"], values.get("attention_mask")
    mask = values.get("response_mask") if whole is None else whole[:, -responses.shape[1] :]
    if mask is None or not mask.is_cpu or not responses.is_cpu or mask.shape != responses.shape:
        return None
    counts = mask.count_nonzero(1)
    lengths = counts.tolist()
    if not responses.shape[1]:
        return [None] * len(lengths), lengths
    found = responses.gather(1, (counts - 1).clamp_(0).unsqueeze(1)).squeeze(1).tolist()
    return _but_empty(found, lengths), lengths


def _but_empty(last: Sequence[int], lengths: Sequence[int]) -> list[int | None]:
    """The last token of each response; a look into torch for each row would take ten times as long as one for all."""
    return [token if length else None for token, length in zip(last, lengths, strict=True)]
