"""QK-Clip (Kimi K2, arXiv:2507.20534): after an update, scale queries and keys of heads whose logits are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megalite.optim.layout import Slot
from megalite.optim.shard import Segment, Shard, of_slot
from megalite.parallel import collectives
from megalite.parallel.largest_logits import LargestLogits, ScaledRows
from megalite.parallel.sharding import Box, Piece
from megalite_kernels.master_weights import keep_weights_, wide_weights


class _Scaled(NamedTuple):
    """Elements [start, stop) of a bucket, in one segment of a shard, that are multiplied by a factor."""

    segment: Segment
    start: int
    stop: int
    factor: float

    def apply(self) -> None:
        part = self.segment.part(self.start - self.segment.start, self.stop - self.segment.start)
        master = part.master if part.has_master else None
        keep_weights_(wide_weights(part.parameters, master).mul_(self.factor), part.parameters, master)


_Factors = Mapping[str, Sequence[tuple[ScaledRows, Sequence[float]]]]
"""Rows of a tensor that are scaled, and the factors of the groups' logits, by the tensor's name."""


@torch.no_grad()
def clip_logits(layers: Sequence[LargestLogits], shards: Iterable[Shard]) -> None:
    """Scale the masters and the parameters of this rank's shards such that this step's logits would not be too large.

    The largest logits of all layers are brought together in one all-reduce, so that ranks which share queries or keys
    scale them by the same number.
    """
    largest = collectives.all_reduce_(torch.cat([layer.own for layer in layers]), layers[0].group, "max").tolist()
    factors: dict[str, list[tuple[ScaledRows, Sequence[float]]]] = {}
    for layer in layers:
        of_layer, largest = largest[: len(layer.own)], largest[len(layer.own) :]
        of_groups = layer.factors(of_layer)
        if min(of_groups) < 1.0:
            for rows in layer.scaled:
                factors.setdefault(rows.tensor, []).append((rows, of_groups))
    scaled = [each for shard in shards for each in _scaled(shard, factors)] if factors else []
    copies = {id(copy): copy for each in scaled for copy in each.segment.copies_of(each.start, each.stop)}
    for copy in copies.values():
        copy.begin_change()
    for each in scaled:
        each.apply()
    for copy in copies.values():
        copy.send_parameters()


def _scaled(shard: Shard, factors: _Factors) -> Iterator[_Scaled]:
    """Yield the elements of a shard that are scaled."""
    for slot in shard.bucket.slots:
        for piece in slot.parameter.sharding.pieces:
            for rows, of_groups in factors.get(piece.tensor.name, ()):
                for box, factor in _boxes(piece, rows, of_groups):
                    yield from _elements(shard, slot, piece, box, factor)


def _boxes(piece: Piece, rows: ScaledRows, of_groups: Sequence[float]) -> Iterator[tuple[Box, float]]:
    """Yield those rows of each head in a piece that are scaled, with their factor."""
    shape, (start, count) = piece.tensor.shape, (rows.rows.start, len(rows.rows))
    for index in piece.box.indices(0):
        factor = of_groups[index * len(of_groups) // shape[0]]
        box = Box((index, start, *(0,) * (len(shape) - 2)), (1, count, *shape[2:])).intersection(piece.box)
        if factor < 1.0 and box is not None:
            yield box, factor**rows.power


def _elements(shard: Shard, slot: Slot, piece: Piece, box: Box, factor: float) -> Iterator[_Scaled]:
    """Yield the elements of a box that this rank updates."""
    begin = slot.start + piece.row * math.prod(slot.parameter.shape[1:])
    for first, last in piece.box.runs_of(box):
        for segment in of_slot(slot, shard.segments):
            low, high = max(begin + first, segment.start), min(begin + last, segment.stop)
            if low < high:
                yield _Scaled(segment, low, high, factor)
