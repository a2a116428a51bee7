"""The ranks of a run under another layout, and values of a step that move from one layout to the other."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.parallel import MeshSizes
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, Kind, ParallelMesh
from megalite.parallel.sequence import Runs


class OtherGrid(ParallelMesh):
    """Another layout of the ranks of a mesh. It has the groups of that mesh, which counts what they communicate."""

    def __init__(self, base: ParallelMesh, sizes: MeshSizes) -> None:
        super().__init__(rank=base.rank, world_size=base.world_size, device=base.device, timeout=base._timeout, **sizes)
        self.base = base
        self.waits, self.traffic, self.counted = base.waits, base.traffic, base.counted

    def group(self, *axes: str) -> Group:
        if axes not in self._by_axes:
            self._by_axes[axes] = self.group_of(self.ranks(*axes))
        return self._by_axes[axes]

    def _cached_group(self, kind: Kind, ranks: tuple[int, ...], timeout: datetime.timedelta | None = None) -> Group:
        return self.base._cached_group(kind, ranks, timeout)


@dataclass(frozen=True)
class Share:
    """Values of a step that a rank has, or needs.

    Attributes:
        micro_batches: their numbers, counted over all data-parallel ranks.
        places: indices of the tokens in their samples, ascending.
    """

    micro_batches: range = range(0)
    places: Runs = ()

    def common(self, other: Share) -> Share:
        """Return what is in both."""
        both = _overlap(self.micro_batches, other.micro_batches)
        runs = [_overlap(own, theirs) for own in self.places for theirs in other.places]
        return Share(both, tuple(run for run in runs if run))

    @property
    def tokens(self) -> int:
        """Number of tokens of a sample."""
        return sum(map(len, self.places))

    @property
    def rows(self) -> int:
        return len(self.micro_batches) * self.tokens

    def within(self, whole: Share) -> tuple[slice, Tensor]:
        """Return where this is in values [micro-batches, tokens, ...] of a share that has all of it."""
        start, found, before = self.micro_batches.start - whole.micro_batches.start, [torch.empty(0).long()], 0
        for run in whole.places:
            common = [_overlap(run, own) for own in self.places]
            found += [torch.arange(each.start, each.stop) - run.start + before for each in common]
            before += len(run)
        return slice(start, start + len(self.micro_batches)), torch.cat(found)


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def redistributed(values: Tensor, held: Sequence[Share], needed: Sequence[Share], mesh: ParallelMesh) -> Tensor:
    """Return what this rank needs of the values that all ranks have. Called by all ranks together.

    If several ranks have the same share, one of them sends it: the receiver itself if it is among them.

    Args:
        values: what this rank has, [micro-batches, tokens, ...]; with as many of the last dimensions if it has nothing.
        held: what each rank has; two shares are the same, or have nothing in common.
        needed: what each rank needs.

    Returns:
        The values, [micro-batches, tokens, ...].
    """
    copies: dict[Share, list[int]] = defaultdict(list)
    for rank, share in enumerate(held):
        copies[share].append(rank)

    def sent(source: int, receiver: int) -> Share:
        common = held[source].common(needed[receiver])
        if not common.rows:
            return Share()
        ranks = copies[held[source]]
        return common if source == (receiver if receiver in ranks else ranks[receiver % len(ranks)]) else Share()

    own, wanted, everyone = held[mesh.rank], needed[mesh.rank], range(mesh.world_size)
    going, coming = [sent(mesh.rank, rank) for rank in everyone], [sent(rank, mesh.rank) for rank in everyone]
    parts = (values[_on(values, each.within(own))].flatten(0, 1) for each in going if each.rows)
    sizes, arriving = ([each.rows for each in shares] for shares in (going, coming))
    rows = collectives.all_to_all_rows(torch.cat([values[:0].flatten(0, 1), *parts]), sizes, arriving, mesh.world())
    found = values.new_zeros(len(wanted.micro_batches), wanted.tokens, *values.shape[2:])
    for share, part in zip(coming, rows.split(arriving), strict=True):
        if share.rows:
            shape = len(share.micro_batches), share.tokens, *values.shape[2:]
            found[_on(values, share.within(wanted))] = part.view(shape)
    return found


def _on(values: Tensor, place: tuple[slice, Tensor]) -> tuple[slice, Tensor]:
    """Return a place in values, with its indices on their device."""
    return place[0], place[1].to(values.device)
