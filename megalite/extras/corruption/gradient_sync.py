"""Check of gradients between their reduction and the update.

Ranks that hold the same gradients compare them, and the sum of one bucket, in turn, is computed again in another way.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.extras.corruption.bit_hash import BitHash
from megalite.extras.corruption.consequences import Finding, named
from megalite.extras.corruption.replicas import differing, judge, number_of, parts, uncounted
from megalite.extras.corruption.summed_again import SummedAgain, summed_again
from megalite.optim.buckets import Bucket
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import DENSE_AXES, ParallelMesh
from megalite.training.trainer import Trainer

_WHY = "gradients differ from those of replicas"


class GradientSync:
    """Check of a trainer's gradients every few steps. All methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, interval: int, hosts: Sequence[str], *, deterministic: bool) -> None:
        """Have one bucket, in turn, be summed again. `hosts`: the node of each rank.

        `deterministic`: ranks that compute the same gradient get the same bits.
        """
        mesh, optimizer = trainer.mesh, trainer.optimizer
        self._trainer, self._mesh, self._interval, self._hosts = trainer, mesh, interval, hosts
        self._deterministic = deterministic
        self._hash = BitHash(mesh.device)
        own = [_identity(bucket) for bucket in optimizer.buckets]
        self._turns = sorted(set(itertools.chain(*all_gather_json(own, mesh))))
        """Buckets of all ranks, each once, although other ranks have other parts of it."""
        for bucket, identity in zip(optimizer.buckets, own, strict=True):
            for each in bucket.accumulators:
                each.reduction = SummedAgain(each.reduction, mesh, partial(self._is_summed_again, identity))

    def finding(self, agreed: int) -> Finding | None:
        """Return what is wrong with the complete gradients of the step. None: nothing is, or no check is due.

        `agreed`: the last step whose weights were found to be right. Gradients do not tell: they agree on ranks whose
        weights have long been different.
        """
        number = self._trainer.iteration + 1
        if number % self._interval:
            return None
        with uncounted(self._mesh):
            what, why, ranks = self._compared() or self._summed() or ("", "", ())
        return Finding(f"before the update of step {number}, {what}", why, number, ranks, agreed) if what else None

    def _is_summed_again(self, identity: str) -> bool:
        """Tell at the start of a step whether it is the turn of a bucket."""
        turn, rest = divmod(self._trainer.iteration + 1, self._interval)
        return not rest and self._turns[turn % len(self._turns)] == identity

    def _compared(self) -> tuple[str, str, Sequence[int]] | None:
        """Compare gradients that several ranks hold. Returns what is wrong, in words and in short, and who is."""
        held = {self._number(bucket): (bucket, *_held(bucket)) for bucket in self._trainer.optimizer.updated}
        rows = [(number, int(self._hash.of(values)), False) for number, (_, values, _, _) in held.items()]
        gathered = all_gather_json(rows, self._mesh)
        found = judge(gathered)
        if not found:
            return None
        own = {number: parts(*each) for number, each in held.items()}
        names = differing(found, own, self._hash, self._mesh)
        number, first = next(iter(found.items()))
        values = {rank: value for rank, own_rows in enumerate(gathered) for key, value, _ in own_rows if key == number}
        where = f"along {', '.join(axes_between(values, self._mesh))}: {', '.join(names)}"
        if not first.is_certain:
            which = "and it is not known which of them is wrong"
            return f"{named(first.wrong, self._hosts)} have different gradients {where}, {which}", "", ()
        has = f"{named(first.wrong, self._hosts)} has other gradients than {named(first.others, self._hosts)}"
        return f"{has} {where}", _WHY, first.wrong

    def _summed(self) -> tuple[str, str, Sequence[int]] | None:
        """Compare the gradients that have been summed again. Returns as `_compared` does."""
        own: list[tuple[str, str, int, float, float]] = []
        for bucket in self._trainer.optimizer.updated:
            if (again := summed_again(bucket)) is None:
                continue
            held = bucket.gradient_shard.reshape(-1)
            wrong = (held - again.total).abs() > self._tolerance(bucket) * again.sizes
            for name, part in parts(bucket, wrong, *bucket.owned_range) if wrong.any() else ():
                if part.any():
                    place = int(wrong.to(torch.uint8).argmax())
                    own.append((name, _axes(bucket), int(wrong.sum()), float(held[place]), float(again.total[place])))
                    break
        found = all_gather_json(own, self._mesh)
        ranks = [rank for rank, each in enumerate(found) if each]
        if not ranks:
            return None
        name, axes, count, is_value, expected = found[ranks[0]][0]
        what = (
            f"{named(ranks, self._hosts)} got another sum of gradients along {axes} than what ranks had adds up to: "
            f"{name} has {is_value:.9g} in place of {expected:.9g}, the first of {count} in its bucket that differ"
        )
        return what, "a sum of gradients is wrong", ranks

    def _tolerance(self, bucket: Bucket) -> float:
        """Return the relative error of a sum, which is 0 where both are in one order."""
        groups = bucket.accumulators[0].reduction.groups
        connected = [each for each in (groups.shards, groups.instances, groups.partial) if each.is_connected]
        if all(dist.get_backend(each.process_group) == "gloo" for each in connected):
            return 0.0
        terms = groups.shards.size * groups.instances.size * groups.partial.size
        return terms * torch.finfo(bucket.gradient_shard.dtype).eps

    def _number(self, bucket: Bucket) -> int:
        _, *held = _held(bucket)
        return number_of(bucket, (held[0], held[1]), self._mesh.rank, deterministic=self._deterministic)


def axes_between(values: Mapping[int, int], mesh: ParallelMesh) -> list[str]:
    """Return the axes along which ranks hold other values: those along which alone two such ranks differ.

    If there are none, those along which any two differ.
    """
    alone, several = set[str](), set[str]()
    for first, second in itertools.combinations(values, 2):
        if values[first] != values[second]:
            one, other = mesh.coordinates_of(first), mesh.coordinates_of(second)
            axes = {axis for axis in DENSE_AXES if one[axis] != other[axis]}
            several |= axes
            alone |= axes if len(axes) == 1 else set()
    return [axis for axis in DENSE_AXES if axis in (alone or several)]


def _held(bucket: Bucket) -> tuple[Tensor, int, int]:
    """Return the reduced gradients that a rank has before an update, and their range in the bucket."""
    if bucket.zero_stage == 0:
        return bucket.gradients, 0, bucket.length
    return (bucket.gradient_shard, *bucket.owned_range)


def _identity(bucket: Bucket) -> str:
    """Return what tells a bucket from others of its rank, and is the same on all ranks that reduce it."""
    names = ",".join(name for name, _, _ in bucket.layout.pieces(0, bucket.length))
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


def _axes(bucket: Bucket) -> str:
    """Return the axes over which a bucket is reduced."""
    groups = bucket.accumulators[0].reduction.groups
    sizes = {group.axis: group.size for group in (groups.shards, groups.instances, groups.partial) if group.size > 1}
    return ", ".join(axis for axis in DENSE_AXES if axis in sizes)
