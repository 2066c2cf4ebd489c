"""Rollouts kept of one launch of verl and given back in another: what an engine samples depends on when requests meet.

verl imports it in each of its processes (VERL_USE_EXTERNAL_MODULES=replay); REPLAY names the folder. The n-th response to
a prompt is read from there, or, where it is not there yet, sampled and kept.
"""

import functools
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

from flowledger.record.awaited import Awaited

MODULE = "verl.experimental.agent_loop.single_turn_agent_loop"


def begin(folder: Path) -> None:
    """Once the module is there, take the place of its agent loop."""

    def arrived() -> None:
        from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

        SingleTurnAgentLoop.run = replayed(SingleTurnAgentLoop.run, folder)

    Awaited({MODULE: arrived}).install()


def replayed(run: Any, folder: Path) -> Any:
    """An agent loop that samples only what the folder lacks."""
    asked: Counter[int] = Counter()

    @functools.wraps(run)
    async def from_folder(self: Any, sampling_params: Any, **kwargs: Any) -> Any:
        index = int(kwargs["index"])
        file = folder / f"{index}-{asked[index]}.pickle"
        asked[index] += 1
        if file.exists():
            return pickle.loads(file.read_bytes())
        output = await run(self, sampling_params, **kwargs)
        file.write_bytes(pickle.dumps(output))
        return output

    return from_folder


if "REPLAY" in os.environ:
    begin(Path(os.environ["REPLAY"]))
