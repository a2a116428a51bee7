"""Formats that checkpoints are written in. In every format, the manifest says where the bytes of each box are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from megalite.checkpoint import torch_file
from megalite.checkpoint.tensors import ByteRange, TensorBox

Placed = Mapping[str, Sequence[tuple[TensorBox, ByteRange]]]
"""Parts of each file, and their byte ranges in it."""


@dataclass(frozen=True)
class Format:
    """File format for boxes."""

    file: str
    """Name of a file, with {writer} for the writer's number from 0, or {number} for its number from 1."""
    byte_ranges: Callable[[Sequence[TensorBox]], list[ByteRange]]
    """Function that returns the byte ranges of the parts of a file, in the order of the parts."""
    index: Callable[[Placed], Mapping[str, bytes]]
    """Function that returns index files by name. Other programs need them; megalite does not read them."""
    checksums: bool = True
    """Flag for computing checksums of the boxes."""


def safetensors_byte_ranges(
    parts: Sequence[TensorBox], named: Callable[[TensorBox], str] = lambda part: part.entry
) -> list[ByteRange]:
    """Return the byte ranges of parts in a safetensors file (https://huggingface.co/docs/safetensors).

    Such a file consists of 8 bytes of header length, a JSON header, and the bytes of the tensors. `named` returns the
    name of a part in the header.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = list(pairwise(accumulate((part.size for part in parts), initial=0)))
    for part, ends in zip(parts, offsets, strict=True):
        fields[named(part)] = {"dtype": _CODES[part.dtype], "shape": part.box.size, "data_offsets": ends}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors' bytes
    before = len(header).to_bytes(8, "little") + header
    begin = len(before)
    return [ByteRange(b"" if start else before, begin + start, begin + stop, lambda _: b"") for start, stop in offsets]


_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


NATIVE = Format("rank_{writer:05d}.safetensors", safetensors_byte_ranges, lambda _: {})
FORMATS = {
    "megalite": NATIVE,
    "torch_dist": Format(
        "__{writer}_0.distcp", torch_file.byte_ranges, lambda placed: {".metadata": torch_file.metadata(placed)}
    ),
}
"""Formats by the value of --ckpt-format."""
