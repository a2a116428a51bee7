"""The files of a Hugging Face folder, mapped into memory: safetensors, or pickles that hold nothing but tensors."""

from __future__ import annotations

import json
import mmap
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.source import Kind
from megalite.conversion.family import Family
from megalite.errors import CheckpointError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_BUFFERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
_OF_BUFFERS |= {"I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_KINDS = _DTYPES | _OF_BUFFERS
_RESIDENT = 1 << 26
"""Bytes of a mapped file that are handed out before the memory of all is given back, unless one tensor has more."""


class HuggingFaceFiles:
    """The weights in a folder, by the names that the family's table has."""

    def __init__(self, folder: Path, family: Family, expected: frozenset[str]) -> None:
        """`expected`: the names of the table. Raises CheckpointError where a file cannot be read, or has more."""
        self._tensors: dict[str, _Safetensors | _Pickled] = {}
        self._named: dict[str, str] = {}
        self.tensors: dict[str, Kind] = {}
        unknown = []
        for file in _open(folder):
            for name, kind in file.tensors.items():
                ours = _canonical(name, family, expected)
                if ours in expected or ours == family.head:
                    if ours in self.tensors:
                        raise CheckpointError(f"{folder} has {ours} twice")
                    if kind.dtype not in _DTYPES.values():
                        has = f"{folder} has {name} in numbers of kind {dtype_name(kind.dtype)}"
                        raise CheckpointError(f"{has}, where {', '.join(_DTYPES)} are known")
                    self._tensors[ours], self._named[ours], self.tensors[ours] = file, name, kind
                elif not family.is_buffer(name):
                    unknown.append(name)
        if unknown:
            raise CheckpointError(f"{folder} has weights that {family.name} lacks: {', '.join(sorted(unknown)[:8])}")

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in the mapped file."""
        return self._tensors[name].tensor(self._named[name])


def _canonical(name: str, family: Family, expected: frozenset[str]) -> str:
    name = family.renamed.get(name, name)
    return family.prefix + name if name not in expected and family.prefix + name in expected else name


def _open(folder: Path) -> Iterator[_Safetensors | _Pickled]:
    """As transformers chooses: safetensors before pickles, and one file before an index of several."""
    for stem, suffix, opener in (("model", "safetensors", _Safetensors), ("pytorch_model", "bin", _Pickled)):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if single.is_file():
            yield opener(single)
            return
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            files = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
                raise CheckpointError(f"{index} is no index of files in its folder")
            yield from (opener(folder / name) for name in sorted(set(files)))
            return
    raise CheckpointError(f"{folder} has neither model.safetensors nor an index of files that are like it")


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


@dataclass(frozen=True)
class _Entry:
    kind: Kind
    start: int
    """Its first byte in the file."""


class _Safetensors:
    """A file of https://huggingface.co/docs/safetensors. Its memory is bounded, however much of it is read."""

    def __init__(self, path: Path) -> None:
        self._lock, self._handed_out = Lock(), dict[str, int]()
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if self._map[:8] == b"version ":
                raise ValueError("it is a pointer of Git LFS, which git lfs pull replaces by the file")
            length = int.from_bytes(self._map[:8], "little")
            header: dict[str, Any] = json.loads(self._map[8 : 8 + length])
            header.pop("__metadata__", None)
            self._entries = {name: self._entry(fields, 8 + length) for name, fields in header.items()}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
        self.tensors = {name: entry.kind for name, entry in self._entries.items()}

    def _entry(self, fields: Mapping[str, Any], header: int) -> _Entry:
        if fields["dtype"] not in _KINDS:
            raise ValueError(f"it has numbers of kind {fields['dtype']}, where {', '.join(_DTYPES)} are known")
        kind = Kind(tuple(map(int, fields["shape"])), _KINDS[fields["dtype"]])
        start, stop = (header + int(offset) for offset in fields["data_offsets"])
        if not header <= start <= stop <= len(self._map) or stop - start != kind.size:
            raise ValueError("a tensor is not within it: it was cut off")
        return _Entry(kind, start)

    def tensor(self, name: str) -> Tensor:
        kind, start = self._entries[name].kind, self._entries[name].start
        with self._lock:
            if name not in self._handed_out and sum(self._handed_out.values()) + kind.size > _RESIDENT:
                self._map.madvise(mmap.MADV_DONTNEED)  # what is still in use is read again from the file
                self._handed_out.clear()
            self._handed_out[name] = kind.size
        count = kind.size // kind.dtype.itemsize
        return torch.frombuffer(self._map, dtype=kind.dtype, count=count, offset=start).view(kind.shape)


class _Pickled:
    """A file of torch.save, of which nothing but tensors is unpickled."""

    def __init__(self, path: Path) -> None:
        try:
            # Files of before torch 1.6, which are no archives, are read whole.
            loaded = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
            self._loaded: dict[str, Tensor] = {name: value for name, value in loaded.items() if torch.is_tensor(value)}
        except Exception as error:  # of the file, torch raises all kinds
            raise CheckpointError(f"{path} cannot be read as tensors alone: {error}") from error
        self.tensors = {name: Kind(tuple(value.shape), value.dtype) for name, value in self._loaded.items()}

    def tensor(self, name: str) -> Tensor:
        return self._loaded[name]
