"""Keyed randomness: the same key gives the same draws, whatever came before; any other key gives others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.parallel.randomness import SITES, RandomKey, Site, dropout
from megalite.parallel.sequence import SequenceLayout

ROWS, WIDTH = 4, 24
SITE = Site(2, "mlp output")


def draw(seed: int, sample: int, layer: int, name: str, part: int = 0) -> tuple[float, ...]:
    ones = torch.ones(ROWS, 1, WIDTH, dtype=torch.float64)
    rows = (range(part * ROWS, (part + 1) * ROWS),)
    return tuple(dropout(ones, 0.5, RandomKey(seed, (sample,)), Site(layer, name), rows).flatten().tolist())


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
    ones, key = torch.ones(12, len(samples), width, dtype=dtype), RandomKey(1, samples)
    return dropout(ones, 0.3, key, SITE, (range(12),))


@pytest.mark.parametrize("width", [16, 10])  # a row begins where 16 elements do, and elsewhere
def test_parts_of_a_batch_and_of_its_rows_are_those_of_the_whole(width: int) -> None:
    expected = whole(width, (4, 5, 9))
    for number, sample in enumerate((4, 5, 9)):
        assert torch.equal(whole(width, (sample,)), expected[:, number : number + 1])
    for parts in (2, 3, 4):
        part = torch.ones(12 // parts, 3, width, dtype=torch.float64)
        rows = [SequenceLayout.whole(12).part(number, parts) for number in range(parts)]
        found = [dropout(part, 0.3, RandomKey(1, (4, 5, 9)), SITE, own) for own in rows]
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_dropped_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(whole(16, (1, 2), dtype) == 0, whole(16, (1, 2)) == 0)


def test_dropout_scales_what_it_keeps_and_is_the_identity_at_zero() -> None:
    many = torch.ones(1000, 2, 100, dtype=torch.float64, requires_grad=True)
    key = RandomKey(1, (2, 3))
    kept = dropout(many, 0.1, key, SITE, (range(1000),))
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.9, rel=1e-5)]
    assert abs((kept == 0).double().mean().item() - 0.1) < 0.003
    (gradient,) = torch.autograd.grad(kept.sum(), many)
    assert torch.equal(gradient, kept)
    before = torch.get_rng_state()
    assert dropout(many, 0.0, key, SITE, (range(1000),)) is many
    assert torch.equal(torch.get_rng_state(), before)


def test_every_row_of_a_batch_needs_its_sample() -> None:
    with pytest.raises(ValueError, match=r"1 samples and the rows \(range\(0, 4\),\) for a tensor \[4, 2, 24\]"):
        dropout(torch.ones(4, 2, WIDTH), 0.5, RandomKey(1, (2,)), SITE, (range(4),))


def test_a_sequence_that_lies_in_two_runs_drops_what_the_whole_drops() -> None:
    """Use chunks of a zigzag: the second and the last but one of eight, and halves of them."""
    expected, layout = whole(16, (4, 5)), SequenceLayout(12, ((range(2, 4), range(8, 10)),))
    ones, key = torch.ones(4, 2, 16, dtype=torch.float64), RandomKey(1, (4, 5))
    places = layout.places(torch.device("cpu"))
    assert places.tolist() == [2, 3, 8, 9]
    assert torch.equal(dropout(ones, 0.3, key, SITE, layout.runs), expected[places])
    parts = [layout.part(number, 4) for number in range(4)]
    assert parts == [(range(2, 3),), (range(3, 4),), (range(8, 9),), (range(9, 10),)]
    assert [layout.part(number, 2) for number in range(2)] == [(range(2, 4),), (range(8, 10),)]
    assert layout.rows_of(range(1, 3)) == (range(14, 16), range(20, 22), range(26, 28), range(32, 34))
    assert SequenceLayout.whole(12).rows_of(range(1, 3)) == (range(12, 36),)
    assert SequenceLayout(6, ((range(1), range(2, 5)),)).part(1, 2) == (range(3, 5),)


def test_tokens_that_do_not_make_equal_parts_are_an_error() -> None:
    with pytest.raises(ValueError, match="12 tokens of a sample cannot be divided into 5 equal parts"):
        SequenceLayout.whole(12).part(0, 5)
