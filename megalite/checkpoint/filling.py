"""Fill the memory of a rank from saved values: as they are, or as a sum or mean of those of several replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.fetching import Dealt, Target, deal, fetch, needed_blocks
from megalite.checkpoint.manifest import Block, Manifest, SavedBox
from megalite.checkpoint.plan import Region
from megalite.checkpoint.relayout import Origin
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Box
from megalite.storage import AnyPath


def fill(
    path: AnyPath,
    manifest: Manifest,
    chosen: Sequence[tuple[Origin, Region]],
    needs: Mapping[int, Sequence[Origin]],
    node: Group,
    place: torch.device,
) -> Exception | None:
    """Read the regions, and return the failure of this rank, if any, as `fetch` does.

    If a region is a sum or a mean, its boxes are read and added one after the other, in fp64.
    """
    failure: Exception | None = None
    totals: dict[int, Tensor] = {}
    for found, region in chosen:
        if not found.boxes:
            region.values.zero_()
    every = [found for origins in needs.values() for found in origins] or [found for found, _ in chosen]
    for turn in range(max((len(found.boxes) for found in every), default=0)):
        wanted: dict[SavedBox, list[Target]] = {}
        terms: list[tuple[int, Tensor]] = []
        for number, (found, region) in enumerate(chosen):
            if turn < len(found.boxes):
                saved, box = manifest.tensors[found.name], found.boxes[turn]
                values = (
                    region.values.view(box.size) if len(found.boxes) == 1 else torch.empty(box.size, dtype=saved.dtype)
                )
                if len(found.boxes) > 1:
                    terms.append((number, values))
                for each in saved.boxes_at(box):
                    if each.box.intersection(box) is not None:
                        wanted.setdefault(each, []).append(Target(box, values))
        failure = fetch(path, manifest, wanted, _dealt(manifest, needs, turn), node, place) or failure
        for number, values in terms:
            wide = torch.float64 if values.is_floating_point() else values.dtype
            totals[number] = totals[number] + values if number in totals else values.to(wide)
    for number, total in totals.items():
        found, region = chosen[number]
        rounding = None if total.is_floating_point() else "floor"
        mean = torch.div(total, len(found.boxes), rounding_mode=rounding) if found.mean else total
        region.values.copy_(mean.view(region.part.box.size))
    return failure


def _dealt(manifest: Manifest, needs: Mapping[int, Iterable[Origin]], turn: int) -> Dealt:
    """Return the blocks that several ranks of the node need in a turn, by the rank that reads them."""
    return deal({rank: _blocks(manifest, origins, turn) for rank, origins in needs.items()})


def _blocks(manifest: Manifest, origins: Iterable[Origin], turn: int) -> Iterator[Block]:
    boxes: dict[str, list[Box]] = {}
    for found in origins:
        if turn < len(found.boxes):
            boxes.setdefault(found.name, []).append(found.boxes[turn])
    for name, needed in boxes.items():
        saved = manifest.tensors[name]
        near = dict.fromkeys(each for box in needed for each in saved.boxes_at(box)) if saved.relayout else saved.boxes
        for each in near:
            yield from needed_blocks(each, needed)
