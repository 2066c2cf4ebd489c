"""Reward functions for the examples: `path: examples/rewards.py:in_class` in a reward component."""

import string

CLASSES = {
    "digits": string.digits,
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
}


def in_class(response: str, answer: str) -> float:
    """The fraction of the response's characters in the class that `answer` names; 0 for an empty response."""
    return sum(character in CLASSES[answer] for character in response) / len(response) if response else 0.0


def brief(response: str) -> float:
    """1 for a response of at most 8 characters, then falling with length: a small wish beside the task's own reward."""
    return min(1.0, 8 / max(1, len(response)))
