"""Loss by source: sums and counts of each source on any layout, beside a loop over the samples of the oracle.

docs/invariants.md: I11.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.layout_cell import Cell, batch, network, oracle
from tests.distributed.layout_expected import on_ranks, one_thread
from tests.distributed.layout_run import SEED
from tests.distributed.sources_run import NAMES, SOURCES, WEIGHTS, Recorded, bytes_of_tokens, run_with_sources
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools
from tests.oracle import loss_sum_and_count

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"micro_batch_size": 2},
    "data parallel, ZeRO 3": {"dp": 2, "zero": 3, "overlap": "reduce and gather", "fused_loss": True},
    "unequal shares": {"dp": 2, "shares": (7, 1), "zero": 1},
    "sequence parallel": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2},
    "context parallel": {"cp": 2, "documents": True},
    "pipeline": {"pp": 2, "schedule": "zb-v", "micro_batch_size": 2},
    "experts": {"dp": 2, "ep": 2, "family": "mixtral", "zero": 1},
    "depths": {"cp": 2, "depths": 2, "family": "llama"},
    "all": {"tp": 2, "sequence_parallel": True, "pp": 2, "cp": 2, "zero": 2, "fused_loss": True},
    "data and context parallel": {"dp": 2, "cp": 2, "micro_batch_size": 2, "zero": 1},
    "interleaved": {"pp": 2, "schedule": "interleaved-2", "dp": 2, "tp": 2},
}
FEW = ("alone", "data parallel, ZeRO 3", "context parallel", "pipeline")


def cell_of(layout: dict[str, Any]) -> Cell:
    return Cell(**layout, loss_mask="random", samples=8)


@functools.cache
@one_thread()
def losses_of(alone: Cell) -> tuple[dict[str, Tensor], Tensor]:
    """Return the oracle's weights, and the loss of each token of the first step, [samples, sequence]."""
    weights = network(alone).weights(SEED, alone.torch_dtype, noise=0.2)
    for weight in weights.values():
        weight.requires_grad_()
    whole = batch(alone, 0)
    found = []
    for sample in range(alone.samples):
        documents = None if whole.document_ids is None else whole.document_ids[sample, None]
        logits = oracle(alone).logits(weights, whole.tokens[sample, None], whole.positions[sample, None], documents)
        places = [slice(place, place + 1) for place in range(alone.sequence)]
        ones = torch.ones(1, 1)
        found.append([loss_sum_and_count(logits[:, at], whole.labels[sample, None, at], ones)[0] for at in places])
    return weights, torch.stack([torch.stack(losses) for losses in found])


def check(cell: Cell, recorded: Recorded, weights: tuple[float, ...], name: str = "lm_loss") -> None:
    """Compare sums and counts with those of a loop over tokens."""
    _, losses = losses_of(cell.alone())
    mask = batch(cell, 0).loss_mask
    sums, counts = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for sample, source in enumerate(SOURCES):
        for place in range(cell.sequence):
            weight = weights[source] * float(mask[sample, place])
            sums[NAMES[source]] += weight * losses[sample, place].item()
            counts[NAMES[source]] += weight
    for source in NAMES:
        assert_number_close(recorded.sums[f"{name}/{source}"], sums[source])
        assert (f"{name}/{source}" in recorded.counts) == (counts[source] > 0)
        assert_number_close(recorded.counts.get(f"{name}/{source}", 0.0), counts[source])
    assert counts["web"] == counts["books"] == counts["none"] == 0.0 < counts["code"]
    parts = [each for each in recorded.sums if each.startswith(f"{name}/")]
    assert len(parts) == len(NAMES)
    assert_number_close(sum(recorded.sums[part] for part in parts), recorded.sums[name])
    assert_number_close(sum(recorded.counts.get(part, 0.0) for part in parts), recorded.counts[name])


def check_bits(cell: Cell, recorded: Recorded) -> None:
    """Compare bits per byte with those of a loop over tokens."""
    _, losses = losses_of(cell.alone())
    whole, lengths = batch(cell, 0), bytes_of_tokens(cell)
    for name, sources in [("bits_per_byte", set(range(len(NAMES)))), ("bits_per_byte/code", {1})]:
        bits = text = 0.0
        for sample, source in enumerate(SOURCES):
            for place in range(cell.sequence):
                if source in sources and whole.loss_mask[sample, place]:
                    bits += losses[sample, place].item() / math.log(2)
                    text += lengths[int(whole.labels[sample, place])]
        assert_number_close(recorded.sums[name], bits)
        assert recorded.counts[name] == text > 0
    assert "bits_per_byte/web" not in recorded.counts


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.wide] * (name not in FEW)) for name in LAYOUTS]
)
def test_the_loss_of_each_source_is_that_of_its_tokens(layout: str, rank_pools: RankPools) -> None:
    """Run a step with weights of tokens, and an evaluation, which has none."""
    cell = cell_of(LAYOUTS[layout])
    found = on_ranks(rank_pools, cell.world_size, run_with_sources, [cell])
    for ((step, evaluation),) in found:
        assert (step.sums, step.counts) == (found[0][0][0].sums, found[0][0][0].counts)  # the same on all ranks
        check(cell, step, WEIGHTS)
        check(cell, evaluation, (1.0,) * len(NAMES))
        check_bits(cell, evaluation)
    if cell.family == "mixtral" or cell.depths:
        return  # whose other terms are in the gradient, too
    weights, losses = losses_of(cell.alone())
    of_samples = torch.tensor([[WEIGHTS[source]] for source in SOURCES], dtype=torch.float64)
    factors = batch(cell, 0).loss_mask * of_samples
    loss = (losses * factors).sum() / factors.sum()
    gradients = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
    assert_number_close(found[0][0][0].norm, torch.cat([each.flatten() for each in gradients]).norm().item())
