"""Models of one's own: any layout trains them as plain torch does in one process, as DDP and as fully_shard."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from tests.distributed.layout_expected import assemble
from tests.distributed.own_model import MODELS, RATE, SAMPLES, Cell, Trained, plainly
from tests.distributed.own_model_run import OfRank, by_torch, run_cells
from tests.harness.close import assert_bits_equal, assert_gradient_close, assert_number_close, assert_parameter_close
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except


@functools.cache
def expected(model: str, dp: int, micro_batches: int, optimizer: str, clip: float) -> Trained:
    return plainly(Cell(model, dp=dp, micro_batches=micro_batches, optimizer=optimizer, clip=clip))


def assert_trained(cell: Cell, ranks: list[OfRank]) -> None:
    wanted = expected(cell.model, cell.dp, cell.micro_batches, cell.optimizer, cell.clip)
    for rank in ranks:
        for step, losses in enumerate(wanted.losses):
            assert rank.losses[step].keys() == losses.keys()
            for name, loss in losses.items():
                assert_number_close(rank.losses[step][name], loss, f"{name} of step {step}")
        for step, norm in enumerate(wanted.norms):
            assert_number_close(rank.norms[step], norm, f"gradient norm of step {step}")
    gradients, parameters = assemble(rank.gradients for rank in ranks), assemble(rank.parameters for rank in ranks)
    assert gradients.keys() == wanted.gradients.keys()
    assert parameters.keys() == wanted.parameters.keys()
    norm = torch.stack([each.norm() for each in wanted.gradients.values()]).norm().item()
    for name, gradient in wanted.gradients.items():
        assert_gradient_close(gradients[name].view(gradient.shape), gradient, norm, f"gradient of {name}")
    for name, parameter in wanted.parameters.items():
        if name in wanted.gradients:
            assert_parameter_close(parameters[name].view(parameter.shape), parameter, RATE, name, relative=1e-9)
        else:
            assert_bits_equal(parameters[name].view(parameter.shape), parameter, f"frozen {name}")
    buffers = assemble(rank.buffers for rank in ranks)
    assert buffers.keys() == wanted.buffers.keys()
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(buffers[name].view(buffer.shape), buffer, rtol=1e-9, atol=1e-12, msg=name)


FACTORS: Factors = {
    "model": tuple(MODELS),
    "split": ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)),
    "zero": (0, 1, 2, 3),
    "instances": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v"),
    "overlap": (False, True),
    "micro_batches": (1, 2, 3, 4, 6),
    "optimizer": ("adamw", "sgd"),
    "clip": (0.0, 0.5),
    "recompute": (False, True),
}
"""`split`: data-parallel and pipeline ranks."""


def possible(row: Row) -> bool:
    dp, pp = row["split"]
    if dp == 1 and (row["zero"] > 0 or row["overlap"]):
        return False
    if row["instances"] > 1 and (dp != 4 or row["zero"] == 0):
        return False
    if pp == 1 and row["schedule"] != "1f1b":
        return False
    if row["schedule"] == "interleaved-1f1b" and row["micro_batches"] % pp:
        return False
    return SAMPLES % (dp * row["micro_batches"]) == 0


def cell_of(row: Row) -> Cell:
    (dp, pp), rest = row["split"], {name: value for name, value in row.items() if name != "split"}
    return Cell(dp=dp, pp=pp, **rest)


ROWS = covering_array(FACTORS, possible, cost=lambda row: 1.0 + math.prod(row["split"]))
QUICK = [row for row in every_value_once(ROWS) if row["split"] not in ((3, 1), (1, 4))]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(cell_of(row)), marks=[pytest.mark.wide] * (row not in QUICK)) for row in ROWS]
)
def test_a_layout_trains_as_plain_torch(row: Row, rank_pools: RankPools) -> None:
    cell = cell_of(row)
    assert_trained(cell, [result for (result,) in rank_pools(cell.world_size).run(run_cells, [cell])])


@pytest.mark.slow
@pytest.mark.parametrize("split", FACTORS["split"], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_trains_as_plain_torch(model: str, split: tuple[int, int], rank_pools: RankPools) -> None:
    """Run the full product: hours."""
    rows = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    cells = [cell_of(row) for row in rows if (row["model"], row["split"]) == (model, split) and possible(row)]
    for some in (cells[start : start + 50] for start in range(0, len(cells), 50)):
        by_rank = rank_pools(math.prod(split)).run(run_cells, some)
        for cell, ranks in zip(some, zip(*by_rank, strict=True), strict=True):
            assert_trained(cell, list(ranks))


SAMPLES_CUT = [
    Cell("mlp", cp=2, zero=3, overlap=True),
    Cell("mlp", cp=2, pp=2, zero=1, schedule="zb-v", clip=0.5),
    Cell("mlp", cp=2, dp=2, zero=2, instances=2, optimizer="sgd"),
    Cell("watched", cp=2, recompute=True),
    Cell("watched", cp=2, pp=2, schedule="interleaved-1f1b"),
]


@pytest.mark.parametrize("cell", wide_except(SAMPLES_CUT, SAMPLES_CUT[::3]), ids=str)
def test_samples_that_are_cut_train_as_plain_torch(cell: Cell, rank_pools: RankPools) -> None:
    assert_trained(cell, [result for (result,) in rank_pools(cell.world_size).run(run_cells, [cell])])


DISTILLED = [
    Cell("distilled"),
    Cell("distilled", dp=2),
    Cell("distilled", dp=2, zero=1, pp=2),
    Cell("distilled", dp=3, zero=2, clip=0.5),
    Cell("distilled", dp=3, zero=3, overlap=True),
    Cell("distilled", dp=2, zero=3, recompute=True),
    Cell("distilled", dp=2, pp=2, zero=3, schedule="zb-v", overlap=True),
]


@pytest.mark.wide_except("distilled-dp2-pp1-zero3-adamw-recompute")
@pytest.mark.parametrize("cell", wide_except(DISTILLED, [DISTILLED[0], DISTILLED[3], DISTILLED[5]]), ids=str)
def test_a_student_learns_from_a_frozen_teacher(cell: Cell, rank_pools: RankPools) -> None:
    assert_trained(cell, [result for (result,) in rank_pools(cell.world_size).run(run_cells, [cell])])


OF_TORCH = [
    pytest.param(Cell("mlp", dp=2, clip=0.5), marks=pytest.mark.wide),
    pytest.param(Cell("translator", dp=3, optimizer="sgd"), marks=pytest.mark.wide),
    Cell("conv", dp=4, micro_batches=1),
    pytest.param(Cell("vit", dp=2, zero=3, micro_batches=3), marks=pytest.mark.wide),
    Cell("conv", dp=3, zero=3, optimizer="sgd"),
    pytest.param(Cell("translator", dp=4, zero=3, micro_batches=1, clip=0.5), marks=pytest.mark.wide),
    pytest.param(Cell("vit", dp=4, zero=3, instances=2, micro_batches=1), marks=pytest.mark.wide),
]


@pytest.mark.wide_except("conv-dp3-pp1-zero3-sgd")
@pytest.mark.parametrize("cell", OF_TORCH, ids=str)
def test_losses_are_those_of_ddp_and_fully_shard(cell: Cell, rank_pools: RankPools) -> None:
    wanted = rank_pools(cell.world_size).run(by_torch, cell)[0]
    for (result,) in rank_pools(cell.world_size).run(run_cells, [cell]):
        for found, losses in zip(result.losses, wanted, strict=True):
            for name, loss in losses.items():
                assert_number_close(found[name], loss, name)
