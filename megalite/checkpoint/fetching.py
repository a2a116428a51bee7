"""Fill the memory of a rank from the blocks of a checkpoint, of which each is verified.

A block that only one rank of a node needs is read by that rank. If the block is contiguous in its destination, it is
read directly into it. A block that several ranks need is read by one of them and sent to the others, in rounds of
bounded memory. Every rank of the node computes from the plan which rank reads which block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint import manifest, shard_file
from megalite.checkpoint.manifest import Block, Manifest, SavedBox
from megalite.checkpoint.plan import Region
from megalite.checkpoint.relayout import Origin
from megalite.checkpoint.tensors import packed
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Box
from megalite.process.host import cores
from megalite.process.progress import in_threads
from megalite.storage import AnyPath

THREADS = 4
"""Maximum number of reading threads per rank."""
ROUND = 4
"""Number of full-sized blocks that a rank sends to the others in one round."""


@dataclass(frozen=True)
class Target:
    """Box of a tensor to fill."""

    box: Box
    values: Tensor
    """View to fill, with the shape of the box."""


Wanted = Mapping[SavedBox, Sequence[Target]]
"""Targets to fill from each saved box."""

Assigned = dict[int, list[Block]]
"""Blocks that each rank reads and sends to the others, by rank."""


def fill(
    path: AnyPath,
    described: Manifest,
    chosen: Sequence[tuple[Origin, Region]],
    needs: Mapping[int, Sequence[Origin]],
    node: Group,
    place: torch.device,
    holders: Mapping[str, int] | None = None,
) -> Exception | None:
    """Read the regions, and return the failure of this rank, if any, as `fetch` does.

    If a region is a sum or a mean, its boxes are read and added one after the other, in fp64. `holders`: the rank of
    the group that can read each file, if others cannot; all ranks then have the same boxes in the same order.
    """
    failure: Exception | None = None
    totals: dict[int, Tensor] = {}
    for found, region in chosen:
        if not found.boxes:
            region.values.zero_()
    every = [found for origins in needs.values() for found in origins] or [found for found, _ in chosen]
    turns = max((len(found.boxes) for found in every), default=0)
    if holders is not None:
        turns = int(collectives.all_reduce_(torch.tensor(turns, device=place), node, "max"))
    for turn in range(turns):
        wanted: dict[SavedBox, list[Target]] = {}
        terms: list[tuple[int, Tensor]] = []
        for number, (found, region) in enumerate(chosen):
            if turn < len(found.boxes):
                saved, box = described.tensors[found.name], found.boxes[turn]
                values = (
                    region.values.view(box.size) if len(found.boxes) == 1 else torch.empty(box.size, dtype=saved.dtype)
                )
                if len(found.boxes) > 1:
                    terms.append((number, values))
                for each in saved.boxes_at(box):
                    if each.box.intersection(box) is not None:
                        wanted.setdefault(each, []).append(Target(box, values))
        if holders is not None:
            sent = [saved for saved in described.tensors.values() if turn == 0 or saved.relayout is not None]
            blocks = [block for saved in sent for box in saved.boxes for block in box.blocks()]
            failure = fetch_from_holders(path, described, wanted, blocks, holders, node, place) or failure
        else:
            failure = fetch(path, described, wanted, _assigned(described, needs, turn), node, place) or failure
        for number, values in terms:
            wide = torch.float64 if values.is_floating_point() else values.dtype
            totals[number] = totals[number] + values if number in totals else values.to(wide)
    for number, total in totals.items():
        found, region = chosen[number]
        rounding = None if total.is_floating_point() else "floor"
        mean = torch.div(total, len(found.boxes), rounding_mode=rounding) if found.mean else total
        region.values.copy_(mean.view(region.part.box.size))
    return failure


def _assigned(described: Manifest, needs: Mapping[int, Iterable[Origin]], turn: int) -> Assigned:
    """Return the blocks that several ranks of the node need in a turn, by the rank that reads them."""
    return assign({rank: _blocks(described, origins, turn) for rank, origins in needs.items()})


def _blocks(described: Manifest, origins: Iterable[Origin], turn: int) -> Iterator[Block]:
    boxes: dict[str, list[Box]] = {}
    for found in origins:
        if turn < len(found.boxes):
            boxes.setdefault(found.name, []).append(found.boxes[turn])
    for name, needed in boxes.items():
        saved = described.tensors[name]
        near = dict.fromkeys(each for box in needed for each in saved.boxes_at(box)) if saved.relayout else saved.boxes
        for each in near:
            yield from needed_blocks(each, needed)


def needed_blocks(saved: SavedBox, boxes: Iterable[Box]) -> Iterator[Block]:
    """Yield the blocks of a saved box that overlap at least one of the boxes."""
    meeting = [box for box in boxes if saved.box.intersection(box) is not None]
    whole = any(saved.box.intersection(box) == saved.box for box in meeting)
    for block in saved.blocks() if meeting else ():
        if whole or any(part.intersection(box) is not None for part, _ in block.parts() for box in meeting):
            yield block


def fetch(
    path: AnyPath, described: Manifest, wanted: Wanted, assigned: Assigned, group: Group, place: torch.device
) -> Exception | None:
    """Fill the targets, and return the failure of this rank, if any. The caller reports it to all ranks.

    A rank that fails still takes part in all communication, and sends zeros, so that the other ranks do not hang.
    `assigned` has the blocks that several ranks of the group need. They are sent from memory on the device `place`.
    """
    shared = {_place_of(block) for blocks in assigned.values() for block in blocks}
    own = [
        block
        for saved, targets in wanted.items()
        for block in needed_blocks(saved, (target.box for target in targets))
        if _place_of(block) not in shared
    ]
    threads = max(1, min(THREADS, cores() // group.size))
    failure: Exception | None = None
    try:
        in_threads(threads, partial(_read_into_place, path, described, wanted), sorted(own, key=_place_of))
    except Exception as error:
        failure = error
    most = ROUND * manifest.BLOCK
    rounds = [packed(assigned[rank], lambda block: block.size, most) for rank in group.ranks] if assigned else []
    for number in range(max(map(len, rounds), default=0)):
        now = [mine[number] if number < len(mine) else [] for mine in rounds]
        length = max(sum(map(_room, blocks)) for blocks in now)
        sent = torch.zeros(length, dtype=torch.uint8)
        if failure is None:
            try:
                for block, data in _cut(sent, now[group.rank]):
                    read_block(path, described, block, shard_file.bytes_of(data))
            except Exception as error:
                failure = error
        received = collectives.all_gather(sent.to(place), group).view(group.size, length)
        for blocks, row in zip(now, received, strict=True):
            for block, data in _cut(row, blocks):
                put(block, data, wanted.get(block.saved, ()))
    return failure


def fetch_from_holders(
    path: AnyPath,
    described: Manifest,
    wanted: Wanted,
    blocks: Iterable[Block],
    holders: Mapping[str, int],
    group: Group,
    place: torch.device,
) -> Exception | None:
    """Fill the targets as `fetch` does, where each file is on one rank only, which sends its blocks to all others.

    `blocks`: those to send, in the same order on all ranks.
    """
    of_rank: dict[int, list[Block]] = {}
    for block in blocks:
        of_rank.setdefault(holders[block.saved.file], []).append(block)
    failure: Exception | None = None
    for rank in sorted(of_rank):
        for sent in packed(of_rank[rank], lambda block: block.size, ROUND * manifest.BLOCK):
            length = sum(map(_room, sent))
            if rank == group.rank:
                data = torch.zeros(length, dtype=torch.uint8)
                try:
                    for block, part in _cut(data, sent) if failure is None else ():
                        read_block(path, described, block, shard_file.bytes_of(part))
                except Exception as error:
                    failure = error
            else:
                data = torch.empty(length, dtype=torch.uint8, device=place)
            received = collectives.broadcast_(data.to(place), rank, group)
            try:
                for block, part in _cut(received, sent):
                    put(block, part, wanted.get(block.saved, ()))
            except Exception as error:
                failure = failure or error
    return failure


def read_block(path: AnyPath, described: Manifest, block: Block, buffer: memoryview) -> None:
    """Read a block into a buffer, and verify it.

    The file is closed again, because a checkpoint may have more files than a process can have open.
    """
    name = block.saved.file
    with shard_file.open_to_read(path / name, described.files[name].size) as file:
        shard_file.read_block(file, block, buffer)


def _place_of(block: Block) -> tuple[str, int]:
    return block.saved.file, block.start


def _read_into_place(path: AnyPath, described: Manifest, wanted: Wanted, block: Block) -> None:
    targets = wanted[block.saved]
    place = contiguous_memory(block, targets)
    if place is not None:
        read_block(path, described, block, place)
        return
    buffer = torch.empty(block.size, dtype=torch.uint8)
    read_block(path, described, block, shard_file.bytes_of(buffer))
    put(block, buffer, targets)


def contiguous_memory(block: Block, targets: Sequence[Target]) -> memoryview | None:
    """Return the memory of a block in its target, or None if the block cannot be read directly into its target.

    Direct reading needs exactly one target, in which the block is contiguous in the same order as in the file.
    """
    parts = block.parts()
    meeting = [target for target in targets if any(part.intersection(target.box) is not None for part, _ in parts)]
    if len(meeting) != 1:
        return None
    saved, box, values = block.saved.box, meeting[0].box, meeting[0].values
    if values.dtype != block.saved.dtype or values.device.type != "cpu" or not values.is_contiguous():
        return None
    if (box.size[1:], box.offset[1:]) != (saved.size[1:], saved.offset[1:]):
        return None
    rows = saved.offset[0] - box.offset[0] if box.offset else 0
    first, stop = (number + rows * math.prod(box.size[1:]) for number in block.elements)
    return shard_file.bytes_of(values.view(-1)[first:stop]) if first >= 0 and stop <= box.numel else None


@torch.no_grad()
def put(block: Block, data: Tensor, targets: Sequence[Target]) -> None:
    """Copy from the bytes of a block the parts that the targets need."""
    elements = data.view(block.saved.dtype)
    for part, position in block.parts():
        values = elements[position : position + part.numel].view(part.size)
        for target in targets:
            both = part.intersection(target.box)
            if both is not None:
                target.values[both.relative_to(target.box).slices()].copy_(values[both.relative_to(part).slices()])


# ------------------------------------------------------------------------------------------------ between ranks


def assign(needs: Mapping[int, Iterable[Block]]) -> Assigned:
    """Assign each block that several ranks need to one of these ranks: the one with the fewest bytes so far.

    `needs`: by rank, the blocks that it needs, completely or in part.
    """
    needers: dict[tuple[str, int], list[int]] = {}
    blocks: dict[tuple[str, int], Block] = {}
    for rank, needed in needs.items():
        for block in needed:
            key = _place_of(block)
            blocks[key] = block
            needers.setdefault(key, []).append(rank)
    assigned: Assigned = {rank: [] for rank in needs}
    load = dict.fromkeys(needs, 0)
    for key in sorted(key for key, ranks in needers.items() if len(ranks) > 1):
        reader = min(needers[key], key=lambda rank: (load[rank], rank))
        load[reader] += blocks[key].size
        assigned[reader].append(blocks[key])
    return assigned


def _cut(data: Tensor, blocks: Iterable[Block]) -> Iterator[tuple[Block, Tensor]]:
    start = 0
    for block in blocks:
        yield block, data[start : start + block.size]
        start += _room(block)


def _room(block: Block) -> int:
    """Return the bytes that a block takes in a shared buffer, aligned for any dtype."""
    return -(-block.size // 16) * 16
