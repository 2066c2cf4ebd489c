"""Sampling against hand-made numbers and a second, slow implementation."""

import math

import pytest
import torch

from flowledger.run import sampling


def slow_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by plain Python: temperature, then top-k, then top-p, then renormalised."""
    highest = max(logits)
    weight = [math.exp((value - highest) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -weight[token])
    order = order[:top_k] if top_k else order
    total, kept, reached = sum(weight[token] for token in order), [], 0.0
    for token in order:
        if reached >= top_p:
            break
        kept.append(token)
        reached += weight[token] / total
    whole = sum(weight[token] for token in kept)
    return [weight[token] / whole if token in kept else 0.0 for token in range(len(logits))]


def sweep(logits: torch.Tensor, points: int, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs at evenly spaced uniform numbers: a whole distribution without any chance."""
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    return sampling.sample(logits=logits.expand(points, -1), uniform=uniform, **settings)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.8), (1, 1.0), (0, 1e-9), (99, 1.0)])
def test_every_token_is_drawn_as_often_as_a_second_implementation_says(temperature, top_k, top_p):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)) * 2
    expected = torch.tensor(slow_distribution(logits[0].tolist(), temperature, top_k, top_p), dtype=torch.float64)
    points = 4000
    tokens, log_prob = sweep(logits, points, temperature=temperature, top_k=top_k, top_p=top_p)
    share = torch.bincount(tokens, minlength=12) / points
    # Evenly spaced numbers hit an interval of length p between p*points-1 and p*points+1 times.
    assert (share - expected).abs().max() <= 1.01 / points
    torch.testing.assert_close(log_prob.double(), expected[tokens].log(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.6), (7, 0.5)])
def test_the_log_probs_of_all_that_can_be_drawn_sum_to_one(top_k, top_p):
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(5))
    tokens, log_prob = sweep(logits, 20_000, temperature=0.9, top_k=top_k, top_p=top_p)
    by_token = dict(zip(tokens.tolist(), log_prob.double().tolist(), strict=True))
    assert sum(math.exp(value) for value in by_token.values()) == pytest.approx(1.0, abs=1e-6)
    assert not top_k or len(by_token) <= top_k


def test_probabilities_one_half_one_quarter_one_quarter_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.99], dtype=torch.float64)
    tokens, log_prob = sampling.sample(
        logits=logits.expand(6, -1), uniform=uniform, temperature=1.0, top_k=0, top_p=1.0
    )
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_very_ends():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    below_one = math.nextafter(1.0, 0.0)
    for uniform, token in ((0.0, 1), (below_one, 3)):
        drawn, log_prob = sampling.sample(
            logits=logits, uniform=torch.tensor([uniform], dtype=torch.float64), temperature=1.0, top_k=0, top_p=1.0
        )
        assert drawn.tolist() == [token]
        assert log_prob.isfinite().all()


def test_a_rare_token_of_a_large_vocabulary_keeps_its_probability():
    """Behind 50 000 tokens that hold nearly everything, float32 sums would lose a token of probability 1e-9."""
    logits = torch.zeros(1, 50_000)
    logits[0, -1] = math.log(50_000 * 1e-9)
    edge = 1 - 1e-9
    for uniform, token in ((edge - 1e-10, 49_998), (edge + 1e-10, 49_999)):
        drawn, _ = sampling.sample(
            logits=logits, uniform=torch.tensor([uniform], dtype=torch.float64), temperature=1.0, top_k=0, top_p=1.0
        )
        assert drawn.tolist() == [token]


def test_a_tiny_temperature_takes_the_most_probable_token_and_does_not_overflow():
    logits = torch.tensor([[1.0, 300.0, 299.0]])
    tokens, log_prob = sweep(logits, 50, temperature=1e-30, top_k=0, top_p=1.0)
    assert set(tokens.tolist()) == {1}
    assert log_prob.abs().max() == 0


def test_nan_logits_give_a_nan_log_prob_instead_of_a_token_out_of_range():
    logits = torch.full((1, 6), torch.nan)
    tokens, log_prob = sampling.sample(
        logits=logits, uniform=torch.tensor([0.5], dtype=torch.float64), temperature=1.0, top_k=0, top_p=1.0
    )
    assert 0 <= int(tokens[0]) < 6
    assert log_prob.isnan().all()


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 0.9}
    whole = sampling.sample(logits=logits, uniform=uniform, **settings)
    monkeypatch.setattr(sampling, "CHUNK_LOGITS", 22)
    parts = sampling.sample(logits=logits, uniform=uniform, **settings)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_streams_depend_on_the_seed_and_on_nothing_else():
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sampling.streams(samples=3, positions=4, generator=generator, device=torch.device("cpu"))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert draw(1).shape == (3, 4)
