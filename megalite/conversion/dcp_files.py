"""Reader of folders of torch.distributed.checkpoint (DCP): `.metadata`, a pickle, and files of archives of torch.save.

`.metadata` lists the tensors with the chunks that ranks have saved, and where the archive of each chunk is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.restricted_pickle import Record, StoredTensor, read_pickle
from megalite.small_files import MIB, MOST_AXES, is_count, shown

METADATA = ".metadata"
_MOST_AXES = 4  # layers, experts, and those of a matrix
_LONGEST_NAME = 1000
_LARGEST_METADATA = 256 * MIB
"""Maximum size of `.metadata` in bytes: about 150 per chunk, and 1,000 tensors on 1,000 ranks are a million chunks."""


@dataclass(frozen=True)
class _Place:
    """Position of an archive of `torch.save` in a file."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        """Read the archive. Raises CheckpointError."""
        return read_torch_file(self.path, self.start, self.length)


@dataclass(frozen=True)
class SavedChunk:
    """Chunk of a tensor, with the tensor's key and the chunk's position."""

    key: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: _Place

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if the chunk is not a box, or if its archive is too small for it."""
        if not 1 <= len(self.size) == len(self.offset) <= _MOST_AXES or min(self.offset) < 0 or min(self.size) < 1:
            raise ValueError(f"{self.key} has a chunk that is not a box")
        if math.prod(self.size) * self.dtype.itemsize > self.place.length:
            raise ValueError(f"{self.key} has a chunk of more bytes than its place")

    def read(self) -> Tensor:
        """Read the chunk. Raises CheckpointError."""
        values = self.place.read()
        if not isinstance(values, StoredTensor) or values.shape != self.size or values.dtype != self.dtype:
            at = f"{self.place.path}, byte {self.place.start}"
            raise CheckpointError(f"{at}: there is no {self.key} {list(self.size)} of {self.dtype}: it is damaged")
        return values.read()


class DCPFiles:
    """Folder of a checkpoint that DCP has written."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. Raises CheckpointError if it cannot be read."""
        self.folder = folder
        described = read_pickle(folder / METADATA, largest=_LARGEST_METADATA)
        with self._as_damage():
            self._places = {
                _key(_name(index.fields["fqn"]), _numbers(index.fields.get("offset") or ())): self._place(info.fields)
                for index, info in described.fields["storage_data"].items()
            }
            self._tensors: dict[str, Record] = {
                _name(key): tensor
                for key, tensor in described.fields["state_dict_metadata"].items()
                if "chunks" in tensor.fields
            }

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the tensors, of whatever dtype."""
        return tuple(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which its chunks need not have. Raises CheckpointError."""
        with self._as_damage():
            return _numbers(self._tensors[key].fields["size"])

    def chunks(self, key: str) -> list[SavedChunk]:
        """Return the chunks of a tensor of floating point. A chunk is returned once.

        A rank may have saved a chunk without elements, which is left out. Raises CheckpointError.
        """
        tensor = self._tensors[key]
        with self._as_damage():
            boxes = [
                (_numbers(each.fields["offsets"]), _numbers(each.fields["sizes"])) for each in tensor.fields["chunks"]
            ]
            dtype = _dtype(key, tensor.fields["properties"])
            return [
                SavedChunk(key, dtype, offset, size, self._places.pop(_key(key, offset)))
                for offset, size in boxes
                if 0 not in size
            ]

    def read(self, key: str) -> Any:
        """Return an object that is not a tensor; None if there is none. Raises CheckpointError."""
        place = self._places.get(_key(key, ()))
        return None if place is None else place.read()

    def _place(self, info: Mapping[str, Any]) -> _Place:
        path = self.folder / _name(info["relative_path"])
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder / METADATA} names {path}, which is not in its folder")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{path} is compressed: save it uncompressed")
        return _Place(path, info["offset"], info["length"])

    @contextmanager
    def _as_damage(self) -> Iterator[None]:
        """Raise CheckpointError for the errors of values that have other types than those of DCP."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = repr(error)[:200]
            path = self.folder / METADATA
            raise CheckpointError(f"{path} does not describe a checkpoint ({problem}): it is damaged") from error


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise TypeError(f"{shown(value)} is not a name")
    return value


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > MOST_AXES or not all(map(is_count, values)):
        raise TypeError(f"{shown(values)} is neither a size nor an offset")
    return values


def _key(name: str, offset: tuple[int, ...]) -> tuple[str, str]:
    """Return the key for a chunk's position in the dictionary.

    It consists of strings, because a malicious file could choose numbers that all have the same hash.
    """
    return name, str(offset)


def _dtype(key: str, properties: Any) -> torch.dtype:
    dtype = properties.fields["dtype"] if properties.fields else properties.state[0]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{key} has dtype {shown(dtype)}, which no weight in megalite has")
    return dtype
