"""Fingerprint of frozen weights: by it, adapters know their base again, in whatever files and under any layout.

It is the sum over all tensors of a number made of the name, times the sum of the values' bits, each times an odd number
made of its row and one of its column in the whole tensor: each value counts once, in whatever box it is. Values that
are rounded to another dtype have another one. In the first version, places did not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.plan import boxes
from megalite.checkpoint.tensors import Source
from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import frozen_slices
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box

BASE = "base"
"""Section of a checkpoint's configuration: where the frozen weights are, and their fingerprint."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_VERSION = "2"
"""First word of a fingerprint; those of the first version have none."""
_SPREAD = -7046029254386353131
"""Odd number, 2^64 over the golden ratio."""


@torch.no_grad()
def fingerprint(optimizer: Optimizer, mesh: ParallelMesh, *, places: bool = True) -> str:
    """Return the fingerprint of the frozen weights of all ranks, which call it together.

    `places`: False for the first version.
    """
    total, dtypes = torch.zeros((), dtype=torch.int64), set[str]()
    for bucket in optimizer.frozen:
        for part in frozen_slices(bucket, *bucket.shard_spec.saved):
            for tensor, box, first in boxes(part.parameter, part.start, part.stop):
                values = part.values[first - part.start : first - part.start + box.numel]
                total += _number(tensor.name) * _sum_of_bits(values, tensor.shape, box, places)
                dtypes.add(_name(values.dtype))
    (found,) = collectives.all_reduce_(total[None].to(mesh.device), mesh.world()).tolist()
    every = {name for names in collectives.all_gather_json(sorted(dtypes), mesh) for name in names}
    return _shown(found, every, places)


def fingerprint_of(
    source: Source, names: Iterable[str], dtype: Callable[[str], torch.dtype], *, places: bool = True
) -> str:
    """Return the fingerprint of tensors that are read whole, one by one, and rounded to dtypes by their names."""
    total, dtypes = torch.zeros((), dtype=torch.int64), set[str]()
    for name in names:
        kind = source.tensors[name]
        values = torch.empty(kind.shape, dtype=dtype(name))
        source.fill(name, kind.whole, values)
        total += _number(name) * _sum_of_bits(values, kind.shape, kind.whole, places)
        dtypes.add(_name(values.dtype))
    return _shown(int(total), dtypes, places)


def has_places(found: object) -> bool:
    """Tell whether a saved fingerprint is not of the first version."""
    return str(found).partition(" ")[0] == _VERSION


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sum_of_bits(values: Tensor, shape: Sequence[int], box: Box, places: bool) -> Tensor:
    """Return the sum of the bits of a box of a tensor, each times the numbers of its row and column if places count."""
    columns = box.size[-1]
    bits = values.contiguous().view(-1).view(_BITS[values.itemsize]).view(-1, columns)
    of_columns = _odd_numbers(torch.arange(columns, device=bits.device) + box.offset[-1])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    count = max(1, _CHUNK // columns)
    for number, part in enumerate(bits.split(count)):
        if places:
            rows = torch.arange(len(part), device=bits.device) + number * count
            total += ((part * of_columns).sum(1) * _odd_numbers(_firsts(rows, shape, box))).sum()
        else:
            total += part.sum(dtype=torch.int64)
    return total.cpu()


def _firsts(rows: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Return the first places in a tensor of the rows in which rows of a box are."""
    found, stride = torch.zeros_like(rows), shape[-1]
    for dimension in reversed(range(len(shape) - 1)):
        size = box.size[dimension]
        found += (rows % size + box.offset[dimension]) * stride
        rows, stride = rows // size, stride * shape[dimension]
    return found


def _odd_numbers(places: Tensor) -> Tensor:
    """Return an odd number for each place, as if drawn at random."""
    spread = places * _SPREAD
    return (spread ^ (spread >> 32)) | 1


def _shown(total: int, dtypes: set[str], places: bool) -> str:
    version = [_VERSION] * places
    return " ".join([*version, f"{total % 2**64:016x}", *sorted(dtypes)])
