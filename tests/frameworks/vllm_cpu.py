"""What vLLM must leave undone on a CPU, so that a weight sync can load into it, and a word that it no longer knows.

Entry points have each of its processes call these.
"""

import functools
from typing import Any

import torch


def plain_weights() -> None:
    """Weights stay as they are: repacked for the CPU they compute faster, but can never be loaded again."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: torch.nn.Module, **_: object) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def older_words() -> None:
    """verl 0.9.1 ends generation with a word of earlier releases of vLLM, where it trains and samples at once."""
    from vllm.v1.engine.async_llm import AsyncLLM

    pause = AsyncLLM.pause_generation

    @functools.wraps(pause)
    async def paused(self: Any, *, wait_for_inflight_requests: bool | None = None, **how: Any) -> None:
        if wait_for_inflight_requests is not None:
            how["mode"] = "wait" if wait_for_inflight_requests else "abort"
        await pause(self, **how)

    AsyncLLM.pause_generation = paused
