"""Memory-mapped weight files of a Hugging Face folder: safetensors, or pickles from which only tensors are read."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.tensors import Kind
from megalite.conversion.config_keys import Json
from megalite.conversion.family import CARRIED, Family
from megalite.conversion.folder_keys import check_keys
from megalite.conversion.mapping import Stored
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.restricted_pickle import StoredTensor
from megalite.small_files import LARGEST, MIB, MOST_AXES, open_regular, parse_json, read_small_file, reason, shown

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_BUFFERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
_OF_BUFFERS |= {"I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_OF_BUFFERS |= {"F8_E8M0": torch.float8_e8m0fnu}
_KINDS = _DTYPES | _OF_BUFFERS
_LONGEST_HEADER = 1 << 25
"""Maximum size of a header in bytes. A file with 100,000 tensors needs half of it."""
LARGEST_CONFIG = 4 * MIB
"""Maximum size of config.json in bytes. A file with the names of 20,000 classes has about 1 MB."""
_LONGEST_NAME = 200
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
"""Model types whose text model is described by text_config. What sees images is left out on reading."""
_RESIDENT = 1 << 26
"""Number of bytes that may be read from a mapped file before its memory is released. One larger tensor exceeds it."""


class HuggingFaceFiles:
    """Weights in a folder, by their names in the family's table."""

    def __init__(
        self, folder: Path, config: Json, family: Family, expected: frozenset[str], left_out: str | None = None
    ) -> None:
        """Open the files.

        `config`: config.json. `expected`: names that the table has for this model. `left_out`: pattern for the names of
        tensors of prediction layers.

        Raises CheckpointError if a file is unreadable or has further weights.
        """
        self._folder = folder
        self._read: dict[str, Callable[[], Tensor]] = {}
        self.tensors: dict[str, Kind] = {}
        self.left_out: list[str] = []
        unknown = []
        for name, (kind, read) in _unpacked(folder, config, family.unpack).items():
            ours = canonical_name(name, family, expected)
            if ours in expected or ours == family.head:
                if ours in self.tensors:
                    raise CheckpointError(f"{folder} has {ours} twice")
                if kind.dtype not in _DTYPES.values():
                    has = f"{folder} has {name} with the dtype {dtype_name(kind.dtype)}"
                    raise CheckpointError(f"{has}, supported are {', '.join(_DTYPES)}")
                self._read[ours], self.tensors[ours] = read, kind
            elif left_out is not None and re.fullmatch(left_out, name):
                self.left_out.append(name)
            elif not re.fullmatch(family.buffers, name):
                unknown.append(name)
        if unknown:
            some = ", ".join(name[:_LONGEST_NAME] for name in sorted(unknown)[:8])
            raise CheckpointError(f"{folder} has weights that {family.name} does not have: {some}")

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, as a view of the mapped file, or made of blocks. Raises CheckpointError."""
        try:
            return self._read[name]()
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error


def canonical_name(name: str, family: Family, expected: frozenset[str]) -> str:
    """Return the name in the family's table for a name in files. `expected`: the table's names for this model."""
    for pattern, renamed in family.renamed.items():
        name = re.sub(f"^{pattern}$", renamed, name)
    others = (ours + name.removeprefix(theirs) for theirs, ours in family.prefixes.items() if name.startswith(theirs))
    return name if name in expected else next((other for other in others if other in expected), name)


def open_files(folder: Path) -> Stored:
    """Open the files that transformers would choose."""
    together: dict[str, tuple[Kind, Callable[[], Tensor]]] = {}
    opener, paths = chosen_files(folder)
    for tensors in map(opener, paths):
        if twice := together.keys() & tensors.keys():
            raise CheckpointError(f"{folder} has {min(twice)} twice")
        together.update(tensors)
    return together


def _unpacked(folder: Path, config: Json, unpack: Callable[[Stored, Json], Stored]) -> Stored:
    """Open all files, of which pairs of blocks and scales become weights: two of a pair may be in two files."""
    together = open_files(folder)
    try:
        return unpack(together, config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def chosen_files(folder: Path) -> tuple[Callable[[Path], Stored], list[Path]]:
    """Return the files of weights that transformers would choose, and the function that opens one.

    Safetensors files come before pickles, and a single file comes before an index of several files.
    """
    for stem, suffix, opener in (("model", "safetensors", open_safetensors), ("pytorch_model", "bin", _pickled)):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if single.is_file():
            return opener, [single]
        if index.is_file():
            found = read_json(index)
            check_keys(index, found, "index")
            weight_map = found.get("weight_map")
            files = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
                raise CheckpointError(f"{index} is not an index of files in its folder")
            return opener, [folder / name for name in sorted(set(files))]
    raise CheckpointError(f"{folder} has neither model.safetensors nor an index of such files")


def read_json(path: Path, *, largest: int = LARGEST) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        found = parse_json(read_small_file(path, largest=largest, folder=path.parent).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def sees_images(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is of a model that also sees images, whose text model it describes in a part."""
    return config.get("model_type") in _WITH_IMAGES and isinstance(config.get("text_config"), dict)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; of a model that also sees images, the part that describes its text model.

    Raises CheckpointError.
    """
    path = folder / "config.json"
    config = read_json(path, largest=LARGEST_CONFIG)
    if not sees_images(config):
        return config
    text = config["text_config"]
    check_keys(path, config, "with_images")
    tied = "tie_word_embeddings"
    if (ours := text.get(tied, config.get(tied))) != config.get(tied, ours):
        raise CheckpointError(f"{path}: {tied} is {shown(config[tied])}, but {shown(ours)} in text_config")
    of_both = {name: config[name] for name in (*CARRIED, tied, "quantization_config") if name in config}
    return {"model_type": f"{config['model_type']}_text", **of_both, **text}


def open_safetensors(path: Path) -> Stored:
    """Open a safetensors file (https://huggingface.co/docs/safetensors). Little of it is resident while it is read."""
    try:
        with open_regular(path, folder=path.parent) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        entries = _entries(content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    lock, handed_out = Lock(), dict[str, int]()

    def read(name: str) -> Tensor:
        kind, start = entries[name]
        with lock:
            if name not in handed_out and sum(handed_out.values()) + kind.size > _RESIDENT:
                content.madvise(mmap.MADV_DONTNEED)  # pages that are still in use are read from the file again
                handed_out.clear()
            handed_out[name] = kind.size
        count = kind.size // kind.dtype.itemsize
        return torch.frombuffer(content, dtype=kind.dtype, count=count, offset=start).view(kind.shape)

    return {name: (kind, partial(read, name)) for name, (kind, _) in entries.items()}


def _entries(content: mmap.mmap) -> dict[str, tuple[Kind, int]]:
    """Return the tensors of a file by name, each with its position, after checking that they fill it without gaps.

    Raises ValueError.
    """
    if content[:8] == b"version ":
        raise ValueError("it is a pointer of Git LFS, which git lfs pull replaces by the file")
    length = int.from_bytes(content[:8], "little")
    end = 8 + length
    if length > _LONGEST_HEADER or end > len(content):
        raise ValueError(f"a header of {length:,} bytes in a file of {len(content):,}")
    if content[8:9] != b"{":
        raise ValueError("its header is not a JSON object")
    header: dict[str, Any] = parse_json(content[8:end].decode())
    _check_metadata(header.pop("__metadata__", {}))
    found = {name: _entry(name, fields, end) for name, fields in header.items()}
    for name, (kind, start) in sorted(found.items(), key=lambda item: (item[1][1], item[1][0].size)):
        if start != end:
            raise ValueError(f"{name} begins at byte {start}, but the tensor before it ends at {end}")
        end += kind.size
    if end != len(content):
        raise ValueError(f"its tensors end at byte {end}, but the file at {len(content)}")
    return found


def _check_metadata(metadata: Any) -> None:
    """Raise ValueError unless all values in the header's metadata are texts."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    for text in (*metadata, *metadata.values()):
        text.encode()  # fails for half of a surrogate pair, which is not a character


def _entry(name: str, fields: Any, header: int) -> tuple[Kind, int]:
    """Return a tensor, and its position in a file whose header ends at byte `header`. Raises ValueError."""
    _check_name(name)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have just a dtype, a shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _KINDS:
        raise ValueError(f"{name} has the dtype {str(dtype)[:_LONGEST_NAME]}, supported are {', '.join(_DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or the offsets of {name} are not whole numbers of 0 or more, or are too many")
    kind, (start, stop) = Kind(tuple(shape), _KINDS[dtype]), offsets
    if math.prod(size or 1 for size in shape) * kind.dtype.itemsize >= 2**63 or stop - start != kind.size:
        raise ValueError(f"{name} of shape {str(shape)[:_LONGEST_NAME]} does not take bytes {start} to {stop}")
    return kind, header + start


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MOST_AXES:
        return False
    return all(type(value) is int and value >= 0 for value in values)


def _check_name(name: object) -> None:
    """Raise ValueError if the name of a tensor is too long or not printable."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ValueError(f"a tensor is called {shown(name)}")


def _pickled(path: Path) -> Stored:
    """Open a file written by torch.save, from which only tensors are read."""
    try:
        open_regular(path, folder=path.parent).close()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    loaded = read_torch_file(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} has no tensors by name")
    try:
        for name in loaded:
            _check_name(name)
    except ValueError as error:
        raise CheckpointError(f"{path} has no tensors by name: {error}") from error
    tensors = {name: value for name, value in loaded.items() if isinstance(value, StoredTensor)}
    return {name: (Kind(value.shape, value.dtype), value.read) for name, value in tensors.items()}
