"""One safetensors file of boxes, written as a stream and read with its checksums verified.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as deserialized
from torch import Tensor

from megalite.checkpoint.manifest import unreadable
from megalite.checkpoint.storage import AnyPath, create
from megalite.errors import DamagedCheckpointError

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def dtype_name(dtype: torch.dtype) -> str:
    """As in `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    dtype: str
    """As in `float32`."""
    shape: tuple[int, ...]
    start: int
    """Its bytes in the file are [start, stop)."""
    stop: int


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, Entry]]:
    """What a file of named tensors begins with, and where each then stands."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    entries: dict[str, Entry] = {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        entries[name] = Entry(dtype_name(dtype), tuple(shape), start, end)
    encoded = json.dumps(fields).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the tensors' bytes are aligned
    return len(encoded).to_bytes(8, "little") + encoded, _shifted(entries, 8 + len(encoded))


def read_header(path: AnyPath) -> dict[str, Entry]:
    """Where each tensor of a file stands. Raises OSError, SafetensorError, ValueError or KeyError."""
    if isinstance(path, Path):
        with safe_open(path, "pt"):  # it refuses what a load would refuse
            pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(length))
    fields.pop("__metadata__", None)
    dtypes = {theirs: dtype_name(dtype) for dtype, theirs in _DTYPE_NAMES.items()}
    entries = {
        name: Entry(dtypes[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in fields.items()
    }
    return _shifted(entries, 8 + length)


def _shifted(entries: dict[str, Entry], by: int) -> dict[str, Entry]:
    return {name: replace(entry, start=entry.start + by, stop=entry.stop + by) for name, entry in entries.items()}


def write(path: AnyPath, tensors: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Write named tensors to a new file and sync it; one of them at a time is copied to the CPU.

    Returns the CRC-32 of each tensor's bytes. Raises OSError where the disk does.
    """
    beginning, _ = header((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    checksums = []
    with create(path) as file:
        file.write(beginning)
        for _, tensor in tensors:
            data = _bytes(tensor)
            checksums.append(zlib.crc32(data))
            file.write(data)
    return checksums


def read(path: AnyPath, size: int, wanted: Iterable[tuple[str, int]]) -> Iterator[Tensor]:
    """The tensors of the (name, checksum) pairs `wanted` from a file that should have `size` bytes.

    Raises DamagedCheckpointError, naming the file, where anything is not as it was written.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedCheckpointError(f"{path} has {found} bytes of {size}: it was cut off or replaced. {_ADVICE}")
        with _open(path) as get_tensor:
            for name, checksum in wanted:
                tensor = get_tensor(name)
                if zlib.crc32(_bytes(tensor)) != checksum:
                    raise DamagedCheckpointError(f"{path} is damaged: the checksum of {name} does not match. {_ADVICE}")
                yield tensor
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}. {_ADVICE}") from error


@contextmanager
def _open(path: AnyPath) -> Iterator[Callable[[str], Tensor]]:
    if isinstance(path, Path):
        with safe_open(path, "pt") as file:
            yield file.get_tensor
    else:
        yield deserialized(path.read_bytes()).__getitem__


_ADVICE = "Load another checkpoint"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
