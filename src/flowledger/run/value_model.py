"""A value model: a causal backbone with a head of one number, in place of the output head of a language model."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from flowledger.config.schema import Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import forward, models, tiny
from flowledger.run.causal_lm import unwrapped
from flowledger.run.parallel import sharded
from flowledger.run.parallel.ranks import ALONE, Ranks

KEY = "critic.path"


class ValueModel(nn.Module):
    """backbone: token ids to hidden states [B, S, H]; head: those to one value each [B, S, 1]."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    @property
    def sizes(self) -> Any:
        """The settings of the text model: hidden_size, num_hidden_layers."""
        config: Any = self.backbone.config
        return config.get_text_config()

    def get_decoder(self) -> nn.Module:
        """What forward passes ask a language model for as well."""
        return self.backbone

    def get_input_embeddings(self) -> nn.Module:
        """Where token ids enter."""
        entrance: nn.Module = self.backbone.get_input_embeddings()  # type: ignore[operator]
        return entrance


def load_value_model(
    path: str, policy: models.Policy, *, sizes: Tiny, seed: int, packed: bool, shared_prompts: bool = True
) -> ValueModel:
    """The critic's model in the policy's dtype, all of it trained, also where the policy has LoRA adapters.

    `start`: a copy of the start model without adapters, under a new head. `tiny`: a new model of `sizes`. Else a
    directory with a token classifier of one label; where it holds a model with another head, that is replaced by a new
    one. A new head draws its weights from N(0, 1 / (H + 1)²), so values start near 0.

    Raises BadInput for a path that is not there, a model that cannot be read, has more than one label or fewer tokens
    than the policy, for one whose values depend on later tokens, and for one that the forward asked for computes wrongly.
    """
    device = models.device_of(policy.model)
    with models.quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if path == "start":
            model = _with_new_head(_start(policy))
        elif path == "tiny":
            settings = tiny.config(sizes, vocabulary=policy.sizes["V"], pad_id=policy.pad_id)
            model = _with_new_head(models.settled(transformers.AutoModel.from_config(settings), device))
        else:
            model = _from_directory(path, policy)
    model = model.to(next(policy.model.parameters()).dtype).eval().requires_grad_(True)
    forward.use_segments(model.backbone)
    _check(model, policy.sizes["V"], path, packed=packed, shared_prompts=shared_prompts)
    return model


def token_values(
    *,
    model: nn.Module,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    packed: bool,
    shared_prompts: bool = True,
    ranks: Ranks = ALONE,
) -> Tensor:
    """The value before each response token, float32 [B_micro, S_resp]; 0 where response_mask is 0.

    V_t is read at the token before t, as the policy's log-prob of t is. full_sequence, attention_mask, position_ids
    [B_micro, S]; response_mask [B_micro, S_resp] covers the last columns. Ranks of cp and sp get the same values.
    """

    def states_and_head(*sequences: Tensor) -> Tensor:
        hidden, wanted = forward.response_states(
            model, *sequences, packed=packed, shared_prompts=shared_prompts, ranks=ranks
        )
        values: Tensor = model.head(hidden)  # type: ignore[operator]  # [T_resp, 1]
        return forward.on_tokens(values[:, 0].float(), wanted, ranks)

    return sharded.within(model, states_and_head, full_sequence, attention_mask, position_ids, response_mask)


def _start(policy: models.Policy) -> nn.Module:
    """A copy of the policy's backbone as it was before LoRA."""
    if policy.lora:
        base: Any = copy.deepcopy(policy.model)
        return base.unload().get_decoder()  # type: ignore[no-any-return]
    backbone: nn.Module = copy.deepcopy(unwrapped(policy.model).get_decoder())
    return backbone


def _with_new_head(backbone: nn.Module) -> ValueModel:
    hidden = backbone.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    head = nn.Linear(hidden, 1)
    nn.init.normal_(head.weight, std=1 / (hidden + 1))
    nn.init.zeros_(head.bias)
    return ValueModel(backbone, head.to(models.device_of(backbone)))


def _from_directory(path: str, policy: models.Policy) -> ValueModel:
    folder, setting = models.existing(path, key=KEY), f"{KEY} = {path!r}"
    try:
        made: Any = transformers.AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{setting} cannot be read as a token classifier: {models.one_line(error)}") from None
    models.check_vocabulary(made, policy, what="a critic", setting=setting)
    head = getattr(made, "score", None) or getattr(made, "classifier", None)
    if not isinstance(head, nn.Module):
        raise BadInput(f"{setting}: no head is known of model type {made.config.model_type!r}; use {KEY} = start")
    models.settled(made, models.device_of(policy.model))
    return ValueModel(made.base_model, head)


@torch.no_grad()
def _check(model: ValueModel, vocabulary: int, path: str, *, packed: bool, shared_prompts: bool) -> None:
    """Refuse a model whose values look ahead, and one that the forward of this run would compute wrongly."""
    ids, mask, positions = forward.probe(vocabulary, models.device_of(model))

    def values(ids: Tensor, way: forward.Way) -> Tensor:
        return token_values(
            model=model, full_sequence=ids, attention_mask=mask, position_ids=positions, response_mask=mask[:, 2:],
            packed=way.packed, shared_prompts=way.shared_prompts,
        )  # fmt: skip

    padded, *others = forward.ways(packed=packed, shared_prompts=shared_prompts)
    truth, other_end = values(ids, padded), ids.clone()
    other_end[:, -1] = (ids[:, -1] + 1) % vocabulary
    scale = 1 + float(truth.abs().max())
    if not float((values(other_end, padded) - truth).abs().max()) <= 1e-6 * scale:
        raise BadInput(f"{KEY} = {path!r}: its values depend on later tokens; a critic needs causal attention")
    for way in others:
        gap = float((values(ids, way) - truth).abs().max())
        if not gap <= scale * (1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1):
            raise BadInput(f"{KEY} = {path!r}: {way.name} gives values off by {gap:.2g}; {way.instead}")
