"""State that differs between replicas, the rule by which it follows another layout, and extra state.

Everything here is a pure function of the mesh and of the parameters' `Sharding` records, as in `layout.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from megalite.optim.layout import BucketShardSpec
from megalite.optim.weight_mean import EMA
from megalite.parallel.sharding import partition_range

Relayout = Literal["sum", "average", "drop", "refuse"]
"""Rule for values of n replicas that are loaded by another number of replicas:

- sum: the total is preserved. Replica j of m gets the sum of the old k with k % m == j; without an old one, zeros.
- average: each gets the mean of all.
- drop: each gets zeros.
- refuse: the load fails.
"""
RELAYOUTS: tuple[Relayout, ...] = get_args(Relayout)
ANCHOR = "anchor"
"""Name of the weights after the last exchange between replicas. A checkpoint has them as weights, too."""
EXTRA_STATE = (
    *("residual", "velocity", "residual_of_sum", "residual_of_sites", "residual_of_replicas"),
    *(ANCHOR, "outer_momentum", "exchanged"),
)
"""Names that a `BucketState` may have. A checkpoint may lack such state, or have it for a run that does not use it."""
OPTIONAL_STATE = (*EXTRA_STATE, EMA)
"""Names of all such state, with the mean of the weights."""


@dataclass(frozen=True)
class Replica:
    """Replica whose values a rank has, one of `count`."""

    index: int
    count: int
    relayout: Relayout


@dataclass(frozen=True)
class BucketState:
    """Extra state: not the update rule's, and with one number per element of a bucket's trained parameters.

    Its dtype is that of the parameters, or fp32 if that is wider. A rank has it in flat tensors, as `bucket_parts`
    describes.
    """

    name: str
    relayout: Relayout | None
    """Rule for values that differ between replicas. None: all have the same, which are saved once."""
    whole: bool
    """True if a rank has values for the whole bucket. Otherwise it has them for the slice that it owns."""
    per_use: bool = False
    """True if a rank has a tensor per accumulator of the bucket. Otherwise it has one."""
    among: Literal["shards", "instances"] | None = None
    """A rank has it only if there are several of them."""

    def __post_init__(self) -> None:
        """Raise ValueError if no checkpoint may lack a state of this name."""
        if self.name not in EXTRA_STATE:
            raise ValueError(f"{self.name} is not one of {EXTRA_STATE}")


@dataclass(frozen=True)
class BucketPart:
    """Part of a bucket's state that a rank has in one flat tensor."""

    replica: Replica | None
    """Replica whose values these are. None: all replicas have the same."""
    held: tuple[int, int]
    """Range of the bucket, [start, stop)."""
    saved: tuple[int, int]
    """Range that this rank saves. Over all ranks, each element of each replica is saved once."""


def bucket_parts(spec: BucketShardSpec, state: BucketState, outer: Replica | None = None) -> Iterator[BucketPart]:
    """Yield a rank's parts of a bucket's state, one per flat tensor.

    Copies of a parameter that each compute a part of its gradient have values of their own. Copies that each compute
    the whole gradient have the same values, as the data-parallel ranks of each copy do the same.

    Args:
        spec: the rank's slices of the bucket.
        state: the state.
        outer: the rank's replica, if the whole optimizer is one of several.
    """
    record = spec.layout.slots[0].parameter.sharding
    instances = spec.replicas // len(record.replica_ranks)
    if {"shards": spec.shards, "instances": instances}.get(state.among or "", 2) == 1:
        return
    held = (0, spec.layout.length) if state.whole else spec.owned
    site, sites = (outer.index, outer.count) if outer is not None else (0, 1)
    index, count = site * spec.replicas + spec.replica, sites * spec.replicas
    if state.relayout is None:
        yield BucketPart(None, held, _divided(spec.owned, count, index))
        return
    same, copy = 1, 0
    if not record.partial_group:
        same = len(record.replica_ranks)
        copy, instance = divmod(spec.replica, instances)
        index, count = site * instances + instance, sites * instances
    if state.whole:
        index, count = index * spec.shards + spec.shard, count * spec.shards
    uses = len({use.chunk for use in record.uses}) if state.per_use else 1
    for use in range(uses):
        replica = Replica(use * count + index, uses * count, state.relayout)
        yield BucketPart(replica, held, _divided(held, same, copy))


def _divided(whole: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    begin, end = whole
    start, length = partition_range(end - begin, parts, index)
    return begin + start, begin + start + length


def sources(saved: int, wanted: int, index: int, relayout: Relayout) -> range:
    """Return the saved replicas whose sum (or mean, with "average") is the value of replica `index` of `wanted`.

    Raises ValueError if the rule is "refuse" and the numbers differ.
    """
    if saved == wanted:
        return range(index, index + 1)
    if relayout == "refuse":
        raise ValueError(f"values of {saved} replicas cannot become those of {wanted}")
    return {"sum": range(index, saved, wanted), "average": range(saved), "drop": range(0)}[relayout]
