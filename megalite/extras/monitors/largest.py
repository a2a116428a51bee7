"""Largest tensors of this process, when its memory has run out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.optim.optimizer import Optimizer
from megalite.process.output import in_words
from megalite.tasks.memory import storages_by_kind
from megalite.torch_internals import storage_identity
from megalite_kernels.implementation import on_gpu


def largest_tensors(count: int = 5) -> str:
    """Return a line with the largest tensors that Python holds. What autograd alone keeps is not among them."""
    objects = gc.get_objects()
    kinds = {
        identity: kind
        for each in objects
        if issubclass(type(each), Optimizer)
        for kind, storages in storages_by_kind(each).items()
        for identity in storages
    }
    found = {storage_identity(tensor): tensor for tensor in _tensors(objects)}
    first = sorted(found.items(), key=lambda each: -each[1].untyped_storage().nbytes())[:count]
    words = [
        f"{in_words(tensor.untyped_storage().nbytes())} {kinds.get(identity, 'other')} "
        f"({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
        for identity, tensor in first
    ]
    if not words:
        return ""
    kept = sum(tensor.untyped_storage().nbytes() for tensor in found.values() if on_gpu(tensor.device))
    rest = torch.cuda.memory_allocated() - kept if torch.cuda.is_initialized() else 0
    besides = f"; {in_words(rest)} of the device is in others, as activations kept for backward" if rest > 0 else ""
    return f"The largest tensors: {', '.join(words)}{besides}"


def _tensors(objects: list[object]) -> Iterator[Tensor]:
    """Yield the tensors among them that have a storage."""
    for each in objects:
        if issubclass(type(each), Tensor):
            assert isinstance(each, Tensor)
            if each.layout == torch.strided and not each.is_meta:
                yield each
