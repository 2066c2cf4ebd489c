"""The two sides of against_trl.py: a step of this loop, a step of TRL's GRPOTrainer, and where the time of each goes.

Both are driven step by step in one process. A step ends when the weights are new. Its parts: `generate` (prompts to
responses), `log_prob` (passes without gradient), `update` (forward and backward passes, optimizer), `other` (rewards,
advantages, bookkeeping). Both read the same weights from one folder, and no token ends a response on either side.
"""

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowledger.flow.seams import Function, replaced

LR = 1e-4
MEASURED = ("generate", "log_prob", "update")
Clocks = tuple[float, float]
REWARD = "def lower(prompt, response, **_):\n    return sum(c.islower() for c in response) / max(1, len(response))\n"
OUR_PARTS = {
    "prompt": "generate", "rollout": "generate", "old_log_prob": "log_prob", "ref_log_prob": "log_prob",
    "update_actor": "update",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a batch, the same on both sides."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    prompts: int  # B_prompt
    group_size: int  # G
    prompt_tokens: tuple[int, int]  # of the shortest prompt and of the longest
    response_tokens: int  # of every response
    micro_batch: int  # samples
    steps: int  # measured, after the warm-up
    bar: float  # least ratio of samples per second

    @property
    def samples(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds that one step took, by part, and all of it as `step`: on the wall, and of this process's CPU."""

    wall: Mapping[str, float]
    cpu: Mapping[str, float]


class Stopwatch:
    """The clocks of the step that runs."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._spent = dict.fromkeys(MEASURED, (0.0, 0.0))
        self._begun = now()

    def end(self) -> Taken:
        step = since(self._begun)
        wall, cpu = ({part: both[clock] for part, both in self._spent.items()} for clock in (0, 1))
        for spent, whole in ((wall, step[0]), (cpu, step[1])):
            spent |= {"other": whole - sum(spent.values()), "step": whole}
        return Taken(wall=wall, cpu=cpu)

    def add(self, part: str, begun: Clocks) -> None:
        """The time since `begun` belongs to a part."""
        before, more = self._spent[part], since(begun)
        self._spent[part] = (before[0] + more[0], before[1] + more[1])

    def timing(self, part: str, only_if: Callable[[], bool] = lambda: True) -> Callable[[Function], Function]:
        """Makes wrappers that add what a function takes to a part."""

        def make(original: Function) -> Function:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                counts, begun = only_if(), now()
                try:
                    return original(*args, **kwargs)
                finally:
                    if counts:
                        self.add(part, begun)

            return wrapper

        return make


def now() -> Clocks:
    """Seconds on the wall, and of CPU."""
    return time.perf_counter(), time.process_time()


def since(begun: Clocks) -> Clocks:
    wall, cpu = now()
    return wall - begun[0], cpu - begun[1]


def write_inputs(case: Case, folder: Path, *, kl_coef: float) -> Path:
    """Weights, tokenizer, prompts, reward and configuration of a case in `folder`; returns the configuration's path."""
    import torch

    from flowledger.config.schema import Tiny
    from flowledger.run import tiny
    from flowledger.run.models import quiet

    sizes = {name: getattr(case, name) for name in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")}
    torch.manual_seed(0)
    with quiet():
        model = tiny.causal_lm(Tiny(**sizes))
        model.config.use_cache = model.generation_config.use_cache = True  # else TRL would generate without a cache
        model.save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _prompts(case)))
    (folder / "rewards.py").write_text(REWARD)
    config = {
        "steps": 1_000_000, "model": {"path": str(folder / "model")},
        "data": {
            "path": "prompts.jsonl", "prompts_per_step": case.prompts, "max_prompt_tokens": case.prompt_tokens[1],
            "chat_template": False,
        },
        "rollout": {
            "samples_per_prompt": case.group_size, "max_response_tokens": case.response_tokens, "weights": "shared",
        },
        "reward": {"components": [{"name": "lower", "kind": "function", "path": "rewards.py:lower"}]},
        "algorithm": {"advantage": "grpo", "kl_coef": kl_coef}, "ref": {"path": "start"} if kl_coef else None,
        "actor": {"micro_batch": {"samples": case.micro_batch}}, "optim": {"lr": LR}, "record": {"level": "off"},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def _prompts(case: Case) -> list[str]:
    """Random prompts of evenly spread lengths, one token a byte."""
    rng, (low, high) = random.Random(0), case.prompt_tokens
    lengths = [low + (high - low) * k // max(1, case.prompts - 1) for k in range(case.prompts)]
    return ["".join(rng.choice("abcdefgh ") for _ in range(length - 1)) + ":" for length in lengths]


# ---------------------------------------------------------------------------------------------------------------- ours


@contextmanager
def ours(config: Path, settings: Sequence[str] = ()) -> Iterator[tuple[Any, Callable[[], Taken]]]:
    """A world, and what takes one step in it."""
    from flowledger.config.read import read
    from flowledger.run import loop

    watch = Stopwatch()
    changes = [(f"flowledger.run.stages:{stage}", watch.timing(part)) for stage, part in OUR_PARTS.items()]
    with loop.prepared(read(config, list(settings))) as world, replaced(changes):
        world.stop_ids = ()
        steps = loop.train(world)

        def step() -> Taken:
            watch.begin()
            next(steps)
            return watch.end()

        yield world, step


# --------------------------------------------------------------------------------------------------------------- TRL's


def trainer(case: Case, folder: Path, *, kl_coef: float, cache: str | None = None) -> Any:
    """TRL's trainer on what `write_inputs` wrote, as fast as it goes on a CPU: fp32, one pass, nothing saved or logged."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from flowledger.run.models import quiet

    def lower(completions: list[str], **_: Any) -> list[float]:
        return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names settings as transformers did before version 5
        settings = GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, learning_rate=LR, lr_scheduler_type="constant",
            per_device_train_batch_size=case.micro_batch, gradient_accumulation_steps=case.samples // case.micro_batch,
            num_generations=case.group_size, max_completion_length=case.response_tokens, beta=kl_coef, max_steps=1_000_000,
            max_grad_norm=1.0, weight_decay=0.0, gradient_checkpointing=False, cache_implementation=cache,
            report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, dataloader_num_workers=0,
        )  # fmt: skip
        made = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=lower, args=settings,
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
            train_dataset=Dataset.from_list([{"prompt": text} for text in _prompts(case)]),
        )  # fmt: skip
    made.eos_token_ids = [-1]  # no token ends a response, and generation does not look for one
    made.generation_kwargs.pop("eos_token_id", None)
    made.generation_config.eos_token_id = made.model.generation_config.eos_token_id = None
    return made


def train(made: Any, each: Callable[[Taken], bool]) -> None:
    """Train; `each` gets what a step took and says whether to go on. What `each` does itself is on no clock."""
    import torch
    from transformers import PrinterCallback, TrainerCallback

    watch = Stopwatch()

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begin()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.optimizing = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.add("update", self.optimizing)
            control.should_training_stop = not each(watch.end())
            watch.begin()

    def no_gradient() -> bool:
        return not torch.is_grad_enabled()

    name = "trl.trainer.grpo_trainer:GRPOTrainer"
    changes = [
        (f"{name}._generate", watch.timing("generate")),
        (f"{name}._get_per_token_logps_and_entropies", watch.timing("log_prob", no_gradient)),
        (f"{name}.compute_loss", watch.timing("update")),
    ]
    changes.append(("accelerate:Accelerator.backward", watch.timing("update")))
    with replaced(changes) as missed, warnings.catch_warnings():
        if missed:
            raise RuntimeError(f"this version of TRL has no {', '.join(missed)}")
        warnings.simplefilter("ignore")
        made.remove_callback(PrinterCallback)
        made.add_callback(Turns())
        made.train()
