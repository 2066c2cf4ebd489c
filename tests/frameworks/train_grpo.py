"""A user's script: TRL's GRPOTrainer for two steps, in as many processes as torchrun starts.

    torchrun --nproc-per-node N train_grpo.py FOLDER SEED

FOLDER is one that `tiny.py` wrote.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def ascii_share(completions: list[Any], **_: Any) -> list[float]:
    """The reward that `reward.py` in FOLDER gives verl."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isascii() for letter in text) / max(1, len(text)) for text in texts]


def main(folder: Path, seed: int) -> None:
    settings = GRPOConfig(
        output_dir=str(folder / "trained"), max_steps=2, seed=seed, use_cpu=True, bf16=False, learning_rate=1e-3,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_completion_length=24,
        num_iterations=1, beta=0.04, gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        reward_funcs=ascii_share, args=settings,
        train_dataset=load_dataset("parquet", data_files=str(folder / "prompts.parquet"), split="train"),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
