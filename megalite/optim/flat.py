"""Flat tensors: a rank's slice of one, and memory that comes and goes while its views keep their shapes."""

from __future__ import annotations

from torch import Tensor

from megalite.parallel.mesh import Group


def owned(flat: Tensor, group: Group) -> Tensor:
    """This rank's of the equal slices into which the group cuts a tensor."""
    return flat.view(group.size, -1)[group.rank]


def is_storage_free(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() == 0


def free_storage(tensor: Tensor) -> None:
    """Give back the memory under a tensor and all its views; they keep their shapes."""
    tensor.untyped_storage().resize_(0)


def allocate_storage(tensor: Tensor) -> None:
    """Give a freed tensor memory again, not yet set. (Views of it that autograd has saved stay valid: parameters have
    version counters of their own, which refilling does not change.)
    """
    if is_storage_free(tensor):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
