"""Log-probs of response tokens: one forward pass of a micro-batch, packed (no padding) or padded.

Only hidden states that predict a response token meet the output head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from flowledger.flow.errors import BadInput
from flowledger.run.causal_lm import unwrapped
from flowledger.run.head import head_of, token_probs
from flowledger.run.packing import pack
from flowledger.run.parallel import collectives, sharded
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.segments import segment_attention

ATTENTION = "flowledger_segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward pass says of the response tokens; 0 where response_mask is 0."""

    new_log_prob: Tensor  # float32 [B_micro, S_resp]
    entropy: Tensor  # float32 [B_micro, S_resp]
    sum_pi_squared: Tensor | None  # float32 [B_micro, S_resp], where asked for: Σ over the vocabulary of π²


def micro_batch_forward(
    *,
    model: nn.Module,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    temperature: float,
    packed: bool,
    chunk_tokens: int,
    shared_prompts: bool = True,
    entropy_grad: bool = False,
    sum_pi_squared: bool = False,
    ranks: Ranks = ALONE,
) -> Forward:
    """Log-prob and entropy of every response token under the distribution at `temperature`.

    full_sequence, attention_mask, position_ids [B_micro, S]; response_mask [B_micro, S_resp] covers the last columns.
    `shared_prompts`: where packed, neighbours with the same prompt hold it once, unless cp cuts samples. Ranks of cp and sp
    get the same result, each the gradient of the tokens that it has. Raises BadInput where they share a padded batch.
    """

    def states_and_head(*sequences: Tensor) -> tuple[Tensor, ...]:
        hidden, wanted = response_states(
            model, *sequences, packed=packed, shared_prompts=shared_prompts, ranks=ranks
        )  # [T_resp, H]
        targets = full_sequence[:, -response_mask.shape[1] :][wanted]  # [T_resp]
        head = head_of(model)
        made = token_probs(hidden, targets, head, temperature, chunk_tokens, entropy_grad, sum_pi_squared)
        return tuple(on_tokens(values, wanted, ranks) for values in made)  # each [B_micro, S_resp]

    log_prob, entropy, *squares = sharded.within(
        model, states_and_head, full_sequence, attention_mask, position_ids, response_mask
    )
    return Forward(new_log_prob=log_prob, entropy=entropy, sum_pi_squared=squares[0] if squares else None)


def use_segments(model: nn.Module) -> None:
    """Switch a model to the attention that understands packed segments; for everything else it is torch's SDPA."""
    AttentionInterface.register(ATTENTION, segment_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    unwrapped(model).set_attn_implementation(ATTENTION)


@torch.no_grad()
def check_forward(model: nn.Module, vocabulary: int, *, packed: bool = True, shared_prompts: bool = True) -> None:
    """Refuse a model whose logits or packed attention we would compute wrongly, by comparing with its own forward.

    Only the ways that a run takes are checked. Raises BadInput with the setting that avoids the one that is wrong.
    """
    ids, mask, positions = probe(vocabulary, next(model.parameters()).device)
    logits = unwrapped(model)(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float()
    truth = logits[:, 1:-1].log_softmax(-1).gather(-1, ids[:, 2:, None])[..., 0]
    tolerance = 1e-3 if logits.dtype == torch.float32 and next(model.parameters()).dtype == torch.float32 else 0.1
    for way in ways(packed=packed, shared_prompts=shared_prompts):
        ours = micro_batch_forward(
            model=model, full_sequence=ids, attention_mask=mask, position_ids=positions, response_mask=mask[:, 2:],
            temperature=1.0, chunk_tokens=0, packed=way.packed, shared_prompts=way.shared_prompts,
        )  # fmt: skip
        gap = float((ours.new_log_prob - truth).abs().max())
        if not gap <= tolerance:
            kind = unwrapped(model).config.model_type
            raise BadInput(
                f"model type {kind!r}: {way.name} differs from the model's own log-probs by {gap:.2g} nats; {way.instead}"
            )


@dataclass(frozen=True, slots=True)
class Way:
    """One way through a model, and what to do where it is wrong."""

    name: str
    packed: bool
    shared_prompts: bool
    instead: str


WAYS = (
    Way("the output head", False, False, "this architecture is not supported"),
    Way("the packed forward", True, False, "set actor.packed = false"),
    Way("the packed forward with shared prompts", True, True, "set actor.shared_prompts = false"),
)


def ways(*, packed: bool, shared_prompts: bool) -> tuple[Way, ...]:
    """The padded way, which all else is held against, then those that these settings take, the plainest first."""
    return WAYS[: 1 + packed + (packed and shared_prompts)]


def probe(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and positions [3, 6] to try a model with: prompts of two tokens, the first two rows with the same one."""
    ids = torch.arange(18, device=device).reshape(3, 6) % vocabulary
    ids[1, :2] = ids[0, :2]
    return ids, torch.ones_like(ids), torch.arange(6, device=device).expand(3, 6)


def response_states(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    response_mask: Tensor,
    *,
    packed: bool,
    shared_prompts: bool = True,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """Hidden states [T_resp, H] just before each response token, and where those tokens stand [B_micro, S_resp].

    What a head says of a state speaks of the next token: its log-prob, or what is still to come from there. Of several
    ranks that share the samples each has the states of its own tokens, and says where those stand.
    """
    if packed:
        return _packed(model, ids, mask, positions, response_mask, shared_prompts, ranks)
    if (share := ranks.degree("tokens")) > 1:
        raise BadInput(
            f"actor.packed = false: mesh.cp*sp = {share} ranks share packed rows only; set actor.packed = true"
        )
    return _padded(model, ids, mask, positions, response_mask)


def _packed(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    response_mask: Tensor,
    shared_prompts: bool,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """Hidden states [T_resp, H] that predict the wanted tokens, and where those stand [B_micro, S_resp]."""
    packed = pack(
        ids,
        mask,
        positions,
        response_mask,
        shared_prompts=shared_prompts,
        ranks=ranks,
        sequence_parallel=getattr(model, "sequence_parallel", False),
    )
    hidden = unwrapped(model).get_decoder()(
        input_ids=packed.ids,
        position_ids=packed.positions,
        attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # 4-D: passed on as it is, and not used
        segments=packed.segments,
        use_cache=False,
    )[0]  # [1, T/(cp*sp), H]
    return hidden.squeeze(0)[packed.before], packed.wanted


def _padded(
    model: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from a padded forward pass."""
    hidden = unwrapped(model).get_decoder()(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    )[0]  # [B_micro, S, H]
    wanted = response_mask.bool()
    return hidden[:, -wanted.shape[1] - 1 : -1][wanted], wanted


def on_tokens(values: Tensor, where: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Values [T_resp] of response tokens at their places `where` [B_micro, S_resp], those of all ranks; 0 elsewhere."""
    mine = torch.zeros(where.shape, dtype=values.dtype, device=values.device).masked_scatter(where, values)
    return collectives.summed(mine, ranks.group("tokens"))
