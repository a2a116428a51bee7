"""Reading Megatron-LM's distributed checkpoints (`torch_dist`): folders of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.conversion.chunked_files import Chunk
from megalite.conversion.megatron_names import canonical, is_weight
from megalite.conversion.restricted_pickle import StoredTensor, read_pickle
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.small_files import MIB, MOST_AXES, read_json, shown

_OF_THE_RUN = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.*)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_COMMON = "common_state/shard_0_1"
_LONGEST_NAME = 1000
_LARGEST_METADATA = 256 * MIB
"""Bytes of `.metadata`: some 150 for each chunk, a million of which are 1,000 tensors on 1,000 ranks."""


@dataclass(frozen=True)
class _Stored:
    """Where an archive of `torch.save` stands."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        """Its content. Raises CheckpointError."""
        return read_torch_file(self.path, self.start, self.length)


@dataclass(frozen=True)
class _Saved:
    """A chunk of a tensor by its key, and where it stands."""

    key: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stored: _Stored


class TorchDist:
    """The folder of a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where it cannot be read."""
        backend = _backend(folder)
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} has the format {backend}: read and save it as torch_dist with Megatron-LM")
        self._folder = folder
        self._last = threading.local()
        path = folder / ".metadata"
        described = read_pickle(path, largest=_LARGEST_METADATA)
        try:
            stored = {
                _key(_name(index.fields["fqn"]), _numbers(index.fields.get("offset") or ())): self._place(info.fields)
                for index, info in described.fields["storage_data"].items()
            }
            self._common = stored.get(_key(_COMMON, ()))
            self._saved = [
                _saved(
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
            raise CheckpointError(f"{path} is compressed: save it without that with Megatron-LM")
        return _Stored(path, info["offset"], info["length"])

    def common(self) -> Mapping[str, Any]:
        """What is the same on every rank, the arguments among it. Raises CheckpointError."""
        common = read_torch_file(self._folder / "common.pt") if self._common is None else self._common.read()
        if isinstance(common, list) and len(common) == 1:  # one for each piece of an object
            (common,) = common
        if not isinstance(common, Mapping):
            raise CheckpointError(f"{self._folder} does not hold what is common to its ranks as a dictionary")
        return common

    def chunks(self, layers: int) -> dict[str, list[Chunk]]:
        """The chunks of the tensors of a network of so many layers, by their canonical name. Raises CheckpointError."""
        found: dict[str, list[Chunk]] = {}
        halves: dict[str, dict[str, list[Chunk]]] = {}
        for saved in self._saved:
            stacked = _STACKED.fullmatch(saved.key)
            if stacked is None:
                box, read = Box(saved.offset, saved.size), partial(_read, saved)
                self._add(found, halves, saved.key, Chunk(box, saved.dtype, read))
                continue
            if saved.offset[0] + saved.size[0] > layers:
                last = saved.offset[0] + saved.size[0]
                raise CheckpointError(f"{self._folder} has {saved.key} of {last} layers, the network {layers}")
            box = Box(saved.offset[1:], saved.size[1:])
            for layer in range(saved.size[0]):
                name = f"{stacked[1]}{saved.offset[0] + layer}.{stacked[2]}"
                self._add(found, halves, name, Chunk(box, saved.dtype, partial(self._layer, saved, layer)))
        for name, of_name in halves.items():
            gate, up = of_name.get("w", []), of_name.get("v", [])
            rows = max((chunk.box.offset[0] + chunk.box.size[0] for chunk in gate), default=0)
            found[name] = [*gate, *(chunk.rows_from(rows) for chunk in up)]
        return found

    @staticmethod
    def _add(found: dict[str, list[Chunk]], halves: dict[str, dict[str, list[Chunk]]], name: str, chunk: Chunk) -> None:
        """Under its name, or as a part of the gate (w) or of what it gates (v) where each has a tensor of its own."""
        name = canonical(name)
        half = _HALF.fullmatch(name)
        if half is None:
            found.setdefault(name, []).append(chunk)
        else:
            halves.setdefault(half[1], {}).setdefault(half[2], []).append(chunk)

    def _layer(self, saved: _Saved, layer: int) -> Tensor:
        """A layer of a chunk that may hold several: it is kept until another is asked for."""
        if saved.size[0] == 1:
            return _read(saved)[0]
        if getattr(self._last, "saved", None) != saved:
            self._last.values = None
            self._last.values, self._last.saved = _read(saved), saved
        values: Tensor = self._last.values[layer]
        return values


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise TypeError(f"{shown(value)} is no name")
    return value


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > MOST_AXES or not all(map(_is_number, values)):
        raise TypeError(f"{shown(values)} is neither a size nor an offset")
    return values


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _key(name: str, offset: tuple[int, ...]) -> tuple[str, str]:
    """Give what a chunk's place is found by: texts, since numbers can be chosen so that all have the same hash."""
    return name, str(offset)


def _saved(key: str, dtype: torch.dtype, offset: tuple[int, ...], size: tuple[int, ...], stored: _Stored) -> _Saved:
    """A chunk, which has not more bytes than where it is said to stand. Raises TypeError, ValueError."""
    if not 1 <= len(size) == len(offset) <= 3 or min(offset) < 0 or min(size) < 1:
        raise ValueError(f"{key} has a chunk that is no box")
    if math.prod(size) * dtype.itemsize > stored.length:
        raise ValueError(f"{key} has a chunk of more bytes than its place")
    return _Saved(key, dtype, offset, size, stored)


def _read(saved: _Saved) -> Tensor:
    values = saved.stored.read()
    if not isinstance(values, StoredTensor) or values.shape != saved.size or values.dtype != saved.dtype:
        at = f"{saved.stored.path}, byte {saved.stored.start}"
        raise CheckpointError(f"{at}: there is no {saved.key} {list(saved.size)} of {saved.dtype}: it is damaged")
    return values.read()


def _backend(folder: Path) -> str:
    """What metadata.json says, or what else stands there."""
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
        raise CheckpointError(f"{key} is of {shown(dtype)}: no weight of a network that megalite computes")
    return dtype
