"""Bytes that each ZeRO stage keeps between uses, and that a micro-batch keeps from forward to backward."""

from __future__ import annotations

import gc
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalite.config.adapters import AdaptersConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim import accumulator
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.optim.flat import free_storage
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.adapter import add_adapters
from megalite.parallel.initialization import initialize, set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import accumulate_gradients, local_micro_batches
from tests.harness.rank_pool import RankPools

CONFIGS = {
    "wide": OptimizerConfig(lr=0.01),
    "narrow": OptimizerConfig(
        lr=0.01,
        use_precision_aware_optimizer=True,
        main_params_dtype="fp16",
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    ),
    "8 bits": OptimizerConfig(
        lr=0.01,
        use_precision_aware_optimizer=True,
        store_param_remainders=True,
        exp_avg_dtype="int8",
        exp_avg_sq_dtype="fp8",
    ),
}


def kept(stage: int, overlap: bool, config: str, wanted: float) -> dict[str, float]:
    """Return bytes per element after a step in bf16: parameters, gradients, optimizer, all storages, and peak of
    gradients.

    `wanted`: expected number of bytes of all storages that the step leaves alive.
    """
    gc.freeze()  # older objects are not counted
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    cell = Cell(family="llama", tied=False, dp=2, dtype="bfloat16")
    network = GPT(model_config(cell), mesh, dtype=torch.bfloat16)
    initialize(network, seed=1)
    gradients = torch.float32 if config == "wide" else torch.bfloat16
    options = DataParallel(gradients, stage, overlap_reduce=overlap, overlap_gather=overlap and stage > 0)
    optimizer = make_optimizer([network], mesh, CONFIGS[config], options, blocks=[network.blocks()])
    micro_batches = list(local_micro_batches(cell, 0, mesh.coordinate("dp")))
    accumulate_gradients(optimizer, network, micro_batches)
    sizes = [bucket.gradients.untyped_storage().size() for bucket in optimizer.buckets]
    alive = sum(sizes)
    largest = sum(sorted(bucket.gradients.nbytes for bucket in optimizer.buckets)[-2:])
    optimizer.step(Rates(0.01, 0.01, 0.01))
    optimizer.finish_parameter_gather()
    elements = sum(bucket.parameters.numel() for bucket in optimizer.buckets)
    del micro_batches

    def size(tensors: list[torch.Tensor]) -> float:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}
        return sum(storages.values()) / elements

    buckets, shards = optimizer.buckets, optimizer.shards
    return {
        "parameters": size([t for b in buckets for t in (b.parameters, b.parameter_shard)]),
        "gradients": size([t for b in buckets for t in (b.gradients, b.gradient_shard)]),
        "optimizer": size([t for s in shards for t in s.tensors()]),
        "all": settled_bytes(wanted * elements * 1.005) / elements,
        "alive beyond two buckets": alive - largest,
    }


def kept_beside_frozen(stage: int, of_frozen: float, of_trained: float) -> tuple[float, float]:
    """Return the bytes of all storages after a step of adapters in bf16, and those of the formula."""
    gc.freeze()
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    cell = Cell(family="llama", tied=False, dp=2, dtype="bfloat16")
    network = GPT(model_config(cell), mesh, dtype=torch.bfloat16)
    add_adapters(network, AdaptersConfig(lora_rank=3))
    initialize(network, seed=1)
    options = DataParallel(torch.float32, stage)
    optimizer = make_optimizer([network], mesh, CONFIGS["wide"], options, blocks=[network.blocks()])
    micro_batches = list(local_micro_batches(cell, 0, mesh.coordinate("dp")))
    accumulate_gradients(optimizer, network, micro_batches)
    optimizer.step(Rates(0.01, 0.01, 0.01))
    optimizer.finish_parameter_gather()
    frozen, trained = (sum(each.length for each in buckets) for buckets in (optimizer.frozen, optimizer.buckets))
    del micro_batches
    wanted = of_frozen * frozen + of_trained * trained
    return settled_bytes(wanted * 1.005), wanted


def settled_bytes(wanted: float) -> int:
    """Return the bytes of all these storages.

    A gloo thread frees the tensors of a collective shortly after its end, so wait until `wanted` is reached.
    """
    for _ in range(500):
        if (found := sum(live_storages().values())) <= wanted:
            break
        time.sleep(0.01)
    return found


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage newer than the last `gc.freeze()`, each storage once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize(
    ("stage", "of_frozen", "of_trained"), [pytest.param(0, 2, 18, marks=pytest.mark.wide), (1, 2, 12), (3, 1, 9)]
)
def test_frozen_weights_have_nothing_but_themselves(
    stage: int, of_frozen: float, of_trained: float, rank_pools: RankPools
) -> None:
    """Adapters beside them have parameters, gradients and state as ever: 6 + 12 / 2 bytes a parameter under ZeRO 1."""
    for found, wanted in rank_pools(2).run(kept_beside_frozen, stage, of_frozen, of_trained):
        assert found <= 1.005 * wanted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"), [(0, 2, 4, 12), (1, 2, 4, 6), (2, 2, 2, 6), (3, 1, 2, 6)]
)
def test_memory_is_the_formulas(
    stage: int, parameters: float, gradients: float, optimizer: float, overlap: bool, rank_pools: RankPools
) -> None:
    """bf16 with fp32 gradients, masters and moments on two ranks: 6 + 12 / 2 bytes a parameter under ZeRO 1."""
    for found in rank_pools(2).run(kept, stage, overlap, "wide", parameters + gradients + optimizer):
        assert found["parameters"] == parameters
        assert found["gradients"] == gradients
        assert found["optimizer"] == optimizer
        assert found["all"] == pytest.approx(parameters + gradients + optimizer, rel=0.01)
        if stage >= 2:
            assert found["alive beyond two buckets"] <= 0


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"), [(0, 2, 2, 6), (1, 2, 2, 3), (2, 2, 1, 3), (3, 1, 1, 3)]
)
def test_a_precision_aware_optimizer_keeps_half(
    stage: int, parameters: float, gradients: float, optimizer: float, rank_pools: RankPools
) -> None:
    """Gradients, masters and both moments in 2 bytes each: 4 + 6 / 2 bytes a parameter under ZeRO 1."""
    for found in rank_pools(2).run(kept, stage, False, "narrow", parameters + gradients + optimizer):
        assert (found["parameters"], found["gradients"], found["optimizer"]) == (parameters, gradients, optimizer)
        assert found["all"] == pytest.approx(parameters + gradients + optimizer, rel=0.01)


def test_moments_in_8_bits_and_remainders_keep_a_third(rank_pools: RankPools) -> None:
    """Instead of 12 bytes in fp32, 4 bytes and two scales per block of 256 (or shorter): 4 + 4 / 2 under ZeRO 1."""
    for found in rank_pools(2).run(kept, 1, False, "8 bits", 2 + 2 + 2.1):
        assert (found["parameters"], found["gradients"]) == (2, 2)
        assert 2 * (1 + 2 / 256) <= found["optimizer"] <= 2.1
        assert found["all"] <= 6.2


def largest_construction(stage: int) -> tuple[float, float]:
    """Return bytes per element of the parameters: the peak during construction without state, and of a block."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    cell = Cell(family="llama", tied=False, dp=2, dtype="float32")
    gc.freeze()
    seen = []
    network = GPT(model_config(cell), mesh, dtype=torch.float32)

    def look() -> None:
        seen.append(sum(live_storages().values()))

    def set_values(parameter: Parameter) -> None:
        set_initial_values(parameter, seed=1)
        look()

    def free(flat: torch.Tensor) -> None:
        look()
        free_storage(flat)

    options = DataParallel(torch.float32, stage)
    with mock.patch.object(accumulator, "free_storage", free):
        found = make_buckets([network], mesh, options, blocks=[network.blocks()], set_values=set_values)
    look()
    elements = sum(bucket.length for bucket in found)
    block = max(bucket.length for bucket in found)
    return max(seen) / elements, block / elements


def test_a_sharded_model_is_never_whole_on_a_rank(rank_pools: RankPools) -> None:
    """Allow slices of parameters and gradients, and both unsharded for one block, in construction under ZeRO 3."""
    for most, block in rank_pools(2).run(largest_construction, 3):
        assert most <= 1.01 * ((4 + 4) / 2 + (4 + 4) * block)
    for most, _ in rank_pools(2).run(largest_construction, 0):
        assert most >= 4 + 4
