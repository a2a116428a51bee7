"""--bitwise-elastic: the bits of a training do not depend on how many ranks share its batches, state and layers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError, MegaliteError
from megalite.model.gpt import GPT
from megalite.optim.fixed_point import FixedPoint, FixedPointGradient, Grid
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, named_pieces
from megalite.parallel.sharding import Box, Constant, LogicalTensor, Piece, Sharding, Use
from megalite.training.data import open_data
from tests.distributed.test_trainer import FLAGS as OF_TRAINER
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

STEPS = 3
FLAGS = (
    f"{OF_TRAINER.replace('--adam-eps 1e-6', '')} --train-iters {STEPS} --lr 0.02 --num-layers 4 "
    "--global-batch-size 12 --no-fp64 --clip-grad 0.3 --deterministic-mode --bitwise-elastic"
)
KINDS = {
    "plain": "",
    "bf16": "--bf16",
    "fp64": "--fp64",
    "tied": "--no-untie-embeddings-and-output-weights",
    "dropout": "--hidden-dropout 0.1",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type global_aux_loss",
    "bias of experts": "--num-experts 4 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid",
    "heads": "--tp 2 --sequence-parallel",
    "sequences": "--cp 2",
    "moments in bf16": "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "kernels": "--optimizer-backend megalite",
    **{rule: f"--optimizer {rule}" for rule in ("sgd", "lion", "muon", "lamb", "lars", "adafactor")},
}


def train(flags: str) -> tuple[list[tuple[float, float]], dict[str, tuple[tuple[int, ...], Tensor]]]:
    """Return loss and gradient norm of each step, and the pieces of the parameters with their offsets, at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    with trainer.loader:
        records = [trainer.step() for _ in range(STEPS)]
    with trainer.optimizer.gathered_parameters():
        held = {
            piece.tensor.name: (piece.box.offset, piece.view(parameter.detach()).clone())
            for parameter, piece in named_pieces(trainer.network)
        }
    return [(each.loss, each.grad_norm) for each in records], held


LAYOUTS = {
    "two replicas": (2, ""),
    "three replicas": (3, ""),
    "four replicas": (4, ""),
    "ZeRO 1": (3, "--use-distributed-optimizer"),
    "ZeRO 2": (4, "--data-parallel-sharding-strategy optim_grads"),
    "ZeRO 3": (3, "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce"),
    "instances": (4, "--data-parallel-sharding-strategy optim --num-distributed-optimizer-instances 2"),
    "stages": (2, "--pp 2"),
    "stages of replicas": (4, "--pp 2 --use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2"),
    "zero bubble": (2, "--pp 2 --pipeline-schedule zb-v"),
    "shares": (2, "--data-parallel-shares 2:1"),
}
# Gradients in fp32 of so small a network have few enough bits for fp64 to add them exactly anyway.
CORE = [("fp64", name) for name in ("zero bubble", "shares")] + [("experts", "ZeRO 1")]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in CORE else pytest.mark.wide)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_bits_are_those_of_one_replica(kind: str, layout: str, rank_pools: RankPools) -> None:
    of_replica = 2 if kind in ("heads", "sequences") else 1
    ranks, flags = LAYOUTS[layout]
    if ranks * of_replica > 4:
        ranks, flags = 2, "--use-distributed-optimizer"
    wanted = rank_pools(of_replica).run(train, KINDS[kind])
    held = {(name, offset): values for _, pieces in wanted for name, (offset, values) in pieces.items()}
    for figures, pieces in rank_pools(ranks * of_replica).run(train, f"{KINDS[kind]} {flags}"):
        assert figures == wanted[0][0]
        for name, (offset, values) in pieces.items():
            assert torch.equal(values, held[name, offset]), name


def test_the_training_is_that_without_fixed_point(rank_pools: RankPools) -> None:
    """A gradient changes by less than 1e-14 an element and micro-batch, of which Adam makes a little more."""
    ((figures, pieces),) = rank_pools(1).run(train, "--fp64")
    ((plain, wanted),) = rank_pools(1).run(train, "--fp64 --no-bitwise-elastic")
    assert figures != plain
    for (loss, norm), (without, norm_without) in zip(figures, plain, strict=True):
        assert loss == pytest.approx(without, rel=1e-6)  # the sum over a few tokens is rounded to 1.5e-5
        assert norm == pytest.approx(norm_without, rel=1e-9)
    for name, (_, values) in pieces.items():
        assert torch.allclose(values, wanted[name][1], rtol=0, atol=1e-8), name


def test_sums_on_a_grid_are_exact_in_any_order() -> None:
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 1000
    grid = Grid.of(-47, 1000)
    rounded = grid.rounded(values)
    assert (rounded - values).abs().max() <= 2.0**-48
    ordered = [sum(rounded.tolist()), sum(sorted(rounded.tolist())), sum(reversed(rounded.tolist()))]
    assert {*ordered} == {float(sum(map(Fraction, rounded.tolist())))}
    assert grid.largest * 1000 <= 2.0**5
    assert grid.rounded(torch.tensor([grid.largest, -grid.largest * 1.01, 1e300, math.nan])).tolist()[:3] == [
        grid.largest,
        math.inf,
        math.inf,
    ]


def test_a_gradient_beyond_the_grid_is_not_applied(rank_pools: RankPools) -> None:
    grid = Grid.of(-47, 4)
    target = torch.ones(2, dtype=torch.float64)
    gradient = FixedPointGradient(DenseGradient(torch.tensor([1.5, 100.0])), grid, torch.float32)
    gradient.add_to(target, overwrite=False)
    assert target.tolist() == [2.5, math.inf]


def report_of_a_large_gradient() -> str | None:
    """Return what is reported of a step in which an element of each micro-batch's gradient is 100 or more."""
    config = resolve(parse_arguments(f"{FLAGS} {KINDS['fp64']}".split()).config, dist.get_world_size())
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(rank=dist.get_rank(), world_size=2))
    network = cast(GPT, trainer.chunks[0])
    network.layers[0].input_norm.weight.register_hook(lambda gradient: gradient + 100.0)
    with trainer.loader:
        assert trainer.step().skipped
        return trainer.locate_not_finite()


def test_the_report_on_a_gradient_beyond_the_grid_names_the_flag(rank_pools: RankPools) -> None:
    told, other = rank_pools(2).run(report_of_a_large_gradient)
    assert told == other
    assert "it is not: layers.0.input_norm.weight (infinity). --bitwise-elastic makes an element infinite that" in told


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--no-deterministic-mode", "--bitwise-elastic needs --deterministic-mode: "),
        ("--fp16", "--bitwise-elastic and --fp16: the loss scale moves gradients beyond the grid"),
        ("--num-experts 4 --ep 2", "--bitwise-elastic and --ep 2: "),
        ("--bf16 --grad-reduce-in-bf16", "--bitwise-elastic and --grad-reduce-in-bf16: "),
        ("--gradient-compression topk", "--bitwise-elastic: "),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8", "--bitwise-elastic and --exp-avg-dtype fp8: "),
    ],
)
def test_what_would_change_bits_is_refused(flags: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, 2)
    assert why in str(error.value)


def test_a_weight_that_is_used_more_often_than_counted_on_is_refused() -> None:
    weight = LogicalTensor("weight", (2,), Constant(0.0), weight_decay=False)
    uses = (Use(times=3), Use(times=2))
    record = Sharding((2,), (Piece(weight, Box((0,), (2,)), 0, 2),), (0,), grad_is_partial=False, uses=uses)
    with pytest.raises(MegaliteError, match="weight is used 5 times in a micro-batch"):
        FixedPoint(4, torch.float32).require(record)
