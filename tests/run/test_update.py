"""The update: the split into micro-batches never changes the gradient, and what is not finite is named."""

import pytest
import torch

from flowledger.config.algorithm import AGGREGATIONS, Algorithm
from flowledger.config.schema import Model, Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import finite, forward, loss, models, update
from flowledger.run.algorithms.aggregation import Totals
from flowledger.run.batching import MiniBatch
from flowledger.run.parallel import sharded
from flowledger.run.parallel.ranks import ALONE
from tests.run.worlds import config

TINY = Model(tiny=Tiny(hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48))


@pytest.fixture(scope="module")
def policy() -> models.Policy:
    made = models.load_policy(TINY, seed=0)
    forward.use_segments(made.model)
    return made


def columns(vocabulary: int) -> dict[str, torch.Tensor]:
    """Six samples with responses of 1..6 tokens."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    response = (torch.arange(6) < lengths[:, None]).long()
    attention = torch.cat([torch.ones(6, 3, dtype=torch.long), response], 1)
    return {
        "full_sequence": torch.randint(0, vocabulary, (6, 9), generator=random),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "loss_mask": response,
        "old_log_prob": -5 + torch.randn(6, 6, generator=random),
        "ref_log_prob": -5 + torch.randn(6, 6, generator=random),
        "advantages": torch.randn(6, 1, generator=random) * response,
        "sample_id": torch.arange(6),
    }


def gradient(
    policy: models.Policy, aggregation: str, micro_batches: tuple[tuple[int, ...], ...]
) -> dict[str, torch.Tensor]:
    settings = config(
        algorithm={"loss_aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}, ref={"path": "start"}
    )
    found: dict[str, torch.Tensor] = {}

    class Still(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            found.update({n: p.grad.clone() for n, p in policy.model.named_parameters()})

    update.mini_batch(
        model=policy.model, optimizer=Still(policy.model.parameters(), lr=0.0), config=settings.model_copy(
            update={"actor": settings.actor.model_copy(update={"grad_clip": 1e9})}
        ), batch=MiniBatch(samples=tuple(range(6)), micro_batches=micro_batches, sequences=6), columns=columns(policy.sizes["V"]),
        sums=update.Sums(), kl_coef=0.1,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [((0, 1, 2), (3, 4, 5)), ((5,), (0, 4), (1, 2, 3)), tuple((i,) for i in range(6))])
def test_the_split_into_micro_batches_never_changes_the_gradient(policy, aggregation: str, split) -> None:
    whole = gradient(policy, aggregation, ((0, 1, 2, 3, 4, 5),))
    parts = gradient(policy, aggregation, split)
    for name, want in whole.items():
        assert float((parts[name] - want).abs().max()) <= 1e-5 * float(want.abs().max()), name


def test_a_normaliser_of_the_micro_batch_would_be_caught_by_that_test(policy) -> None:
    whole = gradient(policy, "token-mean", ((0, 1, 2, 3, 4, 5),))
    half = gradient(policy, "token-mean", ((0, 1, 2),))
    assert any(float((half[name] - want).abs().max()) > 1e-2 * float(want.abs().max()) for name, want in whole.items())


@pytest.mark.parametrize("name", ["old_log_prob", "advantages", "ref_log_prob"])
def test_the_first_tensor_that_is_not_finite_is_named_with_its_sample(policy, name: str) -> None:
    tensors = columns(policy.sizes["V"])
    tensors[name] = tensors[name].clone()
    tensors[name][4, 2] = float("nan")
    with pytest.raises(BadInput, match=f"{name} of sample 4, response token 2 is nan"):
        update.mini_batch(
            model=policy.model, optimizer=torch.optim.SGD(policy.model.parameters(), lr=0.0),
            config=config(ref={"path": "start"}, algorithm={"kl_coef": 0.1}),
            batch=MiniBatch(samples=tuple(range(6)), micro_batches=((0, 1, 2, 3, 4, 5),), sequences=6), columns=tensors, sums=update.Sums(),
            kl_coef=0.1,
        )  # fmt: skip
    policy.model.zero_grad()


def test_loss_shares_of_tokens_add_up_to_the_policy_loss(policy) -> None:
    tensors = columns(policy.sizes["V"])
    totals = Totals(tokens=21, sequences=6, rows=6, horizon=8)
    new = torch.full((6, 6), -5.0, requires_grad=True)
    made = loss.micro_batch_loss(
        algorithm=Algorithm(), kl_coef=0.0, totals=totals, rollout_is_weights=None, sample_id=tensors["sample_id"], new_log_prob=new, entropy=torch.zeros(6, 6),
        old_log_prob=tensors["old_log_prob"], ref_log_prob=None, advantages=tensors["advantages"], loss_mask=tensors["loss_mask"],
    )  # fmt: skip
    assert float(made.loss_share.sum()) == pytest.approx(float(made.policy_loss), rel=1e-6)
    assert float(made.loss_share[tensors["loss_mask"] == 0].abs().max()) == 0.0


def test_a_log_prob_of_the_update_itself_that_is_not_finite_is_named_too(policy) -> None:
    tensors = columns(policy.sizes["V"])
    new = torch.full((6, 6), -5.0)
    new[3, 1] = float("nan")
    with pytest.raises(BadInput, match="new_log_prob of sample 3, response token 1 is nan"):
        loss.micro_batch_loss(
            algorithm=Algorithm(), kl_coef=0.0, totals=Totals(tokens=21, sequences=6, rows=6, horizon=8),
            rollout_is_weights=None, sample_id=tensors["sample_id"],
            new_log_prob=new.requires_grad_(), entropy=torch.zeros(6, 6), old_log_prob=tensors["old_log_prob"],
            ref_log_prob=None, advantages=tensors["advantages"], loss_mask=tensors["loss_mask"],
        )  # fmt: skip


def chain(*scales: float) -> torch.nn.Sequential:
    """Layers of one weight each, y = w_n ... w_1 x; gradients are products that can be had by hand."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in scales))
    for layer, scale in zip(model, scales, strict=True):
        layer.weight.data.fill_(scale)
    return model


def test_a_gradient_that_is_not_finite_is_named_where_backward_met_it_first_and_nothing_moves() -> None:
    """A NaN comes in behind layer 1: layer 2 has a good gradient, 1 and 0 have none, and clipping must not spread it."""
    model = chain(1.0, 1.0, 1.0)
    model[1].register_full_backward_hook(lambda *_: (torch.full((1, 1), float("nan")),))
    model[1].weight.register_hook(lambda grad: grad * float("nan"))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(finite.NotFinite, match=r"gradients of 2 parameters are not finite; .* first in 1 \(weight\)"):
        update.optimizer_step(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), grad_clip=1.0)
    assert [layer.weight.item() for layer in model] == [1.0, 1.0, 1.0]
    assert model[2].weight.grad.item() == 1.0


def test_a_norm_that_overflows_although_every_gradient_is_finite_is_called_that() -> None:
    model = chain(1.0, 1e30)
    model(torch.ones(1, 1)).sum().backward()  # 1e30 at layer 0: its square is beyond float32
    with pytest.raises(finite.NotFinite, match=r"norm overflows float32; the largest is 1e\+30 in 0\.weight"):
        update.optimizer_step(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), grad_clip=1.0)


def test_the_norm_of_half_precision_gradients_is_not_rounded_to_half_precision() -> None:
    random = torch.Generator().manual_seed(0)
    gradients = [torch.randn(97, 3, generator=random).bfloat16() for _ in range(5)]
    truth = float(torch.cat([grad.double().flatten() for grad in gradients]).norm())
    assert float(sharded.gradient_norm(gradients, ALONE)) == pytest.approx(truth, rel=1e-6)
    assert float(sharded.gradient_norm([], ALONE)) == 0


def test_clipping_is_that_of_torch() -> None:
    mine, theirs = chain(2.0, 3.0), chain(2.0, 3.0)
    for model in (mine, theirs):
        model(torch.ones(1, 1)).sum().backward()
    norm = update.optimizer_step(model=mine, optimizer=torch.optim.SGD(mine.parameters(), lr=1.0), grad_clip=0.5)
    assert float(norm) == pytest.approx(13**0.5)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.item() == (other - other.grad).item()


def test_weights_that_are_not_finite_are_named_before_what_comes_of_them() -> None:
    model = chain(1.0, float("nan"), float("nan"))
    way = r"critic, mini-batch of samples 8 to 11: the weights are not finite .* 2 are not, the first is 1\.weight"
    with (
        pytest.raises(BadInput, match=rf"{way} \(then the loss is nan\); lower critic\.lr or check the rewards"),
        finite.traced(who="critic", rate="critic.lr", model=model, sample_id=torch.arange(8, 12)),
    ):
        raise finite.NotFinite("the loss is nan")


def test_what_is_no_number_is_left_as_it_is() -> None:
    with (
        pytest.raises(BadInput, match=r"^another$"),
        finite.traced(who="policy", rate="optim.lr", model=chain(float("nan")), sample_id=torch.arange(2)),
    ):
        raise BadInput("another")
