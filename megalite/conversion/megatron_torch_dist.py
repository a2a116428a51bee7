"""Reader of Megatron-LM's distributed checkpoints (`torch_dist`), which torch.distributed.checkpoint (DCP) writes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.conversion.chunked_files import Chunk
from megalite.conversion.mapping import LastTensor
from megalite.conversion.megatron_names import canonical, is_weight
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.restricted_pickle import StoredTensor, read_pickle
from megalite.small_files import MIB, MOST_AXES, is_count, read_json, shown

_OF_THE_RUN = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.*)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_OF_EXPERT = re.compile(r"(.*\.mlp\.experts\.experts\.)(\d{1,7})\.(.*)")
_MOST_AXES = 4  # layers, experts, and those of a matrix
_COMMON = "common_state/shard_0_1"
_LONGEST_NAME = 1000
_LARGEST_METADATA = 256 * MIB
"""Maximum size of `.metadata` in bytes: about 150 per chunk, and 1,000 tensors on 1,000 ranks are a million chunks."""


@dataclass(frozen=True)
class _Stored:
    """Position of an archive of `torch.save` in a file."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        """Read the archive. Raises CheckpointError."""
        return read_torch_file(self.path, self.start, self.length)


@dataclass(frozen=True)
class _Saved:
    """Chunk of a tensor, with the tensor's key and the chunk's position."""

    key: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stored: _Stored

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if the chunk is not a box, or if its archive is too small for it."""
        if not 1 <= len(self.size) == len(self.offset) <= _MOST_AXES or min(self.offset) < 0 or min(self.size) < 1:
            raise ValueError(f"{self.key} has a chunk that is not a box")
        if math.prod(self.size) * self.dtype.itemsize > self.stored.length:
            raise ValueError(f"{self.key} has a chunk of more bytes than its place")

    def read(self) -> Tensor:
        """Read the chunk. Raises CheckpointError."""
        values = self.stored.read()
        if not isinstance(values, StoredTensor) or values.shape != self.size or values.dtype != self.dtype:
            at = f"{self.stored.path}, byte {self.stored.start}"
            raise CheckpointError(f"{at}: there is no {self.key} {list(self.size)} of {self.dtype}: it is damaged")
        return values.read()


class TorchDist:
    """Folder of a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. Raises CheckpointError if it cannot be read."""
        backend = _backend(folder)
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} has the format {backend}: read and save it as torch_dist with Megatron-LM")
        self._folder = folder
        self._last = LastTensor()
        path = folder / ".metadata"
        described = read_pickle(path, largest=_LARGEST_METADATA)
        try:
            stored = {
                _key(_name(index.fields["fqn"]), _numbers(index.fields.get("offset") or ())): self._place(info.fields)
                for index, info in described.fields["storage_data"].items()
            }
            self._common = stored.get(_key(_COMMON, ()))
            self._saved = [
                _Saved(
                    _name(key), _dtype(key, tensor.fields["properties"]), offset, size, stored.pop(_key(key, offset))
                )
                for key, tensor in described.fields["state_dict_metadata"].items()
                if "chunks" in tensor.fields and not _OF_THE_RUN.fullmatch(key) and is_weight(key)
                for chunk in tensor.fields["chunks"]
                for offset, size in [(_numbers(chunk.fields["offsets"]), _numbers(chunk.fields["sizes"]))]
            ]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = repr(error)[:200]
            raise CheckpointError(f"{path} does not describe a checkpoint ({problem}): it is damaged") from error

    def _place(self, info: Mapping[str, Any]) -> _Stored:
        path = self._folder / _name(info["relative_path"])
        if path.parent != self._folder:
            raise CheckpointError(f"{self._folder / '.metadata'} names {path}, which is not in its folder")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{path} is compressed: save it uncompressed with Megatron-LM")
        return _Stored(path, info["offset"], info["length"])

    def common(self) -> Mapping[str, Any]:
        """Return the data that all ranks share, including the arguments. Raises CheckpointError."""
        common = read_torch_file(self._folder / "common.pt") if self._common is None else self._common.read()
        if isinstance(common, list) and len(common) == 1:  # DCP stores an object as a list of its pieces
            (common,) = common
        if not isinstance(common, Mapping):
            raise CheckpointError(f"{self._folder} does not have the state common to its ranks as a dictionary")
        return common

    def chunks(self, layers: int) -> dict[str, list[Chunk]]:
        """Return the chunks of the tensors of a network with this many layers, by canonical name.

        Raises CheckpointError.
        """
        found: defaultdict[str, list[Chunk]] = defaultdict(list)
        for saved in self._saved:
            stacked = _STACKED.fullmatch(saved.key)
            if stacked is None:
                chunk = Chunk(Box(saved.offset, saved.size), saved.dtype, saved.read)
                found[canonical(saved.key)].append(chunk)
                continue
            first, count = saved.offset[0], saved.size[0]
            if first + count > layers:
                raise CheckpointError(f"{self._folder} has {saved.key} of {first + count} layers, the network {layers}")
            box = Box(saved.offset[1:], saved.size[1:])
            for layer in range(count):
                name = canonical(f"{stacked[1]}{first + layer}.{stacked[2]}")
                found[name].append(Chunk(box, saved.dtype, partial(self._layer, saved, layer)))
        # The gate (w) and the gated values (v) may be separate tensors. They become the two halves of one tensor.
        for name in {half[1]: None for name in found if (half := _HALF.fullmatch(name))}:
            gate, up = found.pop(f"{name}_w", []), found.pop(f"{name}_v", [])
            rows = max((chunk.box.offset[0] + chunk.box.size[0] for chunk in gate), default=0)
            found[name] = [*gate, *(chunk.rows_from(rows) for chunk in up)]
        # Each expert may have its own tensors. They become one tensor with the experts along its first axis.
        for name, one in {name: one for name in found if (one := _OF_EXPERT.fullmatch(name))}.items():
            found[one[1] + one[3]] += [chunk.of_row(int(one[2])) for chunk in found.pop(name)]
        return dict(found)

    def _layer(self, saved: _Saved, layer: int) -> Tensor:
        """Return one layer of a chunk. A chunk of several layers stays in memory until another one is read."""
        if saved.size[0] == 1:
            return saved.read()[0]
        return self._last.get(saved, saved.read)[layer]


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


def _backend(folder: Path) -> str:
    """Return the format in metadata.json or, without this file, the formats that the folder may have."""
    try:
        described = read_json(folder / "metadata.json", largest=MIB, folder=folder)
        return str(described["sharded_backend"])[:80]
    except FileNotFoundError:
        return "torch_dcp or fsdp_dtensor"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read ({error}): it is damaged") from error


def _dtype(key: str, properties: Any) -> torch.dtype:
    dtype = properties.fields["dtype"] if properties.fields else properties.state[0]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{key} has dtype {shown(dtype)}, which no weight in megalite has")
    return dtype
