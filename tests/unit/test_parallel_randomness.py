"""Keyed randomness: the same key gives the same draws, whatever came before; any other key gives others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.parallel.randomness import SITES, RandomKey, Site, dropout

ROWS, WIDTH = 4, 24


def draw(seed: int, sample: int, layer: int, name: str, part: int = 0) -> tuple[float, ...]:
    ones = torch.ones(ROWS, 1, WIDTH, dtype=torch.float64)
    return tuple(dropout(ones, 0.5, RandomKey(seed, (sample,)), Site(layer, name, part)).flatten().tolist())


def test_every_part_of_the_key_counts() -> None:
    keys = [(1, 2, 3, "attention"), (2, 2, 3, "attention"), (1, 3, 3, "attention"), (1, 2, 4, "attention")]
    keys += [(2, 1, 3, "attention"), (1, 2, 0, "embedding"), (1, 2, 3, "mlp output"), (1, 2, 3, "attention output")]
    assert len({draw(*key, part) for key in keys for part in (0, 1)}) == 2 * len(keys)
    assert len(set(SITES.values())) == len(SITES)


@given(seed=st.integers(0, 2**32 - 1), sample=st.integers(0, 2**40), layer=st.integers(0, 1000))
def test_the_same_key_gives_the_same_draws(seed: int, sample: int, layer: int) -> None:
    first = draw(seed, sample, layer, "attention")
    torch.rand(7)
    assert draw(seed, sample, layer, "attention") == first
    assert draw(seed, sample + 1, layer, "attention") != first


def whole(width: int, samples: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return dropout(torch.ones(12, len(samples), width, dtype=dtype), 0.3, RandomKey(1, samples), Site(2, "mlp output"))


@pytest.mark.parametrize("width", [16, 10])  # a row begins where 16 elements do, and elsewhere
def test_parts_of_a_batch_and_of_its_rows_are_those_of_the_whole(width: int) -> None:
    expected = whole(width, (4, 5, 9))
    for number, sample in enumerate((4, 5, 9)):
        assert torch.equal(whole(width, (sample,)), expected[:, number : number + 1])
    for parts in (2, 3, 4):
        part = torch.ones(12 // parts, 3, width, dtype=torch.float64)
        found = [dropout(part, 0.3, RandomKey(1, (4, 5, 9)), Site(2, "mlp output", index)) for index in range(parts)]
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_dropped_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(whole(16, (1, 2), dtype) == 0, whole(16, (1, 2)) == 0)


def test_dropout_scales_what_it_keeps_and_is_the_identity_at_zero() -> None:
    many = torch.ones(1000, 2, 100, dtype=torch.float64, requires_grad=True)
    key = RandomKey(1, (2, 3))
    kept = dropout(many, 0.1, key, Site(0, "embedding"))
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.9, rel=1e-5)]
    assert abs((kept == 0).double().mean().item() - 0.1) < 0.003
    (gradient,) = torch.autograd.grad(kept.sum(), many)
    assert torch.equal(gradient, kept)
    before = torch.get_rng_state()
    assert dropout(many, 0.0, key, Site(0, "embedding")) is many
    assert torch.equal(torch.get_rng_state(), before)


def test_every_row_of_a_batch_needs_its_sample() -> None:
    with pytest.raises(ValueError, match=r"1 samples and the rows \(range\(0, 4\),\) for a tensor \[4, 2, 24\]"):
        dropout(torch.ones(4, 2, WIDTH), 0.5, RandomKey(1, (2,)), Site(0, "embedding"))
