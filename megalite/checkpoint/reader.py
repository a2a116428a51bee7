"""Reading a checkpoint in one process: any box of any tensor, whatever cut it, in bounded memory, verified."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from megalite.checkpoint import tensor_file
from megalite.checkpoint.manifest import SavedBox, SavedTensor, covers, read_manifest
from megalite.checkpoint.storage import AnyPath
from megalite.checkpoint.tensor_file import Entry
from megalite.errors import DamagedCheckpointError
from megalite.parallel.sharding import Box

BLOCK = 1 << 22
"""Bytes that are looked at a time."""


class Damage(DamagedCheckpointError):
    """A file of a checkpoint, or a tensor in it, is not as it was written."""

    def __init__(self, path: AnyPath, problem: str, tensor: str | None = None) -> None:
        advice = "Take another checkpoint; tools/checkpoint/inspect.py --verify lists all that is damaged"
        super().__init__(f"{path}: {problem}. {advice}")
        self.file, self.problem, self.tensor = path.name, problem, tensor


class CheckpointReader:
    """The tensors of the checkpoint in folder `path`. Threads may share one, each at tensors of its own."""

    def __init__(self, path: AnyPath) -> None:
        """Raises CheckpointError where there is no checkpoint, or one whose manifest is damaged."""
        self.path, self.manifest = path, read_manifest(path)
        self._entries: dict[str, dict[str, Entry]] = {}
        self._verified: set[str | SavedBox] = set()

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor. Each saved box is verified before any of it is used.

        Raises Damage.
        """
        tensor = self.manifest.tensors[name]
        if name not in self._verified:
            self.check_covered(name)
            self._verified.add(name)
        values = np.empty(box.size, f"i{dtype_of(tensor).itemsize}")
        for saved in tensor.boxes:
            part = saved.box.intersection(box)
            if part is not None:
                source = self._mapped(saved, values.dtype)
                values[part.relative_to(box).slices()] = source[part.relative_to(saved.box).slices()]
        return torch.from_numpy(values).view(dtype_of(tensor))

    def _mapped(self, saved: SavedBox, dtype: np.dtype) -> np.ndarray:
        if saved not in self._verified:
            for _ in self.blocks(saved):
                pass
            self._verified.add(saved)
        path, start = self.path / saved.file, self._entry(saved).start
        if isinstance(path, Path):
            return np.memmap(path, dtype, "r", start, saved.box.size)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(saved.box.numel * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(saved.box.size)

    def check_covered(self, name: str) -> None:
        """Raise Damage unless the boxes of a tensor hold each of its elements once."""
        tensor = self.manifest.tensors[name]
        if not covers((saved.box for saved in tensor.boxes), whole(tensor)):
            raise Damage(self.path, f"the boxes of {name} do not hold each of its elements once", name)

    def blocks(self, saved: SavedBox) -> Iterator[Tensor]:
        """The elements of a saved box in row-major order, flat, some of them at a time.

        Raises Damage, behind the last of them where they are not those of the checksum.
        """
        entry, path, checksum = self._entry(saved), self.path / saved.file, 0
        try:
            with path.open("rb") as file:
                file.seek(entry.start)
                for start in range(entry.start, entry.stop, BLOCK):
                    block = np.empty(min(BLOCK, entry.stop - start), np.uint8)
                    if file.readinto(block.data) < len(block):
                        raise Damage(path, "it was cut off while it was read", saved.tensor)
                    checksum = zlib.crc32(block.data, checksum)
                    yield torch.from_numpy(block).view(dtype_of(self.manifest.tensors[saved.tensor]))
        except OSError as error:
            raise Damage(path, f"{saved.entry} cannot be read: {error.strerror}", saved.tensor) from error
        if checksum != saved.checksum:
            raise Damage(path, f"the checksum of {saved.entry} does not match", saved.tensor)

    def _entry(self, saved: SavedBox) -> Entry:
        """Where a saved box stands in its file. Raises Damage where the file does not have it as the manifest does."""
        entry = self.entries(saved.file).get(saved.entry)
        dtype = self.manifest.tensors[saved.tensor].dtype
        if entry is None or (entry.shape, entry.dtype) != (saved.box.size, dtype):
            raise Damage(
                self.path / saved.file, f"it does not hold {saved.entry} as the manifest describes it", saved.tensor
            )
        return entry

    def entries(self, file: str) -> dict[str, Entry]:
        """Where each box stands in a file of the checkpoint. Raises Damage where it cannot be trusted in this."""
        if file not in self._entries:
            path, expected = self.path / file, self.manifest.files[file]
            try:
                size = path.stat().st_size
                if size != expected:
                    raise Damage(path, f"it has {size} bytes of {expected}: it was cut off or replaced")
                self._entries[file] = tensor_file.read_header(path)
            except FileNotFoundError as error:
                raise Damage(path, "it is missing") from error
            except OSError as error:
                raise Damage(path, f"it cannot be read: {error.strerror}") from error
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise Damage(path, f"its header is damaged: {error}") from error
        return self._entries[file]


def dtype_of(tensor: SavedTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def whole(tensor: SavedTensor) -> Box:
    return Box.whole(tensor.shape)


def size_in_bytes(tensor: SavedTensor) -> int:
    return whole(tensor).numel * dtype_of(tensor).itemsize


def chunks(box: Box, dtype: torch.dtype) -> Iterator[tuple[Box, int]]:
    """A box in row-major order, some bytes at a time: boxes, and how many elements stand before each."""
    step = BLOCK // dtype.itemsize
    for start in range(0, box.numel, step):
        yield from box.flat_range(start, min(start + step, box.numel))
