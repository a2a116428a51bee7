"""What of a run's parts the flags decide, where it depends on the pipeline."""

from __future__ import annotations

import pytest

from megalite.config.parse import parse_arguments
from megalite.parallel.mesh import ParallelMesh
from megalite.training.construction import data_parallel

SIZES = "--pp 2 --num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1"


@pytest.mark.parametrize(
    ("flags", "chunks", "overlaps"),
    [
        ("", 1, False),
        ("--overlap-grad-reduce", 1, True),
        ("--overlap-grad-reduce", 2, False),  # the list says when: aligned over the pipeline's ranks
        ("--overlap-grad-reduce --no-align-grad-reduce --num-virtual-stages-per-pipeline-rank 2", 2, True),
        ("--overlap-grad-reduce --data-parallel-sharding-strategy optim", 2, False),
        ("--overlap-grad-reduce --data-parallel-sharding-strategy optim_grads", 2, True),
        ("--overlap-grad-reduce --data-parallel-sharding-strategy optim_grads_params", 2, True),
    ],
)
def test_what_reduces_inside_backward(flags: str, chunks: int, overlaps: bool) -> None:
    """Behind every micro-batch nothing is there to align."""
    config = parse_arguments(f"{SIZES} {flags}".split()).config
    assert data_parallel(config, ParallelMesh(), chunks).overlap_reduce is overlaps
