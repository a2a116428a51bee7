"""Reader of Megatron-LM's older checkpoints (`torch`): one `torch.save` file per tensor- and pipeline-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.conversion.chunked_files import Chunk
from megalite.conversion.megatron_names import TOKEN_TABLES, canonical, is_weight
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.restricted_pickle import StoredTensor
from megalite.small_files import shown

_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_MODEL = re.compile(r"model(\d{0,4})")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.*)")
_ROWS = re.compile(r".*\.(linear_qkv|linear_fc1)\.(weight|bias)")
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
NEWER_FORMAT = "they are read from torch_dist, which Megatron-LM writes with --ckpt-convert-format torch_dist"
_MOST_ENTRIES, _MOST_LEVELS, _LONGEST_KEY = 10**6, 16, 200
"""Limits for the nested dictionaries of a rank's model."""


class Legacy:
    """Checkpoint folder that contains one folder per rank."""

    def __init__(self, folder: Path) -> None:
        """Find the files of the ranks. Raises CheckpointError if some are missing."""
        self._folder = folder
        self._files = _files(folder)
        self._tensor_ranks = 1 + max(tensor for tensor, _ in self._files)
        self._pipeline_ranks = 1 + max(pipeline for _, pipeline in self._files)
        missing = (
            f"{tensor:02d}_{pipeline:03d}"
            for tensor in range(self._tensor_ranks)
            for pipeline in range(self._pipeline_ranks)
            if (tensor, pipeline) not in self._files
        )
        if lacking := list(islice(missing, 8)):
            raise CheckpointError(f"{folder} has no files of the ranks {', '.join(lacking)}: copy them there, too")

    @cached_property
    def _states(self) -> dict[tuple[int, int], Mapping[str, Any]]:
        return {rank: self._state(path) for rank, path in self._files.items()}

    def _state(self, path: Path) -> Mapping[str, Any]:
        state = read_torch_file(path)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path} has no dictionary: it is not a checkpoint")
        version = state.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or not version >= 2:
            raise CheckpointError(
                f"{path} has checkpoint_version {shown(version)}, whose queries, keys and values are in another "
                "order: read and save it with Megatron-LM, which writes 3.0"
            )
        return state

    def common(self) -> Mapping[str, Any]:
        """Return everything that the first rank has saved, including the arguments. Raises CheckpointError."""
        return self._states[0, 0]

    def chunks(self, gated: bool) -> dict[str, list[Chunk]]:
        """Return the chunks of the network's tensors, by canonical name. Raises CheckpointError.

        `gated`: the first feed-forward matrix (fc1) holds the gate, then the values that are multiplied by it.
        """
        found: dict[str, list[Chunk]] = {}
        for tensor_rank in range(self._tensor_ranks):
            for name, values in self._read_tensor_rank(tensor_rank):
                found.setdefault(name, []).extend(self._chunks(name, values, tensor_rank, gated))
        return found

    def _read_tensor_rank(self, tensor_rank: int) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the tensors of a tensor-parallel rank from all stages, each once.

        The layers are numbered over the whole network.
        """
        first, seen = 0, set()
        # Order of the stages: by the number of the model chunk, then by the pipeline rank.
        stages = [
            (int(match[1] or 0), rank, model)
            for rank in range(self._pipeline_ranks)
            for key, model in self._states[tensor_rank, rank].items()
            if isinstance(key, str) and (match := _MODEL.fullmatch(key)) and isinstance(model, Mapping)
        ]
        for _, _, model in sorted(stages, key=lambda stage: stage[:2]):
            layers = 0
            for old, values in flat_tensors(self._folder, model):
                name = canonical(old)
                if not is_weight(name):
                    continue
                if (match := _LAYER.fullmatch(name)) is not None:
                    layers = max(layers, int(match[1]) + 1)
                    name = f"decoder.layers.{first + int(match[1])}.{match[2]}"
                if name not in seen:  # the last stage of a tied model has a second copy of the word embedding
                    seen.add(name)
                    yield name, values
            first += layers

    def _chunks(self, name: str, stored: StoredTensor, rank: int, gated: bool) -> Iterator[Chunk]:
        """Yield the chunks of a tensor that a tensor-parallel rank has stored; of a replicated one, those of rank 0."""
        ranks, size = self._tensor_ranks, stored.shape
        if len(size) not in (1, 2):
            raise CheckpointError(f"{self._folder} has {name} {list(size)}, which is neither a matrix nor a row")

        def chunk(offset: int, dimension: int, size: tuple[int, ...], read: Callable[[], Tensor]) -> Chunk:
            corner = tuple(offset if each == dimension else 0 for each in range(len(size)))
            return Chunk(Box(corner, size), stored.dtype, read)

        if gated and ".linear_fc1." in name and _ROWS.fullmatch(name):
            rows = size[0] // 2
            half = (rows, *size[1:])
            yield chunk(rank * rows, 0, half, lambda: stored.read()[:rows])
            yield chunk((ranks + rank) * rows, 0, half, lambda: stored.read()[rows:])
        elif name in TOKEN_TABLES or _ROWS.fullmatch(name):
            yield chunk(rank * size[0], 0, size, stored.read)
        elif _COLUMNS.fullmatch(name) and len(size) == 2:
            yield chunk(rank * size[1], 1, size, stored.read)
        elif rank == 0:
            yield chunk(0, 0, size, stored.read)


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the paths of the files by (tensor-parallel rank, pipeline-parallel rank)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if match is None or file is None:
            continue
        if match[3] is not None:
            raise CheckpointError(f"{path} is from one of several ranks with experts: {NEWER_FORMAT}")
        found[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in found:
        raise CheckpointError(f"{folder} has no file of the first rank: {' or '.join(_FILES)} in mp_rank_00")
    return found


def flat_tensors(path: Path, model: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of nested dictionaries. A name is the keys that lead to the tensor, joined by dots.

    Raises CheckpointError if there are more entries than any network has: a malicious file may refer to one dictionary
    from many places.
    """
    levels = [("", iter(model.items()))]
    for _ in range(_MOST_ENTRIES):
        entry = next(levels[-1][1], None)
        if entry is None:
            levels.pop()
            if not levels:
                return
            continue
        key, value = entry
        name = f"{levels[-1][0]}{(key if isinstance(key, str) else shown(key))[:_LONGEST_KEY]}"
        if isinstance(value, Mapping):
            if len(levels) == _MOST_LEVELS:
                break
            levels.append((f"{name}.", iter(value.items())))
        elif isinstance(value, StoredTensor):
            yield name, value
    raise CheckpointError(f"{path} has too many nested dictionaries for a model")
