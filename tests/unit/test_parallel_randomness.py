"""Keyed randomness: the same key gives the same draws, whatever came before; any other key gives others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.randomness import RandomKey, Site, dropout

ONES = torch.ones(64, dtype=torch.float64)


def draw(seed: int, sample: int, layer: int, name: str, shard: int) -> tuple[float, ...]:
    return tuple(dropout(ONES, 0.5, RandomKey(seed, sample), Site(layer, name, shard)).tolist())


def test_every_part_of_the_key_counts() -> None:
    keys = [(1, 2, 3, "a", 0), (2, 2, 3, "a", 0), (1, 3, 3, "a", 0), (1, 2, 4, "a", 0), (1, 2, 3, "b", 0)]
    keys += [(1, 2, 3, "a", 1), (2, 1, 3, "a", 0), (1, 2, -1, "a", 0), (1, 2, 3, "attention output", 0)]
    assert len({draw(*key) for key in keys}) == len(keys)


@given(seed=st.integers(0, 2**32 - 1), sample=st.integers(0, 2**40), layer=st.integers(-1, 1000))
def test_the_same_key_gives_the_same_draws(seed: int, sample: int, layer: int) -> None:
    first = draw(seed, sample, layer, "attention", 0)
    torch.rand(7)
    assert draw(seed, sample, layer, "attention", 0) == first
    assert draw(seed, sample + 1, layer, "attention", 0) != first


def test_dropout_scales_what_it_keeps_and_is_the_identity_at_zero() -> None:
    many = torch.ones(100_000)
    kept = dropout(many, 0.1, RandomKey(1, 2), Site(0, "site"))
    assert set(kept.unique().tolist()) == {0.0, (many / 0.9)[0].item()}
    assert abs((kept == 0).double().mean().item() - 0.1) < 0.005
    before = torch.get_rng_state()
    assert dropout(many, 0.0, RandomKey(1, 2), Site(0, "site")) is many
    assert torch.equal(torch.get_rng_state(), before)
