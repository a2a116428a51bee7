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
        with self.path.open("rb") as file:
            view = cast(BinaryIO, _create_file_view(file, self.start, self.length))
            return read_torch_stream(view, self.path)


class TorchDist:
    """The folder of a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where it cannot be read."""
        backend = _backend(folder)
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} has the format {backend}: read and save it as torch_dist with Megatron-LM")
        self._folder = folder
        self._last = threading.local()
        described = read_pickle(folder / ".metadata")
        try:
            self._described: Mapping[str, Any] = described.fields["state_dict_metadata"]
            self._stored: dict[tuple[str, tuple[int, ...] | None], _Stored] = {}
            for index, info in described.fields["storage_data"].items():
                place, where = info.fields, index.fields
                if place.get("transform_descriptors"):
                    raise CheckpointError(f"{folder} is compressed: save it without that with Megatron-LM")
                path = folder / place["relative_path"]
                if path.parent != folder:
                    raise CheckpointError(f"{folder / '.metadata'} names {path}, which is in no checkpoint")
                self._stored[where["fqn"], where.get("offset")] = _Stored(path, place["offset"], place["length"])
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / '.metadata'} does not describe a checkpoint: {error!r}") from error

    def common(self) -> Mapping[str, Any]:
        """What is the same on every rank, the arguments among it. Raises CheckpointError."""
        stored = self._stored.get((_COMMON, None))
        common = read_torch_file(self._folder / "common.pt") if stored is None else stored.read()
        if not isinstance(common, Mapping):
            raise CheckpointError(f"{self._folder} does not hold what is common to its ranks as a dictionary")
        return common

    def chunks(self) -> dict[str, list[Chunk]]:
        """The chunks of the network's tensors, by their canonical name. Raises CheckpointError."""
        found: dict[str, list[Chunk]] = {}
        halves: dict[str, dict[str, list[Chunk]]] = {}
        for key, described in self._described.items():
            if "chunks" not in described.fields or _OF_THE_RUN.fullmatch(key) or not is_weight(key):
                continue
            stacked = _STACKED.fullmatch(key)
            for each in described.fields["chunks"]:
                offset, size = each.fields["offsets"], each.fields["sizes"]
                dtype = _dtype(described, key)
                stored = self._stored[key, offset]
                if stacked is None:
                    self._add(found, halves, key, Chunk(Box(offset, size), dtype, partial(self._read, stored, size)))
                    continue
                for layer in range(size[0]):
                    read = partial(self._layer, stored, size, layer)
                    name = f"{stacked[1]}{offset[0] + layer}.{stacked[2]}"
                    self._add(found, halves, name, Chunk(Box(offset[1:], size[1:]), dtype, read))
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

    def _read(self, stored: _Stored, size: tuple[int, ...]) -> Tensor:
        values = stored.read()
        if not isinstance(values, Tensor) or tuple(values.shape) != size:
            raise CheckpointError(f"{stored.path} holds at byte {stored.start} no tensor {list(size)}: it is damaged")
        return values

    def _layer(self, stored: _Stored, size: tuple[int, ...], layer: int) -> Tensor:
        """A layer of a chunk that may hold several: it is kept until another is asked for."""
        if size[0] == 1:
            return self._read(stored, size)[0]
        if getattr(self._last, "stored", None) != stored:
            self._last.values = None
            self._last.values, self._last.stored = self._read(stored, size), stored
        values: Tensor = self._last.values[layer]
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


def _dtype(described: Any, key: str) -> torch.dtype:
    properties = described.fields["properties"]
    state = properties.fields.get("dtype") if properties.fields else properties.state[0]
    if not isinstance(state, torch.dtype) or not state.is_floating_point:
        raise CheckpointError(f"{key} is of {state}: no weight of a network that megalite computes")
    return state
