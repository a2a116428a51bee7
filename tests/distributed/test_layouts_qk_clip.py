"""QK-Clip on layouts that split the network in every way: steps against the oracle and a clip in numpy, and bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.layout_cell import KEY_VALUES, Cell, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, expected, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.distributed.test_layouts_latent import NARROW, WIDE
from tests.harness.close import assert_bits_equal
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
FEW: Row = {"key_values": "few", "family": "llama", "dp": 1}
UNEVEN: Row = {"key_values": "uneven6", "family": "llama", "dp": 1}
BIASES: Row = {"key_values": "gqa", "family": "gpt2", "dp": 1}
LATENT: Row = {**NARROW, "dp": 1}
OF_INPUT: Row = {**WIDE, "dp": 1}
SPARSE: Row = {**LATENT, "indexing": "few"}
PATTERN: Row = {**LATENT, "pattern": "+|-+|-|+", "pp": 2, "schedule": "zb-v", "tied": False}
LAYOUTS: dict[str, Row] = {
    "alone, biases and gates": {**BIASES, "output_gate": True, "documents": True, "micro_batch_size": 2},
    "alone, windows, a cap": {**UNEVEN, "family": "gemma", "documents": True},
    "alone, sinks and experts": {**BIASES, "family": "gpt-oss"},
    "alone, padding": {**FEW, "padding": True, "recompute": "uniform"},
    "alone, latents": {**LATENT, "documents": True, "micro_batch_size": 2},
    "alone, latents, queries of the input": {**OF_INPUT, "output_gate": True, "recompute": "selective"},
    "tp2": {**BIASES, "tp": 2, "documents": True},
    "tp2-sp, a group on two ranks": {**UNEVEN, **SP},
    "tp4, a group on two ranks": {**FEW, "tp": 4, "recompute": "selective"},
    "tp4-sp, one group": {**FEW, "key_values": "mqa", **SP, "tp": 4, "recompute": "block"},
    "tp2-sp, latents": {**LATENT, **SP, "documents": True},
    "tp4, latents, a head a rank": {**OF_INPUT, "tp": 4},
    "cp2": {**BIASES, "cp": 2, "documents": True},
    "cp2, gathered, padding": {**FEW, "cp": 2, "way": "all_gather", "padding": True},
    "cp2, heads exchanged": {**FEW, "key_values": "gqa", "cp": 2, "way": "a2a", "documents": True, "padding": True},
    "cp4, in two ways, windows": {**UNEVEN, "key_values": "mha", "family": "gemma3", "cp": 4, "way": "a2a+p2p"},
    "cp3, dealt": {**FEW, "cp": 3, "chunks": 4, "documents": True},
    "cp2-tp2, a group on two ranks": {**UNEVEN, "cp": 2, "tp": 2, "documents": True},
    "cp2, latents travel": {**LATENT, "cp": 2, "documents": True, "recompute": "uniform"},
    "cp2, latents, heads exchanged": {**OF_INPUT, "cp": 2, "way": "a2a"},
    "pp2": {**BIASES, "pp": 2, "schedule": "1f1b", "recompute": "uniform"},
    "pp2 interleaved": {**FEW, "pp": 2, "schedule": "interleaved-2", "tp": 2},
    "pp2 in a v, latents": PATTERN,
    "pp2 in a v, latents, cp2": {**PATTERN, "cp": 2},
    "dp3": {**UNEVEN, "dp": 3},
    "dp2, shares": {**BIASES, "dp": 2, "samples": 6, "shares": (4, 2)},
    "zero1, overlap": {**UNEVEN, "dp": 2, "zero": 1, **SP, "overlap": "reduce and gather"},
    "zero2": {**BIASES, "dp": 4, "zero": 2, "documents": True},
    "zero3": {**FEW, "dp": 4, "zero": 3, "overlap": "reduce and gather"},
    "zero3, latents, tp2-cp2": {**LATENT, "dp": 2, "zero": 3, "tp": 2, "cp": 2, "documents": True},
    "zero1, two instances": {**FEW, "dp": 4, "zero": 1, "instances": 2},
    "experts": {**LATENT, "dp": 2, "ep": 2, "zero": 1, "family": "deepseek"},
    "depths, pp2": {**BIASES, "family": "llama", "pp": 2, "depths": 2, "schedule": "1f1b"},
    "a depth twice": {**LATENT, "depths": 2, "repeated": True, "documents": True},
    "chosen keys": {**SPARSE, "documents": True, "recompute": "uniform"},
    "chosen keys, cp2-tp2-sp": {**SPARSE, "cp": 2, **SP, "padding": True},
    "state on the host": {**UNEVEN, "dp": 2, "zero": 1, "on_host": 0.6, "clip_grad": 0.0},
    "state on the host, late": {
        **FEW,
        "dp": 2,
        "zero": 3,
        "on_host": 0.5,
        "late_copies": True,
        "arrive_late": True,
        "clip_grad": 0.0,
    },
    "slices on the host": {
        **FEW,
        "dp": 2,
        "zero": 3,
        "on_host": 1.0,
        "slices_on_host": True,
        "late_copies": True,
        "clip_grad": 0.0,
    },
}
OFTEN = [
    "alone, biases and gates",
    "tp4, a group on two ranks",
    "cp2, latents travel",
]
RULES = ("sgd", "adam", "muon")


def clipped_cell(row: Row, **rest: Any) -> Cell:
    """Return a cell whose threshold half of the groups exceed in the first step."""
    cell = make_cell({"cp": 1} | row, **{"steps": 2} | rest)
    return replace(cell, qk_clip=round(float(np.median(group_logits(cell))), 3))


def group_logits(cell: Cell) -> list[float]:
    """Return the largest logit of each group of heads of each layer, in the first step."""
    largest = expected(replace(cell.alone(), steps=1)).largest[0].values()
    groups = None if cell.latents else KEY_VALUES[cell.key_values][1]
    return [float(group.max()) for layer in largest for group in np.split(layer, groups or len(layer))]


def clips_some(cell: Cell) -> bool:
    """Tell whether some groups are above the threshold in the first step, and others below it."""
    return 0 < sum(logit > (cell.qk_clip or 0.0) for logit in group_logits(cell)) < len(group_logits(cell))


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    number = list(LAYOUTS).index(name)
    row = {"clip_grad": 1.0, "dropout": 0.1 * (number % 2), "optimizer": RULES[number % 3], **LAYOUTS[name]}
    cell = clipped_cell(row)
    assert clips_some(cell)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide_except("uniform-cp2, latents travel")
@pytest.mark.parametrize("layout", ["tp4, a group on two ranks", "cp2, latents travel"])
@pytest.mark.parametrize("recompute", ["selective", "uniform"])
def test_recomputed_layers_have_the_same_bits(layout: str, recompute: str, rank_pools: RankPools) -> None:
    cell = clipped_cell(LAYOUTS[layout] | {"recompute": "none"}, dropout=0.1, optimizer="adam")
    plain, again = run(rank_pools, [cell, replace(cell, recompute=recompute)])
    assert_same_bits(again, plain, recompute)


@pytest.mark.parametrize("layout", wide_except(["cp2", "tp2-sp, latents"], ["cp2"]))
def test_logits_that_are_only_recorded_change_no_bit(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout], dropout=0.1, steps=2, optimizer="adam")
    plain, recorded, high = run(
        rank_pools, [cell, replace(cell, logs_logits=True), replace(cell, qk_clip=1e6, logs_logits=True)]
    )
    figure = recorded.figures.pop("largest logit")
    assert high.figures.pop("largest logit") == figure
    for each in (recorded, high):
        assert_same_bits(each, plain, layout)
    assert_as_expected(
        replace(cell, logs_logits=True), replace(recorded, figures={**plain.figures, "largest logit": figure})
    )


def test_a_skipped_step_is_not_clipped(rank_pools: RankPools) -> None:
    cell = clipped_cell(UNEVEN | {"tp": 2}, steps=1, optimizer="adam")
    (skipped,) = run(rank_pools, [replace(cell, infinity_on=1)])
    assert skipped.skipped == [True]
    for name, initial in skipped.initial.items():
        assert_bits_equal(skipped.final[name], initial, name)
    (after,) = run(rank_pools, [replace(cell, infinity_on=1, steps=2)])
    (alone,) = run(rank_pools, [replace(cell, first_step=1)])
    for name, values in alone.final.items():  # the skipped step has left no logits, either
        assert_bits_equal(after.final[name], values, name)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tp2 to zero3", "the same layout", "latents, cp2 to pp2"])
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    rows = {
        "tp2 to zero3": ({**UNEVEN, "tp": 2}, {**UNEVEN, "dp": 2, "zero": 3}),
        "the same layout": ({**UNEVEN, "tp": 2},) * 2,
        "latents, cp2 to pp2": ({**LATENT, "cp": 2, "pattern": "+-+-"}, {**LATENT, "pattern": "+-|+-", "pp": 2}),
    }[name]
    saving, loading = (clipped_cell(row, optimizer="adam", steps=1, samples=4) for row in rows)
    check(rank_pools, [Pair(saving, loading)], tmp_path)
