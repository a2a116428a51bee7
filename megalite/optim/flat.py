"""Flat tensors: slices owned by ranks, and storage that is freed and allocated again while its views stay valid."""

from __future__ import annotations

from torch import Tensor

from megalite.parallel.mesh import Group


def owned(flat: Tensor, group: Group) -> Tensor:
    """Return this rank's slice of a tensor that is divided into equal slices over the group."""
    return flat.view(group.size, -1)[group.rank]


def is_storage_free(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() == 0


def free_storage(tensor: Tensor) -> None:
    """Free the storage of a tensor and of all its views; their shapes do not change."""
    tensor.untyped_storage().resize_(0)


def allocate_storage(tensor: Tensor) -> None:
    """Allocate the storage of a freed tensor again, uninitialized.

    Views that autograd has saved stay valid: each parameter has its own version counter, and writing new values into
    the storage does not change it.
    """
    if is_storage_free(tensor):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
