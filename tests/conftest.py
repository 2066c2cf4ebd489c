"""What tests of several rooms share."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # what else runs on a machine makes no example wrong
settings.load_profile("patient")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
collect_ignore = ["frameworks"]  # unless named: they need environments of their own, see `make test-frameworks`


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`forked.ranks(n, function, …)`: a function on n ranks of this machine."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("forked")


@pytest.fixture
def equality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A step as one process and as many make it, and how far they are apart."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("equality")


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
