"""A user's script: a trainer of TRL's for two steps, in as many processes as torchrun starts.

    torchrun --nproc-per-node N train_grpo.py FOLDER SEED [grpo | rloo | peft | eval | fsdp]

FOLDER is one that `tiny.py` wrote. peft: GRPO of an adapter; eval: GRPO that evaluates after each step; fsdp: GRPO of a model
whose layers are spread over the processes.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

MORE = {
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


def ascii_share(completions: list[Any], **_: Any) -> list[float]:
    """The reward that `reward.py` in FOLDER gives verl."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isascii() for letter in text) / max(1, len(text)) for text in texts]


def adapter(kind: str) -> dict[str, Any]:
    """What a trainer is told of one, where there is one to train."""
    if kind != "peft":
        return {}
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


def spread(kind: str) -> dict[str, Any]:
    """How a model is loaded whose layers are spread over the processes. On a CPU accelerate passes `fsdp` over in silence."""
    if kind != "fsdp":
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))}


def main(folder: Path, seed: int, kind: str = "grpo") -> None:
    configuration, trained_by = (RLOOConfig, RLOOTrainer) if kind == "rloo" else (GRPOConfig, GRPOTrainer)
    settings = configuration(
        output_dir=str(folder / "trained"), max_steps=int(os.environ.get("TRAIN_STEPS", "2")), seed=seed, use_cpu=True, bf16=False, learning_rate=1e-3,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_completion_length=24,
        num_iterations=1, beta=0.04, gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True, **MORE.get(kind, {}),
    )  # fmt: skip
    prompts = load_dataset("parquet", data_files=str(folder / "prompts.parquet"), split="train")
    trainer = trained_by(
        model=AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="sdpa", **spread(kind)
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        reward_funcs=ascii_share, args=settings,
        train_dataset=prompts, eval_dataset=prompts.select(range(4)) if kind == "eval" else None, **adapter(kind),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
