"""What both frameworks are given to train: a small Qwen2 of random weights, prompts, and a reward.

A folder holds `model/` (weights, tokenizer, chat template), `prompts.parquet` and `reward.py`.
"""

from pathlib import Path

CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPTS = 16
# Random weights hardly ever choose one token among 264: more of them end a response, so that lengths differ.
ENDS = b" aeiouy\n"
REWARD = '''\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The share of ASCII characters."""
    return sum(letter.isascii() for letter in solution_str) / max(1, len(solution_str))
'''


def write(folder: Path, *, width: int = 128, layers: int = 2) -> None:
    """All three; the same weights each time. Heads are 32 wide."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from flowledger.run.tiny import BOS, EOS, PAD, SPECIALS, tokenizer

    torch.manual_seed(0)
    # vLLM's attention on a CPU wants heads of 32 or more.
    settings = Qwen2Config(
        vocab_size=256 + len(SPECIALS), hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        num_key_value_heads=2, intermediate_size=2 * width, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS,
    )  # fmt: skip
    model = Qwen2ForCausalLM(settings)
    model.generation_config.eos_token_id = [EOS, *ENDS]
    model.save_pretrained(folder / "model")
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(folder / "model")
    _write_prompts(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def _write_prompts(path: Path) -> None:
    """Sums to work out, as verl reads them; TRL reads the column `prompt` alone."""
    import duckdb

    duckdb.sql(
        f"""copy (
            select 'sums' as data_source,
                   [{{'role': 'user', 'content': printf('%d + %d =', n * n, n)}}] as prompt,
                   {{'style': 'rule', 'ground_truth': (n * n + n)::varchar}} as reward_model
            from range({PROMPTS}) numbers(n)
        ) to '{path}' (format parquet)"""
    )
