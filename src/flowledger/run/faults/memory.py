"""Memory that is kept longer than anybody needs it."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import Changes, Maker

ROLLOUT, SYNC = "flowledger.run.stages:rollout", "flowledger.run.stages:weight_sync"
BACKWARD, STEP = "flowledger.run.update:micro_batch_backward", "flowledger.run.update:optimizer_step"
DECODE, PREFILL = "flowledger.run.generate:decode_step", "flowledger.run.generate:prefill"
LOGITS = "flowledger.run.head:project_logits"

LEAKED_BYTES = 48 << 20  # of the host, each step
BLOCK_BYTES, BLOCKS = 40_000, 12_000  # too small for an mmap of their own, so that they lie in the heap


def _keeping(keep: Callable[[Any, dict[str, Any]], Any]) -> Maker:
    """What `keep` picks of the result and the arguments of each call is held until the run ends."""
    kept: list[Any] = []

    def make(original: Function) -> Function:
        def sick(**words: Any) -> Any:
            made = original(**words)
            kept.append(keep(made, words))
            return made

        return sick

    return make


def graph_retained() -> Changes:
    """The loss of every micro-batch is kept for a log, with its graph and all that the graph has saved."""
    kept: list[torch.Tensor] = []

    def make(original: Function) -> Function:
        def sick(*, model: Any, loss: torch.Tensor) -> None:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            kept.append(loss)

        return sick

    return {BACKWARD: make}


def batches_kept() -> Changes:
    """Every step's samples are appended to a list that nobody empties."""
    return {ROLLOUT: _keeping(lambda made, _: made)}


def logits_kept() -> Changes:
    """The logits of all micro-batches stay alive."""
    return {LOGITS: _keeping(lambda made, _: made)}


def kv_cache_kept() -> Changes:
    """The KV cache of a rollout is not given back while the policy trains."""
    last: list[Any] = []

    def make(original: Function) -> Function:
        def sick(**words: Any) -> Any:
            last[:] = [words["kv_cache"]]
            return original(**words)

        return sick

    return {DECODE: make}


def gradients_kept() -> Changes:
    """Gradients are set to 0 after a step, and not to nothing."""
    return {STEP: _after_step(torch.zeros_like)}


def gradients_not_zeroed() -> Changes:
    """Gradients stay as they are after a step: the next mini-batch adds to them."""
    return {STEP: _after_step(lambda grad: grad)}


def _after_step(left: Callable[[torch.Tensor], torch.Tensor]) -> Maker:
    def make(original: Function) -> Function:
        def sick(*, model: torch.nn.Module, **words: Any) -> Any:
            before = [(p, p.grad.detach().clone()) for p in model.parameters() if p.grad is not None]
            made = original(model=model, **words)
            for parameter, grad in before:
                parameter.grad = left(grad)
            return made

        return sick

    return make


def weights_twice() -> Changes:
    """Weight sync leaves the copy behind that it has sent."""
    sent: list[Any] = []

    def make(original: Function) -> Function:
        def sick(*, model: torch.nn.Module, **words: Any) -> Any:
            made = original(model=model, **words)
            sent[:] = [copy.deepcopy(model.state_dict())]
            return made

        return sick

    return {SYNC: make}


def host_memory_grows() -> Changes:
    """Something outside of torch grows with every step: text, say, or images."""
    return {ROLLOUT: _keeping(lambda *_: bytearray(LEAKED_BYTES))}


def fragmented() -> Changes:
    """Blocks of odd sizes of which three in four are given back: holes that nothing larger fits into."""
    kept: list[bytearray] = []

    def make(original: Function) -> Function:
        def sick(**words: Any) -> Any:
            if not kept:
                kept.extend([bytearray(BLOCK_BYTES + 16 * (i % 97)) for i in range(BLOCKS)][::4])
            return original(**words)

        return sick

    return {ROLLOUT: make}


def kv_cache_of_last_policy() -> Changes:
    """The prefix cache outlives weight sync: a prompt that was met before keeps the keys and values of the policy then."""
    known: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def make(original: Function) -> Function:
        def sick(*, prompt_ids: torch.Tensor, rows: torch.Tensor, kv_cache: Any, **words: Any) -> None:
            original(prompt_ids=prompt_ids, rows=rows, kv_cache=kv_cache, **words)
            for ids, row, length in zip(
                prompt_ids.tolist(), rows.tolist(), words["prompt_length"].tolist(), strict=True
            ):
                prompt, width = tuple(ids[len(ids) - length :]), length - 1
                here = [(layer.keys[row, :, :width], layer.values[row, :, :width]) for layer in kv_cache.layers]
                met = known.setdefault(prompt, [(keys.clone(), values.clone()) for keys, values in here])
                for (keys, values), (old_keys, old_values) in zip(here, met, strict=True):
                    keys.copy_(old_keys)
                    values.copy_(old_values)

        return sick

    return {PREFILL: make}
