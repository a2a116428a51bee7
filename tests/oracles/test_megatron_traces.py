"""Files of --save-activations-interval and its like, as Megatron-LM's own training program writes them, are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import Trace
from museum.megatron import Run
from tests.harness.rank_pool import RankPools

pytestmark = pytest.mark.oracle

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --max-position-embeddings 32 "
    "--seq-length 32 --vocab-size 63 --make-vocab-size-divisible-by 8 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 2 --calculate-per-token-loss"
)
"""The vocabulary needs no padding: each layout would have another one, which counts in the softmax."""
Found = dict[tuple[str, str, int], Tensor]


def recorded(pools: RankPools, folder: Path, layout: str) -> tuple[Trace, Trace]:
    """Record the first step on one rank and, with the same weights and samples, on two."""
    alone, divided = Run(FLAGS, 1, folder / "alone"), Run(f"{FLAGS} {layout}", 2, folder / "divided")
    weights = alone.prepare()
    return read_trace(alone.record(pools, weights), None), read_trace(divided.record(pools, weights), None)


def values(trace: Trace, rank: int | None = None) -> Found:
    """Return whole tensors by name, role and position."""
    found: Found = {}
    for entry in trace.entries:
        if rank in (None, entry.rank):
            evidence = entry.read()
            assert isinstance(evidence, Whole)
            assert found.setdefault((entry.name, entry.role, entry.number), evidence.values) is evidence.values
    return found


@pytest.mark.parametrize(
    "layout",
    ["--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"],
)
def test_layers_of_stages_and_chunks_have_their_names_in_the_network(
    layout: str, rank_pools: RankPools, tmp_path: Path
) -> None:
    alone, divided = recorded(rank_pools, tmp_path, layout)
    assert (alone.step, divided.step) == (1, 1)
    assert [divided.coordinates[rank]["pp"] for rank in range(2)] == [(0, 2), (1, 2)]
    expected, found = values(alone), values(divided)
    assert found.keys() == expected.keys()
    assert {role for _, role, _ in found} == {
        *("input", "output", "input_gradient", "output_gradient", "main_gradient", "parameter_after")
    }
    assert ("decoder.layers.3.mlp.linear_fc2", "output_gradient", 0) in found
    for key, each in expected.items():
        # In fp32; the same kernels run on the same values.
        torch.testing.assert_close(found[key], each, rtol=1e-6, atol=1e-7)


def test_shards_have_the_places_of_their_ranks(rank_pools: RankPools, tmp_path: Path) -> None:
    alone, divided = recorded(rank_pools, tmp_path, "--tensor-model-parallel-size 2")
    assert [divided.coordinates[rank]["tp"] for rank in range(2)] == [(0, 2), (1, 2)]
    key = ("decoder.layers.1.mlp.linear_fc1.weight", "main_gradient", 0)
    found, expected = torch.cat([values(divided, rank)[key] for rank in range(2)]), values(alone)[key]
    assert (found - expected).norm() < 1e-5 * expected.norm()  # in fp32, with another order of sums
