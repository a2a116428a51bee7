"""Places of ranks, their groups, and what these send to one another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from museum.plain.settings import Settings


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and the place of this one among them."""

    members: tuple[int, ...]
    index: int
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.members)


class Ranks:
    """Place of this rank on each axis, and the groups that it is in.

    Numbers of ranks count along tp first, then cp, dp and pp, as in Megatron-LM. Experts are divided over consecutive
    ranks of dp x cp.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        shared = max(settings.tp // settings.key_value_heads, 1)
        ends = (0, settings.pp - 1)
        self.world = self._group(lambda at: 0)
        self.tp = self._group(lambda at: (at["pp"], at["dp"], at["cp"]))
        self.cp = self._group(lambda at: (at["pp"], at["dp"], at["tp"]))
        self.dp = self._group(lambda at: (at["pp"], at["cp"], at["tp"]))
        self.pp = self._group(lambda at: (at["dp"], at["cp"], at["tp"]))
        self.data = self._group(lambda at: (at["pp"], at["tp"]))
        """Ranks with the same weights and other tokens: dp x cp."""
        self.ep = self._group(lambda at: (at["pp"], at["tp"], at["edp"]))
        self.edp = self._group(lambda at: (at["pp"], at["tp"], at["ep"]))
        """Ranks with the same experts."""
        self.key_value = self._group(lambda at: (at["pp"], at["dp"], at["cp"], at["tp"] // shared))
        """Tensor-parallel ranks with the same key-value head."""
        self.tied = self._group(lambda at: (at["dp"], at["cp"], at["tp"], 0 if at["pp"] in ends else at["pp"]))
        """The first and the last stage."""

    def place(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        found, rest = {}, rank
        for axis in ("tp", "cp", "dp", "pp"):
            rest, found[axis] = divmod(rest, getattr(self.settings, axis))
        found["edp"], found["ep"] = divmod(found["dp"] * self.settings.cp + found["cp"], self.settings.ep)
        return found

    def _group(self, key: Callable[[dict[str, int]], Hashable]) -> Group:
        """Make the groups of ranks with equal keys, and return that of this rank."""
        together: dict[Hashable, list[int]] = {}
        for rank in range(self.settings.world):
            together.setdefault(key(self.place(rank)), []).append(rank)
        handles = [dist.new_group(members) if len(members) > 1 else None for members in together.values()]
        for members, handle in zip(together.values(), handles, strict=True):
            if self.rank in members:
                return Group(tuple(members), members.index(self.rank), handle)
        raise AssertionError("each rank is in one group")

    @property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """Place on each axis, and its size."""
        return {axis: (getattr(self, axis).index, getattr(self, axis).size) for axis in ("tp", "cp", "dp", "pp", "ep")}

    @property
    def is_first(self) -> bool:
        return self.pp.index == 0

    @property
    def is_last(self) -> bool:
        return self.pp.index == self.pp.size - 1


def all_sum(tensor: Tensor, group: Group, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum of the group's tensors, or another reduction."""
    if group.size == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, operation, group.handle)
    return total


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Return the tensor of each rank of the group."""
    if group.size == 1:
        return [tensor]
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(group.size)]
    dist.all_gather(parts, tensor.detach().contiguous(), group.handle)
    return parts


class _Both(torch.autograd.Function):
    """Apply one function in forward, and another one to the gradient in backward."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, ahead: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        context.back = back
        found = ahead(tensor)
        return found.view_as(found) if found is tensor else found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return context.back(gradient), None, None


def both(tensor: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `ahead(tensor)`, whose gradient goes on as `back(gradient)`."""
    found: Tensor = _Both.apply(tensor, ahead, back)
    return found
