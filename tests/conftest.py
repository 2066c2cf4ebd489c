"""What tests of several rooms share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rewards_here() -> Iterator[None]:
    """Rules are called in this process: one of its own for each of many short runs takes longer than the run."""
    from flowledger.run import rewards
    from flowledger.run.reward_process import Verdict
    from flowledger.run.reward_worker import answer, build

    class Here:
        def __init__(self, setup: Mapping[str, Any], *, timeout_s: float) -> None:
            self.rules = build(setup)

        def wait_ready(self) -> None: ...

        def close(self) -> None: ...

        def ask(self, jobs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
            told = [answer(self.rules[job["component"]], job) for job in jobs]
            return [
                Verdict(one.get("value"), "reward_error" if "error" in one else None, one.get("error")) for one in told
            ]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rewards, "RewardProcess", Here)
        yield
