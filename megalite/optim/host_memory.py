"""Bytes of the host's memory that an optimizer takes: before it is made, and as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel, plan_buckets, shard_spec
from megalite.optim.layout import BucketShardSpec
from megalite.optim.offloaded import elements_on_host
from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import mean_dtype, quantized_dtype, state_dtype
from megalite.optim.update_rule import state_names
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.torch_internals import storage_identity
from megalite_kernels.moments import BLOCK


def bytes_on_host(optimizer: Optimizer) -> int:
    """Return the bytes that state, copies of parameters and gradients, and slices of parameters take on the host."""
    if optimizer.host is None:
        return 0
    slices = [each.parameter_shard for each in (*optimizer.buckets, *optimizer.frozen) if each.slice_on_host]
    kept = [tensor for shard in optimizer.shards for tensor in shard.tensors(on_host=True)]
    sizes = {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in (*slices, *kept)}
    return sum(sizes.values())


def expected_bytes_on_host(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    fraction: float,
    config_of: Callable[[Parameter], OptimizerConfig],
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
) -> int:
    """Return the same bytes of an optimizer that is not made yet, to the byte. Nothing is allocated.

    Args:
        networks, mesh, options, blocks: those of `make_optimizer`.
        fraction: the share of the elements that have their state on the host.
        config_of: returns the hyperparameters of a parameter.
    """
    plan = partial(plan_buckets, networks, mesh, options, blocks=blocks)
    trained, frozen = (
        [shard_spec(layout, mesh, options) for layout in layouts] for layouts in (plan(), plan(frozen=True))
    )
    total = sum(
        size
        for spec, count in zip(trained, elements_on_host(trained, fraction), strict=True)
        for size in _of_elements(spec, count, options, config_of(spec.layout.slots[0].parameter))
    )
    for spec in (*trained, *frozen):
        if _slice_on_host(spec, options):
            total += (spec.owned[1] - spec.owned[0]) * spec.layout.slots[0].parameter.dtype.itemsize
    return total


def _of_elements(spec: BucketShardSpec, count: int, options: DataParallel, config: OptimizerConfig) -> Iterator[int]:
    """Yield the bytes of the first elements of a shard, but for a slice of the parameters that is there anyhow."""
    dtype = spec.layout.slots[0].parameter.dtype
    if not _slice_on_host(spec, options):
        yield count * dtype.itemsize
    yield count * options.gradients_of(spec.layout).itemsize
    if config.store_param_remainders and dtype == torch.bfloat16:
        yield count * torch.int16.itemsize
    elif (master := state_dtype(config, "master", dtype)) != dtype:
        yield count * master.itemsize
    if (mean := mean_dtype(config, dtype)) is not None:
        yield count * mean.itemsize
    start = spec.updated[0]
    for group, _, first, last in spec.layout.stretches():
        length = min(last, start + count) - max(first, start)
        for name in state_names(config, group) if length > 0 else ():
            if quantized_dtype(config, name) is not None:
                yield length + -(-length // BLOCK) * torch.float32.itemsize
            else:
                yield length * state_dtype(config, name, dtype).itemsize


def _slice_on_host(spec: BucketShardSpec, options: DataParallel) -> bool:
    return options.slices_on_host is not None and spec.zero_stage == 3
