"""Where the parts of a language model are, whatever its architecture and its wrappers."""

from typing import Any

from torch import nn

from flowledger.flow.errors import BadInput

LAYERS = ("layers", "h")  # what decoders call the list of their layers


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face causal LM inside a PEFT wrapper, or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM, or of a value model. Raises BadInput where they are not one list."""
    decoder: Any = unwrapped(model).get_decoder()
    found = [layers for name in LAYERS if isinstance(layers := getattr(decoder, name, None), nn.ModuleList)]
    if not found:
        raise BadInput(f"a model of type {decoder.config.model_type!r} has no list of layers to cut; use one process")
    return found[0]
