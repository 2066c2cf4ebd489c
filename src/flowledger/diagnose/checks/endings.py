"""How responses ended: one that is as long as allowed and has no end token was cut off, whatever is said of it."""

from collections.abc import Iterator

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.masks import response_places
from flowledger.diagnose.checks.sequences import TOKENS, Told, told
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SENTENCE = "a response is finished where its last token ends one, and cut off where it is as long as allowed"


def check(ledger: Ledger) -> list[FindingRow]:
    """`finish_reason_wrong`."""
    data = told(ledger)
    limit = data.setting("rollout.max_response_tokens")
    if not data.ours or limit is None:
        return [
            answer("finish_reason_wrong", SENTENCE, seen=0, needs=("the limit of responses: framework = flowledger",))
        ]
    last = _last_tokens(data)
    return [
        answer(
            "finish_reason_wrong", SENTENCE, seen=len(last), breaches=list(_wrong(data, last, limit)),
            needs=() if last else (TOKENS,), cause="truncated responses that count as finished are rewarded and trained as whole ones",
            next_step="compare finish_reason with response_length = rollout.max_response_tokens",
        )
    ]  # fmt: skip


def _last_tokens(data: Told) -> dict[tuple[int, str], int | None]:
    """The last token of each recorded response."""
    found: dict[tuple[int, str], int | None] = {}
    for one in data.sequences:
        places = response_places(one, data) if one.has("attention_mask") else None
        if places:
            found[one.step, one.sample_id] = one["token_id"][places[-1]]
    return found


def _wrong(data: Told, last: dict[tuple[int, str], int | None], limit: int) -> Iterator[Breach]:
    ends = set(data.setting("rollout.stop_token_ids", ()))
    for key, token in last.items():  # what ended the short ones
        sample = data.samples[key]
        if sample.finish_reason == "stop" and sample.response_length is not None and sample.response_length < limit:
            ends.add(token)
    many_turns = data.setting("rollout.environment") is not None
    for key, token in last.items():
        sample = data.samples[key]
        length, reason = sample.response_length, sample.finish_reason
        if length is None or token is None:
            continue
        if reason == "stop" and length >= limit and token not in ends:
            yield Breach(
                step=sample.step,
                stage="rollout",
                text=f"sample {sample.sample_id} is said to have stopped after {length} of {limit} tokens, and its last token "
                f"{token} ends no response",
            )
        if reason == "length" and length < limit and not many_turns:
            yield Breach(
                step=sample.step,
                stage="rollout",
                text=f"sample {sample.sample_id} is said to be cut off after {length} of {limit} tokens",
            )
