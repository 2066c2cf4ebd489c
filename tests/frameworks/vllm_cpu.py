"""What vLLM must leave undone on a CPU, so that a weight sync can load into it. An entry point has each of its processes call this."""

import torch


def plain_weights() -> None:
    """Weights stay as they are: repacked for the CPU they compute faster, but can never be loaded again."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: torch.nn.Module, **_: object) -> None:
    layer.cpu_linear = torch.nn.functional.linear
