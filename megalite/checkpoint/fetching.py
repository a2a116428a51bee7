"""Reading the blocks of a checkpoint into the memory of regions: only those that are needed, each verified.

A block that one rank of a node needs it reads itself, straight into place where it lies there in one piece. One that
several need is read by one of them and handed to the others in rounds of bounded memory. Who reads what every rank of
the node knows from the plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint import box_file, manifest
from megalite.checkpoint.manifest import Block, Manifest, SavedBox
from megalite.checkpoint.progress import in_threads
from megalite.checkpoint.storage import AnyPath
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Box

THREADS = 4
"""At most, of a rank that reads."""
ROUND = 4
"""Blocks that a rank hands out at a time, if they are of full size."""


@dataclass(frozen=True)
class Target:
    """A box to fill from a tensor."""

    box: Box
    values: Tensor
    """A view, of the box's shape."""


Wanted = Mapping[SavedBox, Sequence[Target]]
"""What is to be filled from each saved box."""

Dealt = dict[int, list[Block]]
"""By rank: the blocks that it reads for others."""


def needed_blocks(saved: SavedBox, boxes: Iterable[Box]) -> Iterator[Block]:
    """The blocks of a saved box in which there is some of one of the boxes."""
    meeting = [box for box in boxes if saved.box.intersection(box) is not None]
    whole = any(saved.box.intersection(box) == saved.box for box in meeting)
    for block in saved.blocks() if meeting else ():
        if whole or any(part.intersection(box) is not None for part, _ in block.parts() for box in meeting):
            yield block


def fetch(
    path: AnyPath, described: Manifest, wanted: Wanted, dealt: Dealt, group: Group, place: torch.device
) -> Exception | None:
    """Fill the targets. All ranks of the group take part, to the end even where one has failed; gives its failure.

    `dealt`: the blocks that several of them need; these travel on the device `place`.
    """
    shared = {_place_of(block) for blocks in dealt.values() for block in blocks}
    own = [
        block
        for saved, targets in wanted.items()
        for block in needed_blocks(saved, (target.box for target in targets))
        if _place_of(block) not in shared
    ]
    threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // group.size))
    failure: Exception | None = None
    try:
        in_threads(threads, partial(_read_into_place, path, described, wanted), sorted(own, key=_place_of))
    except Exception as error:
        failure = error
    return _exchange(path, described, wanted, dealt, group, place, failure)


def read_block(path: AnyPath, described: Manifest, block: Block, buffer: memoryview) -> None:
    """Fill a buffer with a block, verified. No file stays open: a checkpoint may have more than a process may open."""
    name = block.saved.file
    with box_file.open_to_read(path / name, described.files[name].size) as file:
        box_file.read_block(file, block, buffer)


def _place_of(block: Block) -> tuple[str, int]:
    return block.saved.file, block.start


def _read_into_place(path: AnyPath, described: Manifest, wanted: Wanted, block: Block) -> None:
    targets = wanted[block.saved]
    place = in_one_piece(block, targets)
    if place is not None:
        read_block(path, described, block, place)
        return
    buffer = torch.empty(block.size, dtype=torch.uint8)
    read_block(path, described, block, box_file.bytes_of(buffer))
    put(block, buffer, targets)


def in_one_piece(block: Block, targets: Sequence[Target]) -> memoryview | None:
    """The memory of a block in the one target that has it all, where it stands there as in the file."""
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
    return box_file.bytes_of(values.view(-1)[first:stop]) if first >= 0 and stop <= box.numel else None


@torch.no_grad()
def put(block: Block, data: Tensor, targets: Sequence[Target]) -> None:
    """Copy what the targets need out of a block's bytes."""
    elements = data.view(block.saved.dtype)
    for part, position in block.parts():
        values = elements[position : position + part.numel].view(part.size)
        for target in targets:
            both = part.intersection(target.box)
            if both is not None:
                target.values[both.relative_to(target.box).slices()].copy_(values[both.relative_to(part).slices()])


# ------------------------------------------------------------------------------------------------ between ranks


def deal(needs: Mapping[int, Iterable[Block]]) -> Dealt:
    """Who reads the blocks that more than one rank needs: of these the one that has the fewest bytes to read so far.

    `needs`: by rank, the blocks of which it needs some.
    """
    needers: dict[tuple[str, int], list[int]] = {}
    blocks: dict[tuple[str, int], Block] = {}
    for rank, needed in needs.items():
        for block in needed:
            key = _place_of(block)
            blocks[key] = block
            needers.setdefault(key, []).append(rank)
    dealt: Dealt = {rank: [] for rank in needs}
    load = dict.fromkeys(needs, 0)
    for key in sorted(key for key, ranks in needers.items() if len(ranks) > 1):
        reader = min(needers[key], key=lambda rank: (load[rank], rank))
        load[reader] += blocks[key].size
        dealt[reader].append(blocks[key])
    return dealt


def _rounds(blocks: Iterable[Block]) -> list[list[Block]]:
    """A rank's blocks in as many as it hands out at a time."""
    rounds: list[list[Block]] = []
    room = 0
    for block in blocks:
        if not rounds or block.size > room:
            rounds.append([])
            room = ROUND * manifest.BLOCK
        rounds[-1].append(block)
        room -= block.size
    return rounds


def _exchange(
    path: AnyPath,
    described: Manifest,
    wanted: Wanted,
    dealt: Dealt,
    group: Group,
    place: torch.device,
    failure: Exception | None,
) -> Exception | None:
    """Read this rank's of the dealt blocks, hand them out, and fill the targets from all. A rank that has failed, as
    `failure` tells or here, hands out zeros: the others do not wait for it, and learn of it later."""
    rounds = [_rounds(dealt[rank]) for rank in group.ranks] if dealt else []
    for number in range(max(map(len, rounds), default=0)):
        now = [mine[number] if number < len(mine) else [] for mine in rounds]
        length = max(sum(map(_room, blocks)) for blocks in now)
        sent = torch.zeros(length, dtype=torch.uint8)
        if failure is None:
            try:
                for block, data in _cut(sent, now[group.rank]):
                    read_block(path, described, block, box_file.bytes_of(data))
            except Exception as error:
                failure = error
        received = collectives.all_gather(sent.to(place), group).view(group.size, length)
        for blocks, row in zip(now, received, strict=True):
            for block, data in _cut(row, blocks):
                put(block, data, wanted.get(block.saved, ()))
    return failure


def _cut(data: Tensor, blocks: Iterable[Block]) -> Iterator[tuple[Block, Tensor]]:
    start = 0
    for block in blocks:
        yield block, data[start : start + block.size]
        start += _room(block)


def _room(block: Block) -> int:
    """The bytes that it takes among others, aligned for any dtype."""
    return -(-block.size // 16) * 16
