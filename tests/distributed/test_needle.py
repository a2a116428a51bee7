"""Ranks that share the model or the text find the same needles as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.inference.loading import load_network, open_model
from megalite.inference.needle import NeedleScore, find_needles, generated_haystack
from megalite.parallel.mesh import ParallelMesh
from tests.distributed.layout_expected import on_ranks
from tests.harness.close import assert_number_close
from tests.harness.finding_model import write_finding_model
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

LAYOUTS = {"cp2": (1, 1, 2), "cp4": (1, 1, 4), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2-cp2": (2, 1, 2)}


def searched(run: Path, layout: ParallelConfig) -> list[NeedleScore]:
    """Return what a model finds in texts of lengths that nothing divides."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    network = load_network(open_model(run), ParallelMesh(rank=rank, world_size=size, **layout.mesh_sizes))
    tokenizer = ByteTokenizer()
    haystack = generated_haystack(500, 0, tokenizer)
    return find_needles(network, tokenizer, haystack, (301, 500), (0.0, 0.5, 1.0), 1, 0, 2, lambda samples: None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that sees 400 tokens."""
    return write_finding_model(tmp_path_factory.mktemp("finding") / "run", sees=400, dtype=torch.float64)


@pytest.fixture(scope="module")
def alone(run: Path) -> list[NeedleScore]:
    return searched(run, ParallelConfig())


@pytest.mark.parametrize("layout", wide_except([*LAYOUTS, "dp2"], ["cp2"]))
def test_every_layout_finds_the_same(layout: str, run: Path, alone: list[NeedleScore], rank_pools: RankPools) -> None:
    assert [score.found for score in alone] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    tp, pp, cp = LAYOUTS.get(layout, (1, 1, 1))
    for found in on_ranks(
        rank_pools, 2 if layout == "dp2" else tp * pp * cp, searched, run, ParallelConfig(tp, pp, cp)
    ):
        assert [score.found for score in found] == [score.found for score in alone]
        for ours, theirs in zip(found, alone, strict=True):
            assert_number_close(ours.log_probability, theirs.log_probability)
