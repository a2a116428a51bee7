"""Reading Megatron-LM's distributed checkpoints (`torch_dist`): folders of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from megalite.conversion.chunked_files import Chunk
from megalite.conversion.megatron_names import canonical, is_weight
from megalite.conversion.restricted_pickle import read_pickle, read_torch_file, read_torch_stream
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

_OF_THE_RUN = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.*)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_COMMON = "common_state/shard_0_1"


@dataclass(frozen=True)
class _Stored:
    """Where an archive of `torch.save` stands."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        """Its content. Raises CheckpointError."""
        try:
            with self.path.open("rb") as file:
                view = cast(BinaryIO, _create_file_view(file, self.start, self.length))
                return read_torch_stream(view, self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error


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
        described = read_pickle(path)
        try:
            stored = {
                (index.fields["fqn"], index.fields.get("offset")): self._place(info.fields)
                for index, info in described.fields["storage_data"].items()
            }
            self._common = stored.get((_COMMON, None))
            self._saved = [
                _Saved(key, _dtype(key, tensor.fields["properties"]), offset, size, stored[key, offset])
                for key, tensor in described.fields["state_dict_metadata"].items()
                if "chunks" in tensor.fields and not _OF_THE_RUN.fullmatch(key) and is_weight(key)
                for chunk in tensor.fields["chunks"]
                for offset, size in [(chunk.fields["offsets"], chunk.fields["sizes"])]
            ]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not describe a checkpoint ({error!r}): it is damaged") from error

    def _place(self, info: Mapping[str, Any]) -> _Stored:
        path = self._folder / info["relative_path"]
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

    def chunks(self) -> dict[str, list[Chunk]]:
        """The chunks of the network's tensors, by their canonical name. Raises CheckpointError."""
        found: dict[str, list[Chunk]] = {}
        halves: dict[str, dict[str, list[Chunk]]] = {}
        for saved in self._saved:
            stacked = _STACKED.fullmatch(saved.key)
            if stacked is None:
                box, read = Box(saved.offset, saved.size), partial(_read, saved)
                self._add(found, halves, saved.key, Chunk(box, saved.dtype, read))
                continue
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


def _read(saved: _Saved) -> Tensor:
    values = saved.stored.read()
    if not isinstance(values, Tensor) or tuple(values.shape) != saved.size or values.dtype != saved.dtype:
        at = f"{saved.stored.path}, byte {saved.stored.start}"
        raise CheckpointError(f"{at}: there is no {saved.key} {list(saved.size)} of {saved.dtype}: it is damaged")
    return values


def _backend(folder: Path) -> str:
    """What metadata.json says, or what else stands there."""
    try:
        described = json.loads((folder / "metadata.json").read_text())
        return str(described["sharded_backend"])
    except FileNotFoundError:
        return "torch_dcp or fsdp_dtensor"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read ({error}): it is damaged") from error


def _dtype(key: str, properties: Any) -> torch.dtype:
    dtype = properties.fields["dtype"] if properties.fields else properties.state[0]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{key} is of {dtype}: no weight of a network that megalite computes")
    return dtype
