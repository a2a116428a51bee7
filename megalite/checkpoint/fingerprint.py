"""Fingerprint of frozen weights: by it, adapters know their base again, in whatever files and under any layout.

It is the sum over all tensors of a number made of the name, times the sum of the values' bits: each value counts once,
in whatever box it is. Values that are rounded to another dtype have another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megalite.checkpoint.plan import boxes
from megalite.checkpoint.tensors import Source
from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import frozen_slices
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh

BASE = "base"
"""Section of a checkpoint's configuration: where the frozen weights are, and their fingerprint."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24


@torch.no_grad()
def fingerprint(optimizer: Optimizer, mesh: ParallelMesh) -> str:
    """Return the fingerprint of the frozen weights of all ranks, which call it together."""
    total, dtypes = torch.zeros((), dtype=torch.int64), set[str]()
    for bucket in optimizer.frozen:
        for part in frozen_slices(bucket, *bucket.shard_spec.saved):
            for tensor, box, first in boxes(part.parameter, part.start, part.stop):
                values = part.values[first - part.start : first - part.start + box.numel]
                total += _number(tensor.name) * _sum_of_bits(values)
                dtypes.add(_name(values.dtype))
    (found,) = collectives.all_reduce_(total[None].to(mesh.device), mesh.world()).tolist()
    return _shown(found, {name for names in collectives.all_gather_json(sorted(dtypes), mesh) for name in names})


def fingerprint_of(source: Source, names: Iterable[str], dtype: Callable[[str], torch.dtype]) -> str:
    """Return the fingerprint of tensors that are read whole, one by one, and rounded to dtypes by their names."""
    total, dtypes = torch.zeros((), dtype=torch.int64), set[str]()
    for name in names:
        values = torch.empty(source.tensors[name].shape, dtype=dtype(name))
        source.fill(name, source.tensors[name].whole, values)
        total += _number(name) * _sum_of_bits(values)
        dtypes.add(_name(values.dtype))
    return _shown(int(total), dtypes)


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sum_of_bits(values: Tensor) -> Tensor:
    bits = values.contiguous().view(-1).view(_BITS[values.itemsize])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_CHUNK)]).sum().cpu()


def _shown(total: int, dtypes: set[str]) -> str:
    return f"{total % 2**64:016x} {' '.join(sorted(dtypes))}"
