"""Codes and scales of linear layers are the same on any split, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite_kernels.tile_scales import Tiles
from tests.distributed.layout_expected import on_ranks
from tests.distributed.rounded_products_run import operands
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

RECIPES = ("tensorwise", "blockwise", "mxfp8", "nvfp4")
SPLITS = {"tp2": (2, False, 1), "tp2-sp": (2, True, 1), "cp2": (2, False, 2), "cp2-tp2-sp": (4, True, 2)}
CASES = [f"{recipe}, {split}" for recipe in RECIPES for split in SPLITS]


def part(tiles: Tiles, dimension: int, number: int, parts: int) -> Tiles:
    """Return rows (0) or columns (1) of tiles, and their scales."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.chunk(parts, dimension)[number] if tensor.dim() else tensor

    outer = tiles.outer if tiles.outer is None or dimension == 1 else of(tiles.outer)
    return Tiles(of(tiles.codes), of(tiles.scales), outer)


@pytest.mark.bits
@pytest.mark.parametrize("case", wide_except(CASES, ["tensorwise, cp2-tp2-sp"]))
def test_codes_are_those_of_one_process(case: str, rank_pools: RankPools) -> None:
    """A rank has whole rows, or its columns of them, with the scales of one process; of its tokens, with cp."""
    recipe, _, split = case.partition(", ")
    world, sequence_parallel, cp = SPLITS[split]
    (whole,) = on_ranks(rank_pools, 1, operands, recipe, False)
    tp = world // cp
    for rank, found in enumerate(on_ranks(rank_pools, world, operands, recipe, sequence_parallel, cp)):
        place, tokens = rank % tp, rank // tp
        for number, ((a, b), (all_a, all_b)) in enumerate(zip(found, whole, strict=True)):
            all_a = part(all_a, 0, tokens, cp)
            splits_inner = number in (1, 3)  # the forward of the second layer, and the backward of the first
            assert_equal(a, part(all_a, 1, place, tp) if splits_inner else all_a)
            assert_equal(b, part(all_b, int(splits_inner), place, tp))


def assert_equal(found: Tiles, expected: Tiles) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
