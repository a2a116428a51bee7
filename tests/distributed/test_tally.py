"""Counts over a step are the same on every layout: each micro-batch once, and only in steps that update."""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.model import gpt
from megalite.model.batch import LayerContext
from megalite.model.block import Block, LayerOutput
from megalite.optim import statistics
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite.parallel.state import State, Tally, states_of
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from tests.distributed.layout_expected import on_ranks
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS, BATCH, LENGTH, LAYERS = 3, 4, 8, 4
SKIPPED = 1
FLAGS = f"""--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4
--num-layers {LAYERS} --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
--init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size {BATCH}
--train-iters {STEPS} --eval-iters 1 --lr 0.02 --lr-decay-style constant --weight-decay 0"""
LARGE = 2**54 + 1
"""Count that no float can represent."""


class Counting(Block):
    """Layer that counts its tokens, also multiplied by a large number, and tokens whose first number is positive."""

    def __init__(self, config: Any, context: Any, layer: int, recompute: Any) -> None:
        super().__init__(config, context, layer, recompute)
        tensor = LogicalTensor(f"layers.{layer}.counts", (3,), Constant(0), weight_decay=False)
        mesh = context.mesh
        self.state = State(replicated(mesh, tensor, grad_is_partial=False), torch.int64, mesh.device)
        self.tally = Tally(3, mesh.group(*context.token_axes), mesh.device, self.on_step)

    def on_step(self, total: Tensor) -> None:
        self.state.values += total

    def forward(self, hidden: Tensor, branch: Tensor | None, context: LayerContext) -> LayerOutput:
        first = (hidden if branch is None else hidden + branch)[..., 0]
        tokens = first.numel()
        numbers = torch.stack([torch.tensor(tokens), torch.tensor(LARGE * tokens), (first > 0).sum()])
        return super().forward(self.tally.count(numbers, hidden), branch, context)


def infinite(*arguments: Any) -> dict[str, float]:
    """Return the norms of a gradient that is not finite."""
    return {"weights": math.inf, "vectors": 0.0, "token_tables": 0.0}


def trained(flags: str) -> list[tuple[str, list[int]]]:
    """Return the counts in each layer of this rank, over steps with an evaluation after each, and one skipped."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    with mock.patch.object(gpt, "Block", Counting):
        trainer = gpt_trainer(config, open_data(config), mesh)
    with trainer.loader:
        for number in range(STEPS):
            with mock.patch.object(statistics, "norms", infinite if number == SKIPPED else statistics.norms):
                assert trainer.step().skipped == (number == SKIPPED)
            evaluate(trainer)
    return [(state.sharding.name, state.values.tolist()) for state in states_of(trainer.network)]


R = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LAYOUTS = {
    "recomputed": (1, f"{R} 3"),
    "copies": (2, "--use-distributed-optimizer --overlap-grad-reduce"),
    "three copies": (3, "--global-batch-size 6"),
    "whole parameters gathered": (2, f"--data-parallel-sharding-strategy optim_grads_params {R} 1"),
    "tensors": (2, "--tp 2"),
    "parts": (2, f"--tp 2 --sequence-parallel {R} 1"),
    "stages": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "four stages": (4, f"--pp 2 --num-layers-per-virtual-pipeline-stage 1 {R} 1"),
}


@cache
def alone(batch: int) -> dict[str, list[int]]:
    """Return the same from one process, with checks of the values known in advance."""
    (held,) = on_ranks(RankPools(), 1, trained, f"{FLAGS} --global-batch-size {batch}")
    tokens = (STEPS - 1) * batch * LENGTH
    assert len(held) == LAYERS
    for _, (counted, multiplied, positive) in held:
        assert (counted, multiplied) == (tokens, LARGE * tokens)
        assert 0 < positive < tokens
    return dict(held)


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["parts"]))
def test_layers_count_alike_on_every_layout(layout: str, rank_pools: RankPools) -> None:
    ranks, more = LAYOUTS[layout]
    wanted = alone(6 if ranks == 3 else BATCH)
    for held in on_ranks(rank_pools, ranks, trained, f"{FLAGS} {more}"):
        assert held
        for name, counted in held:
            assert counted == wanted[name], name
