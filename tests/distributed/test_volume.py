"""Bytes that a rank sends to its data-parallel peers in one step, compared with the formula of each ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel import collectives
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from tests.distributed.layout_cell import RECOMPUTE, Cell, model_config
from tests.distributed.layout_run import accumulate_gradients, local_micro_batches
from tests.harness.rank_pool import RankPools

PARAMETER, GRADIENT = 2, 4  # bytes of an element: bf16, fp32
NORM = 3 * 72 * 8  # bytes of the sums of squares: of 3 groups of parameters, 70 digits of 32 bits and 2 flags, in int64


class Sent:
    """Counter of the bytes that leave this rank in torch's collectives."""

    def __init__(self) -> None:
        self.gathered = self.scattered = self.reduced = 0

    def all_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, tensor: Tensor, *, group: Any, **options: Any) -> Any:
            self.gathered += (dist.get_world_size(group) - 1) * tensor.nbytes
            return original(out, tensor, group=group, **options)

        return call

    def all_to_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, tensor: Tensor, *, group: Any, **options: Any) -> Any:
            size = dist.get_world_size(group)
            self.scattered += tensor.nbytes * (size - 1) // size
            return original(out, tensor, group=group, **options)

        return call

    def all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.reduced += tensor.nbytes
            return original(tensor, *arguments, **options)

        return call


def sent_in_a_step(dp: int, instances: int, stage: int, overlap: bool, recompute: str) -> dict[str, int]:
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    cell = Cell(family="llama", tied=False, dp=dp, samples=4 * dp, micro_batch_size=2, recompute=recompute)
    network = GPT(model_config(cell), mesh, recompute=RECOMPUTE[recompute], dtype=torch.bfloat16)
    initialize(network, seed=1)
    options = DataParallel(
        torch.float32, stage, instances, overlap_reduce=overlap, overlap_gather=overlap and stage > 0
    )
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=0.01), options, blocks=[network.blocks()])
    micro_batches = list(local_micro_batches(cell, 0, mesh.coordinate("dp")))
    sent = Sent()
    with (
        mock.patch.object(collectives, "_all_gather_single", sent.all_gather(collectives._all_gather_single)),
        mock.patch.object(dist, "all_to_all_single", sent.all_to_all(dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", sent.all_reduce(dist.all_reduce)),
    ):
        accumulate_gradients(optimizer, network, micro_batches)
        optimizer.step(Rates(0.01, 0.01, 0.01))
        optimizer.finish_parameter_gather()
    elements = sum(bucket.length for bucket in optimizer.buckets)
    return vars(sent) | {"elements": elements, "micro_batches": len(micro_batches)}


@pytest.mark.parametrize(
    ("stage", "ranks", "overlap"),
    [
        pytest.param(
            stage, ranks, overlap, marks=[pytest.mark.wide] * (ranks == 4 or (stage + overlap) % 2 == 0)
        )  # in turn
        for stage in range(4)
        for ranks in (2, 4)
        for overlap in (False, True)
    ],
)
def test_bytes_sent_are_the_stages_volume(stage: int, ranks: int, overlap: bool, rank_pools: RankPools) -> None:
    """Each gradient once (under ZeRO 2 and 3 in every micro-batch), then the gradients (0) or the parameters (1, 2)
    again; ZeRO 3 gathers them twice a micro-batch instead. Recomputed layers are gathered no more often.
    """
    for recompute in ("none", "uniform") if stage == 3 else ("none",):
        for found in rank_pools(ranks).run(sent_in_a_step, ranks, 1, stage, overlap, recompute):
            others = found["elements"] * (ranks - 1) // ranks  # of each bucket, the slices of other ranks
            rounds = found["micro_batches"]
            assert rounds == 2
            norm = {"gathered": NORM, "reduced": 0} if ranks == 2 else {"gathered": 0, "reduced": NORM}
            gathered = {0: GRADIENT, 1: PARAMETER, 2: PARAMETER, 3: 2 * rounds * PARAMETER}[stage] * others
            assert found["scattered"] == (rounds if stage >= 2 else 1) * GRADIENT * others
            assert found["gathered"] == gathered + norm["gathered"]
            assert found["reduced"] == norm["reduced"]


def test_instances_send_their_slices_to_each_other(rank_pools: RankPools) -> None:
    """Hybrid sharding: the volume of its stage within an instance, and one slice between the two."""
    for found in rank_pools(4).run(sent_in_a_step, 4, 2, 1, False, "none"):
        slice_elements = found["elements"] // 2
        assert found["scattered"] == GRADIENT * slice_elements
        assert found["gathered"] == PARAMETER * slice_elements + GRADIENT * slice_elements
        assert found["reduced"] == NORM
