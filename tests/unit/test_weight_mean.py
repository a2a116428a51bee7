"""The mean of the weights beside every kind of masters: of these, not of rounded parameters, and only after updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.optimizer import RULE_FLAGS, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.optim.shard import bytes_per_element
from megalite.optim.weight_mean import EMA
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient
from tests.unit.test_optimizer_packed import MODEL

MESH = ParallelMesh()
DECAY = 0.75
PRECISE = {"use_precision_aware_optimizer": True}
KEPT: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "own": (torch.float32, {}),
    "fp32": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"store_param_remainders": True}),
    "fp16": (torch.bfloat16, {**PRECISE, "main_params_dtype": "fp16"}),
    "fp8": (torch.bfloat16, {**PRECISE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    "fp64": (torch.float64, {}),
}


def optimizer_of(dtype: torch.dtype, **options: Any) -> Optimizer:
    network = GPT(MODEL, MESH, dtype=dtype)
    initialize(network, seed=1)
    next(network.parameters()).requires_grad_(False)
    config = OptimizerConfig(lr=0.0, **options)
    wide = torch.promote_types(dtype, torch.float32)
    return make_optimizer([network], MESH, config, DataParallel(wide, bucket_size=1000))


def step(optimizer: Optimizer, number: int, factor: float = 1.0) -> bool:
    """Take a step with drawn gradients; tell whether it was skipped."""
    generator = torch.Generator().manual_seed(number)
    optimizer.begin_step(1)
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            for use in range(len(slot.parameter.sharding.uses)):
                drawn = torch.randn(slot.parameter.shape, generator=generator) * factor
                bucket.accumulate(slot.parameter, DenseGradient(drawn.to(slot.parameter.dtype)), use)
    optimizer.reduce(0, 1)
    return optimizer.step(Rates(0.03, 0.02, weight_decay=0.1)).skipped


def kept(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return the masters and the means, part by part."""
    found = []
    for part in optimizer.slices():
        if EMA in part.state:
            master = part.state.get("master", part.values)
            master = master if isinstance(master, Tensor) else master.read()
            found.append(
                (master.to(torch.promote_types(master.dtype, torch.float32)).clone(), part.tensors[EMA].clone())
            )
    return found


@pytest.mark.parametrize(
    ("masters", "rule"),
    [*((masters, "adam") for masters in KEPT), *(("fp32", rule) for rule in RULE_FLAGS if rule != "adam")],
)
def test_it_is_that_of_the_masters(masters: str, rule: str) -> None:
    dtype, options = KEPT[masters]
    optimizer = optimizer_of(dtype, optimizer=rule, ema_decay=DECAY, **options)
    before = kept(optimizer)
    assert all(torch.equal(mean, master) for master, mean in before), "it begins with the weights"
    frozen = sum(slot.parameter.numel() for bucket in optimizer.frozen for slot in bucket.slots)
    assert frozen
    sizes = [slot.parameter.numel() for bucket in optimizer.buckets for slot in bucket.slots]
    assert sum(mean.numel() for _, mean in before) == sum(sizes)
    for number in range(2):
        assert not step(optimizer, number)
        now = kept(optimizer)
        for (master, mean), (_, last) in zip(now, before, strict=True):
            assert torch.equal(mean, last * DECAY + master * (1.0 - DECAY))
            assert not torch.equal(mean, last)
        before = now
    assert step(optimizer, 2, factor=torch.inf), "it must be skipped"
    assert all(torch.equal(mean, last) for (_, mean), (_, last) in zip(kept(optimizer), before, strict=True))


@pytest.mark.parametrize("masters", KEPT)
def test_it_changes_no_weight_and_its_memory_is_counted(masters: str) -> None:
    dtype, options = KEPT[masters]
    with_mean, without = (optimizer_of(dtype, ema_decay=decay, **options) for decay in (DECAY, None))
    for number in range(2):
        step(with_mean, number)
        step(without, number)
    states = [
        [
            value if isinstance(value, Tensor) else value.read()
            for part in each.slices()
            for value in part.state.values()
        ]
        for each in (with_mean, without)
    ]
    assert len(states[0]) > len(states[1])
    for one, two in zip(with_mean.slices(), without.slices(), strict=True):
        assert torch.equal(one.values, two.values)
    sizes = [sum(kept.nbytes for shard in each.shards for kept in shard.tensors()) for each in (with_mean, without)]
    counts = [
        bytes_per_element(each.config, ParameterGroup(False, False, False), dtype) for each in (with_mean, without)
    ]
    elements = sum(bucket.length for bucket in with_mean.buckets)
    assert sizes[0] - sizes[1] == elements * (counts[0] - counts[1]) == elements * max(dtype.itemsize, 4)
