"""Sums of gradients by the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from megalite.config.synchronization import Compression, SynchronizationConfig
from megalite.extras.synchronization.compressed import CompressedReduction, PackedSum, PackerOf
from megalite.extras.synchronization.compressor import Compressor
from megalite.extras.synchronization.deep_gradient import VelocityPacker, ratio_at
from megalite.extras.synchronization.local_update import Sum
from megalite.extras.synchronization.low_rank import LowRankReduction
from megalite.extras.synchronization.methods import make_compressor
from megalite.extras.synchronization.onebit_adam import MomentumPacker
from megalite.extras.synchronization.packer import CompressorAt, Packer, Packing, padding
from megalite.optim.layout import BucketLayout, BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups, ReductionOf
from megalite.optim.shard import Shard
from megalite.parallel.collectives import all_reduce_async_
from megalite.parallel.mesh import Group

_SETS = ("topk", "threshold", "dgc", "count-sketch")
"""Methods by which ranks choose elements of their own."""


def compressed_reduction(
    config: SynchronizationConfig, dtype: torch.dtype, *, momentum: float, beta1: float
) -> ReductionOf:
    """Return how gradients that travel packed are summed.

    Args:
        config: the options.
        dtype: the dtype of the sums of gradients.
        momentum: that of sgd, for dgc.
        beta1: that of adam, for onebit-adam.
    """
    within, between = config.compression_within, config.compression_between
    residual_dtype = dtype if config.error_feedback else None
    warmup = 0 if within == "dgc" else config.compression_warmup_iters

    def packer(
        name: Compression, peers: int = 1, kind: Callable[[Packing, BucketLayout, int, int], Packer] = Packer
    ) -> PackerOf | None:
        if name == "none":
            return None
        return partial(kind, Packing(compressor_at(config, dtype, name, peers), warmup, residual_dtype))

    def reduction(spec: BucketShardSpec, groups: ReductionGroups) -> Reduction:
        if within == "powersgd":
            return LowRankReduction(config.compression_rank, warmup, dtype, config.error_feedback, spec, groups)
        kinds: dict[str, Callable[[Packing, BucketLayout, int, int], Packer]] = {
            "dgc": partial(VelocityPacker, momentum),
            "onebit-adam": partial(MomentumPacker, beta1),
        }
        own = packer(within, kind=kinds.get(within, Packer))
        # A sum of sets of elements has up to as many as all of them together.
        of_sum = packer("topk", groups.shards.size) if within in _SETS else packer(within)
        return CompressedReduction(own, of_sum, packer(between), spec, groups)

    return reduction


def sums_over_replicas(config: SynchronizationConfig, shards: Sequence[Shard], replicas: Group) -> list[Sum]:
    """Return how the changes of each shard's owned slice are summed over the replicas."""
    if config.compression_between == "none":
        return [_all_reduce(replicas)] * len(shards)
    sums: list[Sum] = []
    for shard in shards:
        layout, (begin, end) = shard.bucket.layout, shard.bucket.owned_range
        dtype = torch.promote_types(shard.owned_masters.dtype, torch.float32)
        compressors = compressor_at(config, dtype, config.compression_between)
        packing = Packing(compressors, config.compression_warmup_iters, dtype if config.error_feedback else None)
        sums.append(PackedSum(Packer(packing, layout, begin, end), padding(layout, begin, end), replicas))
    return sums


def _all_reduce(replicas: Group) -> Sum:
    return lambda values, number: all_reduce_async_(values, replicas)


def compressor_at(config: SynchronizationConfig, dtype: torch.dtype, name: Compression, peers: int = 1) -> CompressorAt:
    """Return the compressor of each step. `peers`: the number of ranks whose sets of elements are sent together."""

    @cache
    def of_ratio(ratio: float) -> Compressor:
        return make_compressor(name, min(1.0, peers * ratio), dtype)

    def at(updates: int) -> Compressor:
        ratio, warmup = config.compression_ratio, config.compression_warmup_iters
        return of_ratio(ratio_at(updates, warmup, ratio) if name == "dgc" else ratio)

    return at
