"""Reader of Megatron-LM's distributed checkpoints (`torch_dist`), which torch.distributed.checkpoint (DCP) writes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.conversion.chunked_files import Chunk
from megalite.conversion.dcp_files import DCPFiles, SavedChunk
from megalite.conversion.mapping import LastTensor
from megalite.conversion.megatron_names import canonical, is_weight
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.small_files import MIB, read_json

_OF_THE_RUN = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
"""Names of the optimizer's state that is saved by parameter: the state, and the parameter."""
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.*)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_OF_EXPERT = re.compile(r"(.*\.mlp\.experts\.experts\.)(\d{1,7})\.(.*)")
_COMMON = "common_state/shard_0_1"


class TorchDist:
    """Folder of a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. Raises CheckpointError if it cannot be read."""
        backend = _backend(folder)
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} has the format {backend}: read and save it as torch_dist with Megatron-LM")
        self._folder = folder
        self._last = LastTensor()
        self._files = DCPFiles(folder)
        self._keys: dict[str, list[tuple[str, str]]] = {"": []}
        """Names and keys of the tensors of each state; of the weights, whose state is an empty text."""
        for key in self._files.keys:
            of_state = _STATE.fullmatch(key)
            state, name = of_state.groups() if of_state else ("", key)
            if not _OF_THE_RUN.fullmatch(name) and is_weight(name):
                self._keys.setdefault(state, []).append((name, key))
        self._saved = {"": self._chunks_of("")}

    def common(self) -> Mapping[str, Any]:
        """Return the data that all ranks share, including the arguments. Raises CheckpointError."""
        common = self._files.read(_COMMON)
        if common is None:
            common = read_torch_file(self._folder / "common.pt")
        if isinstance(common, list) and len(common) == 1:  # DCP stores an object as a list of its pieces
            (common,) = common
        if not isinstance(common, Mapping):
            raise CheckpointError(f"{self._folder} does not have the state common to its ranks as a dictionary")
        return common

    @property
    def states(self) -> set[str]:
        """Names of the optimizer's state that is saved by parameter, such as exp_avg."""
        return {*self._keys} - {""}

    def chunks(self, layers: int, state: str = "") -> dict[str, list[Chunk]]:
        """Return the chunks of the tensors of a network with this many layers, by canonical name.

        `state`: one of `states`, of which there are such tensors, too; the weights by default. Raises CheckpointError.
        """
        found: defaultdict[str, list[Chunk]] = defaultdict(list)
        if state not in self._saved:
            self._saved[state] = self._chunks_of(state)
        for saved in self._saved[state]:
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

    def _chunks_of(self, state: str) -> list[SavedChunk]:
        """Return the chunks of the weights, or of a state. Raises CheckpointError."""
        return [replace(chunk, key=name) for name, key in self._keys[state] for chunk in self._files.chunks(key)]

    def _layer(self, saved: SavedChunk, layer: int) -> Tensor:
        """Return one layer of a chunk. A chunk of several layers stays in memory until another one is read."""
        if saved.size[0] == 1:
            return saved.read()[0]
        return self._last.get(saved, saved.read)[layer]


def _backend(folder: Path) -> str:
    """Return the format in metadata.json or, without this file, the formats that the folder may have."""
    try:
        described = read_json(folder / "metadata.json", largest=MIB, folder=folder)
        return str(described["sharded_backend"])[:80]
    except FileNotFoundError:
        return "torch_dcp or fsdp_dtensor"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read ({error}): it is damaged") from error
