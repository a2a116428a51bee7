"""Keyed randomness in whole runs: dropout depends on sample, layer and place, not on the rank or the time.

docs/invariants.md: I10.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite_kernels.dropout import kept_reference
from megalite_kernels.dropout_mask import DropoutMask
from tests.distributed.layout_cell import LAYERS, LAYOUT_FACTORS, RECOMPUTE, SEQUENCE, Cell, make_cell
from tests.distributed.layout_expected import Result, assert_as_expected, on_ranks, run
from tests.distributed.layout_run import initialized_chunks, local_micro_batches, make_meshes
from tests.harness.close import assert_bits_equal, assert_gradient_close, assert_number_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

LAYOUTS = [
    {"tp": 1, "dp": 1},
    {"tp": 2, "dp": 1, "micro_batch_size": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True, "zero": 1, "overlap": "reduce and gather"},
    {"tp": 4, "dp": 1, "micro_batch_size": 2, "sequence_parallel": True},
    {"tp": 1, "dp": 2, "zero": 2, "overlap": "reduce"},
    {"tp": 2, "dp": 4, "zero": 3, "instances": 2, "overlap": "reduce and gather"},
    {"tp": 2, "dp": 1, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True},
    {"tp": 1, "dp": 2, "pp": 2, "schedule": "interleaved-2", "zero": 3, "overlap": "reduce and gather"},
]


CASES = [
    pytest.param(
        layout,
        family,
        id=f"tp{layout['tp']}-dp{layout['dp']}-pp{layout.get('pp', 1)}-{family}",
        marks=[pytest.mark.wide] * (turn + number > 0),  # a layout adds to each way only what other tests have
    )
    for turn, layout in enumerate(LAYOUTS)
    for number, family in enumerate(("gpt2", "llama"))
]


@pytest.mark.bits
@pytest.mark.parametrize(("layout", "family"), CASES)
def test_recomputation_changes_no_bit(layout: dict, family: str, rank_pools: RankPools) -> None:
    rest = layout | {"family": family, "dropout": 0.1, "documents": family == "llama"}
    plain, *recomputed = run(rank_pools, [make_cell(rest | {"recompute": way}) for way in RECOMPUTE])
    for way, result in zip(list(RECOMPUTE)[1:], recomputed, strict=True):
        assert result.losses == plain.losses, way
        assert result.gradient_norms == plain.gradient_norms, way
        for name in plain.initial:
            assert_bits_equal(result.gradients[name], plain.gradients[name], f"{way}: gradient of {name}")
            assert_bits_equal(result.final[name], plain.final[name], f"{way}: {name}")


def assert_same_dropout(actual: Result, expected: Result) -> None:
    """Assert that the same elements are dropped; the order of summation may differ."""
    assert_number_close(actual.losses[0], expected.losses[0], "loss")
    for name, gradient in expected.gradients.items():
        assert_gradient_close(actual.gradients[name], gradient, expected.gradient_norms[0], name)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("dp", "size"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.wide) for case in ((2, 1), (4, 1), (4, 2)))]
)
def test_dropout_is_the_same_over_data_parallel_splits(dp: int, size: int, rank_pools: RankPools) -> None:
    cell = Cell(dropout=0.1, samples=8, micro_batch_size=size)
    (alone,) = run(rank_pools, [cell])
    (split,) = run(rank_pools, [replace(cell, dp=dp)])
    assert sorted(split.sample_losses) == sorted(alone.sample_losses) == list(range(0, 8, size))
    for sample, loss in alone.sample_losses.items():
        assert_bits_equal(split.sample_losses[sample], loss, f"loss of the micro-batch that starts at {sample}")
    assert_same_dropout(split, alone)


@pytest.mark.wide_except("2-interleaved-2")
@pytest.mark.bits
@pytest.mark.parametrize("schedule", wide_except(LAYOUT_FACTORS["schedule"], ["zb-h1", "interleaved-2"]))
@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_dropout_is_the_same_over_pipelines(pp: int, schedule: str, rank_pools: RankPools) -> None:
    cell = Cell(dropout=0.1, samples=5, recompute="block")
    (alone,) = run(rank_pools, [cell])
    (split,) = run(rank_pools, [replace(cell, pp=pp, schedule=schedule)])
    assert sorted(split.sample_losses) == sorted(alone.sample_losses) == list(range(5))
    for sample, loss in alone.sample_losses.items():
        assert_bits_equal(split.sample_losses[sample], loss, f"loss of micro-batch {sample}")
    for name, gradient in alone.gradients.items():
        assert_bits_equal(split.gradients[name], gradient, f"gradient of {name}")


SPLITS = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4, "micro_batch_size": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 4},
    "tp2-dp2": {"tp": 2, "dp": 2, "micro_batch_size": 2},
    "tp4-sp": {"tp": 4, "sequence_parallel": True},
    "tp2-sp-pp2": {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1", "recompute": "selective"},
}
FAMILY_OF = {"tp2": "gemma", "tp2-sp": "gpt2", "tp2-dp2": "gpt2", "tp2-sp-pp2": "gemma"}
"""Family of each split that `make test` runs."""


@pytest.mark.wide_except("tp2-sp-pp2-gemma", "tp2-dp2-gpt2")
@pytest.mark.parametrize(
    ("split", "family"),
    [
        pytest.param(split, family, marks=[pytest.mark.wide] * (family != FAMILY_OF.get(split)))
        for split in SPLITS
        for family in ("gpt2", "gemma")
    ],
)
def test_dropout_is_the_oracles_however_samples_are_split(split: str, family: str, rank_pools: RankPools) -> None:
    """The second step, with other samples, is compared too."""
    cell = make_cell({"dp": 1} | SPLITS[split], family=family, dropout=0.1, attention_dropout=0.3, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


def draws(cell: Cell) -> list[DropoutMask]:
    """Return the masks of each random site, over all micro-batches."""
    (chunk,) = initialized_chunks(make_meshes([cell])[cell.split], cell)
    seen: list[DropoutMask] = []

    def noted(shape: torch.Size, dimension: int, mask: DropoutMask) -> Tensor:
        seen.append(mask)
        return kept_reference(shape, dimension, mask)

    with mock.patch("megalite_kernels.dropout.kept_reference", noted), torch.no_grad():
        for micro_batch in local_micro_batches(cell, 0, 0):
            chunk({}, micro_batch)
        chunk.eval()
        chunk({}, micro_batch)
    return seen


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_no_two_sites_draw_the_same(tp: int, sequence_parallel: bool, family: str, rank_pools: RankPools) -> None:
    """Two layers or samples do not draw the same either.

    Ranks that share a tensor draw their parts of it; other ranks draw the same values. Evaluation draws nothing.
    """
    cell = Cell(
        family=family, tp=tp, sequence_parallel=sequence_parallel, dropout=0.1, attention_dropout=0.2, samples=4
    )
    ranks = on_ranks(rank_pools, tp, draws, cell)
    for seen in ranks:
        assert [mask.probability for mask in seen] == [0.1, *[0.2, 0.1, 0.1] * LAYERS] * 4  # first the embedding's
        assert len({(mask.layer, mask.site, mask.samples) for mask in seen}) == len(seen)
    for parts in zip(*ranks, strict=True):
        rows = [row for mask in parts for run in mask.rows for row in run]
        whole = list(range(4 * SEQUENCE if parts[0].probability == 0.2 else SEQUENCE))
        split = sequence_parallel or parts[0].probability == 0.2
        assert rows == (whole if split else whole * tp)


@pytest.mark.wide
def test_dropout_acts_in_these_tests(rank_pools: RankPools) -> None:
    """Hidden and attention dropout each change every micro-batch's loss."""
    plain = Cell(samples=8)
    off, hidden, attention = run(
        rank_pools, [plain, replace(plain, dropout=0.1, attention_dropout=0.0), replace(plain, attention_dropout=0.1)]
    )
    for sample, loss in off.sample_losses.items():
        assert len({loss.item(), hidden.sample_losses[sample].item(), attention.sample_losses[sample].item()}) == 3
