"""Comparison of the weights that ranks hold twice: which rank has other bits than the others, and where."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megalite.extras.corruption.bit_hash import BitHash
from megalite.optim.buckets import ParameterBucket
from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import Segment
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh

_SHOWN = 4
"""The most names of parameters in a message."""

Row = tuple[int, int, bool]
"""Report of a rank on a bucket: the number of what it holds, its hash, and whether it has changed between updates."""

Parts = Iterable[tuple[str, Tensor]]
"""Parts of logical tensors, by name."""

Hashes = tuple[int, int]
"""Hashes of a bucket's weights, and of this rank's part of the optimizer's state of it."""


@dataclass(frozen=True)
class Difference:
    """Weights of one bucket that are not the same on all ranks that hold them."""

    wrong: tuple[int, ...]
    """Ranks whose weights are wrong, or that may be the ones: all with other bits than another one has."""
    others: tuple[int, ...]
    """Ranks that hold them right."""
    is_certain: bool
    """True if it is known which ranks have wrong ones."""
    at_rest: bool
    """True if they, or the optimizer's state of them, have changed while nothing may change them."""


class SharedWeights:
    """The weights of this rank, bucket by bucket, which others hold, too, and the optimizer's state of them."""

    def __init__(self, optimizer: Optimizer, mesh: ParallelMesh, *, deterministic: bool) -> None:
        """Find them. `deterministic`: ranks that compute the same gradient get the same bits."""
        self._mesh, self._optimizer = mesh, optimizer
        self._hash = BitHash(mesh.device)
        self._buckets = [*optimizer.buckets, *optimizer.frozen]
        self._numbers = [
            number_of(bucket, _held(bucket)[1:], mesh.rank, deterministic=deterministic) for bucket in self._buckets
        ]

    def hashes(self) -> list[Hashes]:
        """Return the hashes of each bucket on this rank."""
        self._optimizer.finish_parameter_gather()
        states: dict[int, Tensor] = {}
        for shard in self._optimizer.shards:
            tensors = (tensor for segment in shard.segments for tensor in _state(segment))
            states[id(shard.bucket)] = self._hash.of_all(tensors)
        empty = self._hash.of_all(())
        pairs = [(self._hash.of(_held(each)[0]), states.get(id(each), empty)) for each in self._buckets]
        return [(int(weights), int(state)) for weights, state in pairs]

    def differences(self, before: Sequence[Hashes]) -> dict[int, Difference]:
        """Compare the weights of all ranks. Returns what differs, by number. Called by all ranks together.

        `before`: the `hashes` after the last update.
        """
        rows = [
            (number, now[0], now != then)
            for number, now, then in zip(self._numbers, self.hashes(), before, strict=True)
        ]
        with uncounted(self._mesh):
            return judge(all_gather_json(rows, self._mesh))

    def names(self, differences: Mapping[int, Difference]) -> list[str]:
        """Return the names of some of the parameters that differ. Called by all ranks together."""
        buckets = zip(self._numbers, self._buckets, strict=True)
        own = {number: parts(bucket, *_held(bucket)) for number, bucket in buckets}
        return differing(differences, own, self._hash, self._mesh)


def differing(
    differences: Mapping[int, Difference], own: Mapping[int, Parts], bit_hash: BitHash, mesh: ParallelMesh
) -> list[str]:
    """Return the names of some of the parameters that differ. Called by all ranks together.

    `own`: what this rank holds, by its number. Of what no other rank has, all names are returned.
    """
    found: list[dict[str, list[tuple[str, int]]]] = all_gather_json(
        {
            str(number): [(name, int(bit_hash.of(part))) for name, part in held]
            for number, held in own.items()
            if number in differences
        },
        mesh,
    )
    names: dict[str, None] = {}
    for number, difference in differences.items():
        held = [each[str(number)] for each in found if str(number) in each]
        for same in zip(*held, strict=True):
            if len({value for _, value in same}) > 1 or not difference.others:
                names[same[0][0]] = None
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [*list(names)[:_SHOWN], *more]


@contextmanager
def uncounted(mesh: ParallelMesh) -> Iterator[None]:
    """Leave the block's messages out of the bytes of a step, which are those of its training."""
    sent = dict(mesh.traffic.by_axis)
    yield
    mesh.traffic.by_axis.clear()
    mesh.traffic.by_axis.update(sent)


def judge(rows: Sequence[Sequence[Row]]) -> dict[int, Difference]:
    """Return the differences between what ranks hold, by its number. `rows`: those of each rank."""
    found: dict[int, Difference] = {}
    holders: dict[int, list[tuple[int, int, bool]]] = {}
    for rank, own in enumerate(rows):
        for number, value, changed in own:
            holders.setdefault(number, []).append((rank, value, changed))
    for number, held in holders.items():
        ranks = {rank for rank, _, _ in held}
        if changed_ranks := {rank for rank, _, changed in held if changed}:
            found[number] = _difference(changed_ranks, ranks, is_certain=True, at_rest=True)
            continue
        by_value: dict[int, set[int]] = {}
        for rank, value, _ in held:
            by_value.setdefault(value, set()).add(rank)
        if len(by_value) > 1:
            most = max(by_value.values(), key=len)
            is_certain = 2 * len(most) > len(ranks)
            found[number] = _difference(ranks - most if is_certain else ranks, ranks, is_certain=is_certain)
    return found


def _difference(wrong: set[int], ranks: set[int], *, is_certain: bool, at_rest: bool = False) -> Difference:
    return Difference(tuple(sorted(wrong)), tuple(sorted(ranks - wrong)), is_certain, at_rest)


def _held(bucket: ParameterBucket) -> tuple[Tensor, int, int]:
    """Return the weights of a bucket that a rank holds between steps, and their range in it."""
    if bucket.zero_stage == 3:
        return (bucket.parameter_shard, *bucket.owned_range)
    return bucket.parameters, 0, bucket.length


def number_of(bucket: ParameterBucket, held: tuple[int, int], rank: int, *, deterministic: bool) -> int:
    """Return the number of what a rank holds of a bucket: the same on all ranks that hold the same.

    `held`: the range in the bucket.
    """
    record = bucket.slots[0].parameter.sharding
    # Ranks of one replica that each compute the whole gradient have the same one only if kernels are deterministic.
    own = 0 if deterministic or bucket.layout.frozen or record.grad_is_partial else record.replica_ranks.index(rank)
    pieces = [
        (piece.tensor.name, piece.box.offset, piece.box.size, slot.start + piece.row)
        for slot in bucket.slots
        for piece in slot.parameter.sharding.pieces
    ]
    text = repr((pieces, *held, str(bucket.parameters.dtype), own))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _state(segment: Segment) -> Iterator[Tensor]:
    """Yield what an update rule keeps between steps, but for what is packed."""
    if segment.has_master:
        yield segment.master
    yield from segment.tensors.values()
    if segment.mean is not None:
        yield segment.mean


def parts(bucket: ParameterBucket, values: Tensor, start: int, stop: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of logical tensors in the range [start, stop) of a bucket, whose values these are."""
    for name, low, high in bucket.layout.pieces(start, stop):
        yield name, values[low - start : high - start]
