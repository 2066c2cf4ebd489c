"""The critic: values of states before tokens, whatever the batch, and an update that no split changes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowledger.config.schema import AGGREGATIONS, RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import critic as critics
from flowledger.run import forward, models
from flowledger.run.batching import Batches, MiniBatch
from flowledger.run.critic import Critic
from flowledger.run.value_model import token_values
from tests.run import worlds

LENGTHS = (1, 2, 3, 4, 5, 6)


def config(**changes: Any) -> RunConfig:
    asked = {"critic": {"path": "start", "lr": 1e-3}, "algorithm": {"advantage": "gae"}}
    merged = {name: {**asked.get(name, {}), **changes.get(name, {})} for name in {*asked, *changes}}
    return worlds.config(**merged)


@pytest.fixture(scope="module")
def policy() -> models.Policy:
    made = models.load_policy(config().model, seed=0)
    forward.use_segments(made.model)
    return made


@pytest.fixture
def critic(policy: models.Policy) -> Critic:
    return critics.load_critic(config(), policy)


def columns(**more: Tensor) -> dict[str, Tensor]:
    """Six samples: prompts of 1..3 tokens padded on the left, responses of 1..6 padded on the right."""
    random = torch.Generator().manual_seed(3)
    response = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
    prompt = (torch.arange(3) >= torch.tensor([0, 1, 2, 0, 1, 2])[:, None]).long()
    attention = torch.cat([prompt, response], 1)
    made = {
        "full_sequence": torch.randint(0, 250, (6, 9), generator=random),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "sample_id": torch.arange(6),
    }
    return made | more


def training(**more: Tensor) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    rows = columns()
    made = {
        "loss_mask": rows["response_mask"],
        "values": torch.randn(6, 6, generator=random),
        "returns": torch.randn(6, 6, generator=random),
    }
    return rows | made | more


def split(*micro_batches: tuple[int, ...]) -> Batches:
    samples = tuple(sorted(sample for part in micro_batches for sample in part))
    return Batches(mini_batches=(MiniBatch(samples=samples, micro_batches=micro_batches, sequences=len(samples)),))


WHOLE = split(tuple(range(6)))


def by_hand(critic: Critic, rows: dict[str, Tensor]) -> Tensor:
    """Values one sample at a time, without padding, from the modules themselves."""
    made = torch.zeros(rows["response_mask"].shape)
    for row, mask in enumerate(rows["attention_mask"].bool()):
        ids = rows["full_sequence"][row][mask][None]
        hidden = critic.model.backbone(input_ids=ids, use_cache=False)[0]
        every = critic.model.head(hidden)[0, :, 0]  # the value after each token
        length = int(rows["response_mask"][row].sum())
        made[row, :length] = every[-length - 1 : -1]
    return made


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("parts", [(tuple(range(6)),), ((0, 5), (1, 2, 3), (4,))], ids=["whole", "in parts"])
def test_a_value_is_that_of_the_state_before_its_token(
    critic: Critic, packed: bool, parts: tuple[tuple[int, ...], ...]
) -> None:
    made = critics.values(
        critic=critic, config=config(actor={"packed": packed}), batches=split(*parts), columns=columns()
    )
    assert torch.allclose(made, by_hand(critic, columns()), atol=1e-5)
    assert made.dtype == torch.float32 and not made.requires_grad


def test_values_are_zero_where_no_response_token_is_and_for_samples_that_were_dropped(critic: Critic) -> None:
    rows = columns()
    rows["response_mask"] = rows["response_mask"] * torch.tensor([1, 1, 0, 1, 1, 1])  # an environment wrote the third
    made = critics.values(critic=critic, config=config(), batches=split((0, 1, 3), (4, 5)), columns=rows)
    assert (made[rows["response_mask"] == 0] == 0).all()
    assert (made[2] == 0).all() and (made[3, [0, 1, 3]] != 0).all()
    around = critics.values(critic=critic, config=config(), batches=WHOLE, columns=columns())
    assert torch.allclose(made[3, [0, 1, 3]], around[3, [0, 1, 3]], atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 5), token=st.integers(0, 249), packed=st.booleans())
def test_a_value_depends_on_no_token_from_its_own_on(policy: models.Policy, at: int, token: int, packed: bool) -> None:
    made = critics.load_critic(config(), policy)
    rows, setting = columns(), config(actor={"packed": packed})
    before = critics.values(critic=made, config=setting, batches=WHOLE, columns=rows)
    rows["full_sequence"] = rows["full_sequence"].clone()
    rows["full_sequence"][:, 3 + at] = token
    after = critics.values(critic=made, config=setting, batches=WHOLE, columns=rows)
    assert torch.allclose(before[:, : at + 1], after[:, : at + 1], atol=1e-6)


def gradient(critic: Critic, setting: RunConfig, batches: Batches, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of one mini-batch as the optimizer would meet it."""
    found: dict[str, Tensor] = {}

    class Still(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            found.update({n: p.grad.clone() for n, p in critic.model.named_parameters() if p.grad is not None})

    still = Critic(model=critic.model, optimizer=Still(critic.model.parameters(), lr=0.0), bytes_per_token=1)
    critics.update(critic=still, config=setting, batches=batches, columns=rows)
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_no_split_into_micro_batches_changes_the_gradient(critic: Critic, aggregation: str, packed: bool) -> None:
    changed = {"algorithm": {"loss_aggregation": aggregation}, "critic": {"grad_clip": 0}}
    whole = gradient(critic, config(**changed), WHOLE, training())
    parts = gradient(critic, config(**changed, actor={"packed": packed}), split((0, 5), (1, 2, 3), (4,)), training())
    assert set(whole) == {name for name, _ in critic.model.named_parameters()}
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], atol=1e-6), name


def test_the_loss_and_its_gradient_are_those_of_the_clipped_squared_error(critic: Critic) -> None:
    """½ mean over tokens of max((V - R)², (clip(V, V_old ± c) - R)²), written out token by token."""
    rows, setting = training(), config(critic={"clip_value": 0.3, "grad_clip": 0})
    new = by_hand(critic, rows)
    losses, clipped = [], 0
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            v, old, r = new[row, token], rows["values"][row, token], rows["returns"][row, token]
            held = torch.minimum(torch.maximum(v, old - 0.3), old + 0.3)
            losses.append(torch.maximum((v - r) ** 2, (held - r) ** 2) / 2)
            clipped += bool((held - r) ** 2 > (v - r) ** 2)
    loss = torch.stack(losses).mean()
    loss.backward()
    truth = {name: p.grad.clone() for name, p in critic.model.named_parameters() if p.grad is not None}
    critic.optimizer.zero_grad()
    norm = math.sqrt(sum(float(g.square().sum()) for g in truth.values()))
    made = critics.update(critic=critic, config=setting, batches=split((0, 3), (1, 2, 4, 5)), columns=rows)
    assert float(made.value_loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(made.grad_norm) == pytest.approx(norm, rel=1e-4)
    assert made.metrics["value_clip_ratio"] == pytest.approx(clipped / sum(LENGTHS)) and 0 < clipped < sum(LENGTHS)


def test_masked_tokens_teach_nothing_whatever_stands_there(critic: Critic) -> None:
    rows = training()
    kept = rows["response_mask"] * torch.tensor([1, 0, 1, 1, 0, 1])
    clean = gradient(critic, config(), WHOLE, rows | {"loss_mask": kept})
    dirt = torch.where(kept.bool(), rows["returns"], torch.nan)
    dirty = gradient(critic, config(), WHOLE, rows | {"loss_mask": kept, "returns": dirt, "values": torch.where(kept.bool(), rows["values"], torch.inf)})  # fmt: skip
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name


def test_a_warmed_up_critic_knows_its_returns(critic: Critic) -> None:
    rows = training(values=torch.zeros(6, 6), returns=torch.arange(6.0)[:, None].expand(6, 6) / 5)
    setting = config(critic={"lr": 1e-2, "clip_value": 100.0, "epochs": 40})
    critic = Critic(model=critic.model, optimizer=torch.optim.AdamW(critic.model.parameters(), lr=1e-2), bytes_per_token=1)  # fmt: skip
    made = critics.update(critic=critic, config=setting, batches=split((0, 1, 2), (3, 4, 5)), columns=rows)
    assert len(made.value_loss) == len(made.grad_norm) == 40
    assert float(made.value_loss[-1]) < 0.05 * float(made.value_loss[0])


@pytest.mark.parametrize("name", ["values", "returns"])
def test_what_is_not_finite_is_named_with_its_sample_and_token(critic: Critic, name: str) -> None:
    rows = training()
    rows[name] = rows[name].clone()
    rows[name][4, 2] = math.nan
    with pytest.raises(BadInput, match=rf"{name} of sample 4, response token 2 is nan.*critic\.lr"):
        critics.update(critic=critic, config=config(), batches=split((0, 1), (2, 3, 4, 5)), columns=rows)


def test_batches_are_the_policys_unless_the_critic_has_its_own(critic: Critic, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[int]]] = []
    for name in ("values_micro_batch", "critic_micro_batch"):
        original = getattr(critics, name)

        def watched(*, original: Any = original, name: str = name, **rows: Any) -> Any:
            seen.append((name, rows["sample_id"].tolist()))
            return original(**rows)

        monkeypatch.setattr(critics, name, watched)
    given = split((0, 1, 2), (4, 5))  # sample 3 was dropped
    setting = config(
        critic={"mini_batch_prompts": 1, "micro_batch": {"samples": 2}, "values_micro_batch": {"samples": 4}}
    )
    for one in (config(), setting):
        critics.values(critic=critic, config=one, batches=given, columns=columns())
        made = critics.update(critic=critic, config=one, batches=given, columns=training())
        assert len(made.value_loss) == (1 if one is not setting else 2)
    usual, own = seen[:4], seen[4:]
    assert usual == [
        (name, part) for name in ("values_micro_batch", "critic_micro_batch") for part in ([0, 1, 2], [4, 5])
    ]
    assert own == [
        ("values_micro_batch", [0, 1, 2, 4]), ("values_micro_batch", [5]),
        ("critic_micro_batch", [0, 1]), ("critic_micro_batch", [2]), ("critic_micro_batch", [4, 5]),
    ]  # fmt: skip


def test_the_gradient_is_clipped_where_asked_for(critic: Critic) -> None:
    whole = gradient(critic, config(critic={"grad_clip": 0}), WHOLE, training())
    clipped = gradient(critic, config(critic={"grad_clip": 1e-3}), WHOLE, training())
    assert math.sqrt(sum(float(g.square().sum()) for g in whole.values())) > 1e-3
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(1e-3, rel=1e-3)


def test_the_critic_is_a_copy_of_its_own_and_the_same_for_the_same_seed(policy: models.Policy, critic: Critic) -> None:
    again, other = (critics.load_critic(config().model_copy(update={"seed": seed}), policy) for seed in (0, 1))
    assert torch.equal(again.model.head.weight, critic.model.head.weight)
    assert not torch.equal(other.model.head.weight, critic.model.head.weight)
    mine = {tensor.data_ptr() for tensor in critic.model.parameters()}
    assert not mine & {tensor.data_ptr() for tensor in policy.model.parameters()}
    decoder = policy.model.get_decoder()  # type: ignore[operator]
    for one, theirs in zip(critic.model.backbone.parameters(), decoder.parameters(), strict=True):
        assert torch.equal(one, theirs)


def test_with_lora_on_the_policy_the_critic_is_the_base_model_and_trains_in_full() -> None:
    setting = config(model={"lora": {"rank": 2, "alpha": 4, "target_modules": ["q_proj"]}})
    policy = models.load_policy(setting.model, seed=0)
    forward.use_segments(policy.model)
    plain = models.load_policy(config().model, seed=0).model.get_decoder()  # type: ignore[operator]
    made = critics.load_critic(setting, policy).model
    assert [n for n, _ in made.backbone.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(made.backbone.parameters(), plain.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in made.parameters())
    assert any(name.endswith("lora_A.default.weight") for name, _ in policy.model.named_parameters())


def test_recomputing_activations_changes_no_gradient(policy: models.Policy, critic: Critic) -> None:
    saving = config(actor={"activation_checkpointing": True})
    plain = gradient(critic, config(), WHOLE, training())
    again = gradient(critics.load_critic(saving, policy), saving, WHOLE, training())
    assert plain.keys() == again.keys()
    assert all(torch.allclose(plain[name], again[name], atol=1e-6) for name in plain)


def classifier(folder: Path, **changes: Any) -> Path:
    settings = {
        "vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 24, "num_labels": 1, "pad_token_id": 0, "classifier_dropout": 0.5,
    } | changes  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForTokenClassification(transformers.LlamaConfig(**settings)).save_pretrained(folder)
    return folder


def test_a_directory_gives_the_values_of_its_token_classifier(policy: models.Policy, tmp_path: Path) -> None:
    path = classifier(tmp_path / "critic")
    made = critics.load_critic(config(critic={"path": str(path)}), policy)
    own = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    rows = columns()
    got = critics.values(critic=made, config=config(), batches=WHOLE, columns=rows)
    inputs = {"attention_mask": rows["attention_mask"], "position_ids": rows["position_ids"]}
    truth = own(input_ids=rows["full_sequence"], **inputs).logits[:, 2:-1, 0] * rows["response_mask"]
    assert torch.allclose(got, truth, atol=1e-5)


def test_a_model_that_cannot_be_a_critic_is_refused(policy: models.Policy, tmp_path: Path) -> None:
    few = classifier(tmp_path / "few", vocab_size=100)
    two = classifier(tmp_path / "two", num_labels=2)
    bert = transformers.BertConfig(
        vocab_size=264, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=1
    )
    transformers.BertForTokenClassification(bert).save_pretrained(tmp_path / "bert")
    (tmp_path / "file").write_text("no model")
    said = {
        "/nowhere": "is not there; give start, tiny or a directory", str(tmp_path / "file"): "is a file; give start,", str(few): "knows 100 tokens and the policy 264", str(two): "cannot be read",
        str(tmp_path / "bert"): "depend on later tokens",
    }  # fmt: skip
    for path, why in said.items():
        with pytest.raises(BadInput, match=why):
            critics.load_critic(config(critic={"path": path}), policy)


def test_values_of_a_narrow_model_are_float32() -> None:
    setting = config(model={"dtype": "bfloat16"})
    policy = models.load_policy(setting.model, seed=0)
    forward.use_segments(policy.model)
    made = critics.load_critic(setting, policy)
    rows = {name: tensor for name, tensor in columns().items() if name != "sample_id"}
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.bfloat16}
    assert token_values(model=made.model, packed=True, **rows).dtype == torch.float32
