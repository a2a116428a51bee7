"""Steps that do not update leave no trace in buffers, on ranks: BatchNorm in a pipeline, under ZeRO 3, recomputed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from tests.distributed.layout_run import held, held_states
from tests.distributed.own_model import SAMPLES, STEPS, Cell, Samples, Values, batch_of, built, mean_of_classes
from tests.distributed.own_model_run import OfRank, run_cell
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters

BAD_STEP, BAD_SAMPLE = 1, 14


class Bad(Samples):
    """Samples one of which is infinite."""

    def __getitem__(self, number: int) -> Values:
        values = super().__getitem__(number)
        return {**values, "input": values["input"] / 0} if number == BAD_SAMPLE else values


LENGTH = SAMPLES * STEPS
WITHOUT = Subset(Samples(LENGTH), [n for n in range(LENGTH) if n // SAMPLES != BAD_STEP])
"""The samples without those of the bad step."""

SKIPPING = [
    Cell("conv", pp=2),
    Cell("conv", dp=2, zero=3, overlap=True, recompute=True),
    pytest.param(Cell("conv over ranks", dp=2, recompute=True), marks=pytest.mark.wide),
    pytest.param(Cell("conv", dp=2, pp=2, zero=1, schedule="zb-v", recompute=True), marks=pytest.mark.wide),
    pytest.param(Cell("conv", pp=4, micro_batches=4, schedule="gpipe"), marks=pytest.mark.wide),
    pytest.param(Cell("conv", dp=2, precision="fp16", clip=0.5), marks=pytest.mark.wide),
]


@pytest.mark.wide_except("conv-dp2-pp1-zero3-adamw-overlap-recompute")
@pytest.mark.parametrize("cell", SKIPPING, ids=str)
def test_a_skipped_step_leaves_no_trace(cell: Cell, rank_pools: RankPools) -> None:
    pool, options = rank_pools(cell.world_size), {"initial_loss_scale": 1.0} if cell.precision == "fp16" else {}
    skipping = pool.run(run_cell, cell, dataset=Bad(LENGTH), **options)
    for found, wanted in zip(skipping, pool.run(run_cell, cell, STEPS - 1, dataset=WITHOUT, **options), strict=True):
        assert [math.isfinite(norm) for norm in found.norms] == [True, False, True]
        assert digests(found) == digests(wanted)


def digests(found: OfRank) -> dict[str, bytes]:
    return {each.name: each.digest for each in (*found.parameters, *found.buffers)}


class Fault:
    """Hook that raises at its second call, or in the backward of that micro-batch."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            _fail() if self.where == "forward" else output.register_hook(_fail)


def _fail(*_: Tensor) -> None:
    raise ZeroDivisionError


def after_error(cell: Cell, where: str | None) -> tuple[dict[str, bytes], bool]:
    """Train, with an error in the second step; return the digests, and whether buffers were those of the first step."""
    run = cell.trainer()
    network, unchanged = run._trainer.network, True
    run.step()
    if where is not None:
        network.get_submodule("0.module.4").register_forward_hook(Fault(where))
        before = {name: buffer.clone() for name, buffer in network.named_buffers()}
        with pytest.raises(ZeroDivisionError):
            run.step()
        unchanged = all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())
    while run.iteration < STEPS:
        run.step()
    with unsharded_parameters(run._trainer.optimizer):
        parameters = held(network, run.mesh, lambda parameter: parameter)
    run.close()
    return {each.name: each.digest for each in (*parameters, *held_states(network, run.mesh))}, unchanged


@pytest.mark.wide_except("conv-dp2-pp1-zero3-adamw-overlap-recompute-forward")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "cell",
    [
        Cell("conv", dp=2, zero=3, overlap=True, recompute=True),
        pytest.param(Cell("conv", dp=2, overlap=True), marks=pytest.mark.wide),
        pytest.param(Cell("conv", dp=2, zero=2, overlap=True), marks=pytest.mark.wide),
        pytest.param(Cell("conv", dp=2, zero=3), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_an_error_that_programs_catch_leaves_no_trace(cell: Cell, where: str, rank_pools: RankPools) -> None:
    pool = rank_pools(cell.world_size)
    wanted = pool.run(after_error, cell, None)
    for (found, unchanged), (expected, _) in zip(pool.run(after_error, cell, where), wanted, strict=True):
        assert unchanged
        assert found == expected


def measured(cell: Cell) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the buffers at the start of a run whose layers were measured, and an evaluation."""
    run = cell.trainer(costs="measured", valid_dataset=Samples(SAMPLES))
    buffers = {name: buffer.clone() for chunk in run._trainer.chunks for name, buffer in chunk.module.named_buffers()}
    found = run.evaluate()
    run.close()
    return buffers, found


def test_measuring_the_layers_of_a_pipeline_trains_no_statistics(rank_pools: RankPools) -> None:
    network = nn.Sequential(*built("conv")).eval()
    batch = batch_of(range(SAMPLES))
    wanted = mean_of_classes(network(batch["input"]), batch).item()
    for buffers, means in rank_pools(2).run(measured, Cell("conv", pp=2)):
        for name, buffer in buffers.items():
            assert torch.equal(buffer, network.get_buffer(name)), name
        assert_number_close(means["loss"], wanted, "loss", 1e-12)
