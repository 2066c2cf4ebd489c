"""A user's script: vLLM answers some prompts twice, and says what it knows of that itself: `generate.py FOLDER`.

Its cache is too small for all of them at once, one request is given up, and new weights come in between.
"""

import asyncio
import json
import sys
from collections import Counter
from typing import Any, ClassVar

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

REQUESTS, RESPONSE_TOKENS, GIVEN_UP = 12, 24, 5
SHARED = 32  # tokens that all prompts begin with: one block of the cache
SETTINGS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_batched_tokens": 1024, "max_num_seqs": 6,
    "block_size": 32, "num_gpu_blocks_override": 11, "distributed_executor_backend": "mp", "seed": 1,
    "gpu_memory_utilization": 0.1,
}  # fmt: skip


class Stats(StatLoggerBase):
    """What the engine counts."""

    counted: ClassVar[Counter[str]] = Counter()

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
    def log_engine_initialized(self) -> None: ...

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.counted["most_running"] = max(self.counted["most_running"], scheduler_stats.num_running_reqs)
        if iteration_stats is not None:
            self.counted["preemptions"] += iteration_stats.num_preempted_reqs
            self.counted["cached_tokens"] += iteration_stats.prompt_token_stats.cached_tokens
            for one in iteration_stats.finished_requests:
                self.counted[f"finished/{one.finish_reason}"] += 1


async def _answer(engine: AsyncLLM, number: int, round_: int) -> dict[str, Any]:
    own = [40 + (number * 7 + i) % 200 for i in range(12 + number)]
    prompt = {"prompt_token_ids": [*range(40, 40 + SHARED), *own]}
    sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, temperature=1.0, seed=number)
    last: Any = None
    async for output in engine.generate(prompt, sampling, request_id=f"{round_}:{number}"):
        last = output
        if number == GIVEN_UP:
            break
    (answer,) = last.outputs
    return {
        "name": last.request_id, "reason": answer.finish_reason, "prompt_tokens": len(last.prompt_token_ids),
        "response": list(answer.token_ids), "cached_tokens": last.num_cached_tokens,
    }  # fmt: skip


async def _main(folder: str) -> None:
    arguments = AsyncEngineArgs(model=f"{folder}/model", **SETTINGS)
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[Stats])
    rounds = []
    for version in (3, 4):
        await engine.engine_core.set_weight_version_async(str(version))
        rounds.append(await asyncio.gather(*(_answer(engine, number, version) for number in range(REQUESTS))))
        await engine.collective_rpc("reload_weights")
    await asyncio.sleep(1)  # the last statistics come after the last token
    print(json.dumps({"rounds": rounds, "counted": Stats.counted, "settings": SETTINGS}))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
