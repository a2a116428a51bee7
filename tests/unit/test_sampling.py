"""The next token: the tokens that each filter keeps; greedy is the limit of all filters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import ModelConfig
from megalite.errors import ConfigurationError
from megalite.inference.generation import check_prompts
from megalite.inference.sampling import Sampling, probabilities, sample

# Distinct logits, so that which tokens are the likeliest is no matter of taste.
LOGITS = st.lists(st.integers(-400, 400), min_size=1, max_size=40, unique=True).map(
    lambda values: torch.tensor(values, dtype=torch.float32) / 20
)
TEMPERATURES = st.floats(0.05, 20.0)


def kept(chances: torch.Tensor) -> set[int]:
    return set(chances.nonzero().flatten().tolist())


@settings(max_examples=40)
@given(LOGITS, TEMPERATURES, st.integers(0, 50), st.floats(0.01, 1.0))
def test_probabilities_sum_to_one_and_keep_the_order(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> None:
    chances = probabilities(logits, Sampling(temperature, top_k, top_p))
    assert math.isclose(chances.sum().item(), 1.0, rel_tol=1e-12)
    assert chances.argmax() == logits.argmax()
    least = min(logits[token] for token in kept(chances))
    assert all(logits[token] <= least for token in range(len(logits)) if token not in kept(chances))


@settings(max_examples=40)
@given(LOGITS, TEMPERATURES)
def test_temperature_divides_the_logits(logits: torch.Tensor, temperature: float) -> None:
    chances = probabilities(logits, Sampling(temperature))
    torch.testing.assert_close(chances, torch.softmax(logits.double() / temperature, 0))


@settings(max_examples=40)
@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_k(logits: torch.Tensor, top_k: int) -> None:
    assert len(kept(probabilities(logits, Sampling(top_k=top_k)))) == min(top_k, len(logits))


@settings(max_examples=40)
@given(LOGITS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(logits: torch.Tensor, top_p: float) -> None:
    every = torch.softmax(logits.double(), 0)
    ordered = sorted(every.tolist(), reverse=True)
    chosen = kept(probabilities(logits, Sampling(top_p=top_p)))
    assert sum(ordered[: len(chosen)]) >= top_p - 1e-12
    assert sum(ordered[: len(chosen) - 1]) < top_p + 1e-12


@settings(max_examples=40)
@given(LOGITS)
def test_greedy_is_temperature_zero_top_one_and_a_tiny_p(logits: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    for sampling in (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-6)):
        assert sample(logits, sampling, generator) == logits.argmax()


def test_top_p_counts_after_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(probabilities(logits, Sampling(top_k=2, top_p=0.55))) == {0}  # 0.4 / 0.7 reaches it
    assert kept(probabilities(logits, Sampling(top_p=0.55))) == {0, 1}


def test_equal_logits_lose_no_token_without_filters() -> None:
    assert probabilities(torch.zeros(5), Sampling()).tolist() == [0.2] * 5
    assert len(kept(probabilities(torch.zeros(5), Sampling(top_k=2)))) == 2
    assert len(kept(probabilities(torch.zeros(5), Sampling(top_p=0.5)))) == 3


@pytest.mark.wide
def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()

    def draws(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [sample(logits, Sampling(), generator) for _ in range(2000)]

    assert draws(1) == draws(1) != draws(2)
    counts = torch.bincount(torch.tensor(draws(1)), minlength=3) / 2000
    assert (counts - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.05  # 4.5 standard deviations


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match="--" + field.replace("_", "-")):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_top_p_stops_where_p_is_reached() -> None:
    """Four tokens of a quarter each: a half are two of them, and any more are three."""
    for top_p, count in ((0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)):
        assert len(kept(probabilities(torch.zeros(4), Sampling(top_p=top_p)))) == count


def test_a_prompt_has_tokens_of_the_models_vocabulary() -> None:
    """An embedding that is split over ranks would give zeros for the others."""
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10, max_position_embeddings=4)
    check_prompts(model, [[0, 9], [9, 0, 9, 0]])
    for prompt in ([9, 10], [-1, 9]):
        tokens = f"prompt 2 of 2 has tokens from {min(prompt)} to {max(prompt)}, but the model's vocabulary is 10"
        with pytest.raises(ConfigurationError, match=tokens):
            check_prompts(model, [[1], prompt])
    with pytest.raises(ConfigurationError, match="has 5 tokens, but the model has learned 4 positions"):
        check_prompts(model, [[1] * 5])
