"""A tool that answers between the policy's turns: `rollout.environment: calculator.py:calculator`. And a reward for it."""

import re

SUM = re.compile(r"\d{1,9}(\+\d{1,9})*=")
ARITHMETIC = frozenset(b"0123456789+=")


def calculator(messages: list[dict[str, str]]) -> str | None:
    """The value of the sum that a turn ends with, as in `12+30=`; a question mark for anything else before `=`.

    A turn that does not end with `=` asks for nothing: the response is done.
    """
    turn = messages[-1]["content"]
    if not turn.endswith("="):
        return None
    sums = list(SUM.finditer(turn))
    return f"{sum(map(int, sums[-1][0][:-1].split('+')))}\n" if sums else "?\n"


def arithmetic(response_ids: list[int], response_mask: list[int]) -> float:
    """The fraction of what the policy wrote itself that is a digit, `+` or `=`; for the byte tokenizer of `tiny`."""
    own = [token for token, sampled in zip(response_ids, response_mask, strict=True) if sampled]
    return sum(token in ARITHMETIC for token in own) / len(own) if own else 0.0
