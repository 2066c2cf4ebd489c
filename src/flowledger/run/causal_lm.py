"""Where the parts of a language model are, whatever its architecture and its wrappers."""

from typing import Any

from torch import nn


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face causal LM inside a PEFT wrapper, or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM, or of a value model."""
    layers: nn.ModuleList = unwrapped(model).get_decoder().layers
    return layers
