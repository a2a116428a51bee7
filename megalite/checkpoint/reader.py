"""Reader of a checkpoint in one process, in bounded memory. It reads any box of any tensor, and verifies the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import local

import torch
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.fetching import Target, contiguous_memory, needed_blocks, put, read_block
from megalite.checkpoint.integrity import CorruptFileError, covers
from megalite.checkpoint.manifest import Block, SavedBox, read_manifest
from megalite.checkpoint.shard_file import bytes_of, checksum_of, open_to_read
from megalite.errors import CorruptCheckpointError
from megalite.parallel.sharding import Box
from megalite.storage import AnyPath

_RECENT_BLOCKS = 8
"""Number of blocks that a thread keeps. They help if a tensor is read in other boxes than it was saved in."""


class CheckpointReader:
    """Reader of the tensors of a checkpoint (a `Source`). Threads may share one."""

    def __init__(self, path: AnyPath) -> None:
        """Read the manifest of the checkpoint in folder `path`. Raises CheckpointError if it is missing or damaged."""
        self.path, self.manifest = path, read_manifest(path)
        self._checked_coverage: set[str] = set()
        self._recent_blocks = _RecentBlocks()
        self.tensors = self.manifest.tensors

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor. All bytes are verified. Raises CorruptFileError."""
        values = torch.empty(box.size, dtype=self.tensors[name].dtype)
        self.fill(name, box, values)
        return values

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values`, as in `Source`. All bytes are verified. Raises CorruptFileError."""
        if name not in self._checked_coverage:
            self.check_covered(name)
            self._checked_coverage.add(name)
        target = Target(box, values)
        for saved in self.manifest.tensors[name].boxes:
            for block in needed_blocks(saved, [box]):
                place = contiguous_memory(block, [target])
                if place is None:
                    put(block, self._block(block), [target])
                else:
                    read_block(self.path, self.manifest, block, place)

    def check_covered(self, name: str) -> None:
        """Raise CorruptFileError unless the boxes of a tensor contain each of its elements once."""
        tensor = self.manifest.tensors[name]
        try:
            covered = covers((saved.box for saved in tensor.boxes), tensor.whole)
        except CorruptCheckpointError as error:
            raise CorruptFileError(self.path, f"of {name}, {error}", name) from error
        if not covered:
            raise CorruptFileError(self.path, f"the boxes of {name} do not have each of its elements once", name)

    def blocks(self, saved: SavedBox) -> Iterator[Tensor]:
        """Yield the elements of a saved box in row-major order, one flat tensor per block. Raises CorruptFileError."""
        for block in saved.blocks():
            data = torch.empty(block.size, dtype=torch.uint8)
            read_block(self.path, self.manifest, block, bytes_of(data))
            yield data.view(saved.dtype)

    def _block(self, block: Block) -> Tensor:
        """Return the verified bytes of a block. The memory is reused after this thread has read a few more blocks."""
        recent, key = self._recent_blocks.blocks, (block.saved.file, block.start)
        if key not in recent:
            is_full = len(recent) == _RECENT_BLOCKS
            memory = recent.pop(next(iter(recent))) if is_full else torch.empty(manifest.BLOCK, dtype=torch.uint8)
            read_block(self.path, self.manifest, block, bytes_of(memory[: block.size]))
            recent[key] = memory
        return recent[key][: block.size]

    def check_around(self, file: str, boxes: Iterable[SavedBox]) -> None:
        """Raise CorruptFileError if the bytes of a file outside of its boxes do not match their checksum."""
        path, described = self.path / file, self.manifest.files[file]
        checksum, position = 0, 0
        with open_to_read(path, described.size) as opened:
            taken = sorted((saved.start, saved.stop) for saved in boxes)
            for start, stop in [*taken, (described.size, described.size)]:
                for first in range(position, start, manifest.BLOCK):
                    buffer = memoryview(bytearray(min(manifest.BLOCK, start - first)))
                    checksum = checksum_of(opened, first, buffer, checksum)
                position = stop
        if checksum != described.checksum:
            raise CorruptFileError(path, "the checksum of the bytes around its tensors does not match")


class _RecentBlocks(local):
    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], Tensor] = {}
        """Blocks by their position, the oldest first."""


def chunks(box: Box, dtype: torch.dtype) -> Iterator[list[tuple[Box, int]]]:
    """Yield a box in row-major order, block by block.

    A block is a list of boxes, each with the number of elements before it.
    """
    step = manifest.BLOCK // dtype.itemsize
    for start in range(0, box.numel, step):
        yield box.flat_range(start, min(start + step, box.numel))
