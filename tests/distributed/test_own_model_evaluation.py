"""Evaluations of pipelines whose layers compute something else in evaluation mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import megalite
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools

POINTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mean_square(outputs: Tensor, batch: Tensor) -> Tensor:
    return outputs.square().mean()


def normalized(stages: int) -> tuple[float, float]:
    """Train a step on the first four points; return the mean over all five, of which one is left, and another step's
    loss.
    """
    torch.manual_seed(0)
    run = megalite.Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2)),
        loss=mean_square,
        dataset=POINTS[:4],
        layout=megalite.Layout(pp=stages),
        optimizer=megalite.SGD(lr=0.1),
        micro_batch_size=4,
        precision="fp64",
        quiet=True,
    )
    run.step()
    evaluated = run.evaluate(POINTS)["loss"]
    return evaluated, run.step()["loss"]


def test_a_pipeline_with_batch_norm_evaluates_a_single_last_sample(rank_pools: RankPools) -> None:
    (wanted,) = rank_pools(1).run(normalized, 1)
    for found in rank_pools(2).run(normalized, 2):
        assert_number_close(found[0], wanted[0], "evaluation", relative=1e-12)
        assert_number_close(found[1], wanted[1], "next step", relative=1e-12)
