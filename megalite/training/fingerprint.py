"""Fingerprint of frozen weights: by it, adapters know their base again, in whatever files and under any layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megalite.checkpoint.plan import boxes
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
    """Return the fingerprint of the frozen weights of all ranks, which call it together.

    It is the sum over all tensors of a number made of the name, times the sum of the values' bits: each value counts
    once, in whatever box it is. Values rounded to another dtype have another one.
    """
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    dtypes = set[str]()
    for bucket in optimizer.frozen:
        for part in frozen_slices(bucket, *bucket.shard_spec.saved):
            for tensor, box, first in boxes(part.parameter, part.start, part.stop):
                digest = hashlib.blake2b(tensor.name.encode(), digest_size=8).digest()
                number = int.from_bytes(digest, "little", signed=True) | 1
                values = part.values[first - part.start : first - part.start + box.numel]
                total += _sum_of_bits(values).to(total.device) * number
                dtypes.add(str(values.dtype).removeprefix("torch."))
    (found,) = collectives.all_reduce_(total[None], mesh.world()).tolist()
    named = collectives.all_gather_json(sorted(dtypes), mesh)
    return f"{found % 2**64:016x} {' '.join(sorted({name for names in named for name in names}))}"


def _sum_of_bits(values: Tensor) -> Tensor:
    bits = values.contiguous().view(_BITS[values.itemsize])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_CHUNK)]).sum()
