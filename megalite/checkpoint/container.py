"""How boxes stand in a file: what of its bytes is theirs, and what the file's format puts around them.

The layout of a file is a pure function of its parts: where each box will stand is known before anything is written, to
whoever knows the parts. A writer streams `before`, the box's bytes and `after`, box by box.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megalite.parallel.sharding import Box


@dataclass(frozen=True)
class Part:
    """A box of a global tensor."""

    name: str
    """The tensor's."""
    shape: tuple[int, ...]
    """The whole tensor's."""
    dtype: torch.dtype
    box: Box

    @property
    def size(self) -> int:
        """Bytes."""
        return self.box.numel * self.dtype.itemsize

    @property
    def entry(self) -> str:
        """What the box is called where a file names its boxes."""
        return f"{self.name}@{','.join(map(str, self.box.offset))}"


@dataclass(frozen=True)
class Place:
    """Where the bytes of a part stand in its file."""

    before: bytes
    """What stands in front of them, behind the part before."""
    start: int
    stop: int
    """Bytes [start, stop) of the file, the box's elements in row-major order."""
    after: Callable[[int], bytes]
    """What stands behind them, given their CRC-32; of one length whatever that is."""


@dataclass(frozen=True)
class Container:
    """A file format for boxes."""

    file: str
    """The name of a writer's file, with {writer} for its number."""
    places: Callable[[Sequence[Part]], list[Place]]
    """Where the parts of a file stand, in their order."""


def safetensors_places(parts: Sequence[Part]) -> list[Place]:
    """Where parts stand in a safetensors file (https://huggingface.co/docs/safetensors): 8 bytes of header length, a
    JSON header, then the tensors' bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        start, end = end, end + part.size
        dtype = _SAFETENSORS_DTYPES[part.dtype]
        fields[part.entry] = {"dtype": dtype, "shape": list(part.box.size), "data_offsets": [start, end]}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)  # so that the tensors' bytes are aligned
    before = len(header).to_bytes(8, "little") + header
    places: list[Place] = []
    end = len(before)
    for part in parts:
        places.append(Place(before if not places else b"", end, end + part.size, _nothing))
        end += part.size
    return places


_SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def _nothing(_checksum: int) -> bytes:
    return b""


NATIVE = Container("rank_{writer:05d}.safetensors", safetensors_places)
FORMATS = {"megalite": NATIVE}
"""By the name of `--ckpt-format`."""
