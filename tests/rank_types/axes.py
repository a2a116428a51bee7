"""Axes of ranks, and types of tensors along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from spmd_types._mesh_axis import MeshAxis
from spmd_types._type_attr import get_local_type
from spmd_types.runtime import _set_local_type
from spmd_types.types import I, P, R, SpmdTypeError, V
from spmd_types.types import PerMeshAxisLocalSpmdType as Type
from torch import Tensor

from megalite.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh

Types = dict[Any, Type]
"""Type of a tensor, along each `MeshAxis`."""


class Axes:
    """The axes along which the ranks of a pipeline stage differ, so fine that all groups are products of them.

    The dense and the expert view share them, and so do the tensor-parallel ranks that have the same key-value head.

    Attributes:
        all: the axes, from the innermost.
        names: name of each, for messages.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._ranks = mesh.world_size // mesh.size("pp")
        strides = {1, self._ranks}
        for view in (DENSE_AXES, EXPERT_AXES):
            stride = 1
            for name in reversed(view[1:]):
                for part in _primes(mesh.size(name)) if name in ("tp", "cp") else [mesh.size(name)]:
                    stride *= part
                    strides.add(stride)
        self._layout = {MeshAxis.of(stop // start, start): (start, stop) for start, stop in pairwise(sorted(strides))}
        assert all(stop % start == 0 for start, stop in self._layout.values()), f"no axes have {strides} in common"
        self.all = tuple(self._layout)
        self._of_ranks: dict[tuple[int, ...], frozenset[MeshAxis]] = {}
        self._along = {name: self.of_ranks(mesh.ranks(name)) for name in (*DENSE_AXES[1:], *EXPERT_AXES[1:])}
        self.names = {axis: "=".join(name for name, axes in self._along.items() if axis in axes) for axis in self.all}

    def along(self, *names: str) -> frozenset[MeshAxis]:
        """Return the axes along which ranks differ that differ along these axes of the mesh."""
        return frozenset().union(*(self._along[name] for name in names))

    def of_ranks(self, ranks: Sequence[int]) -> frozenset[MeshAxis]:
        """Return the axes along which these ranks differ, besides their stage.

        Raises AssertionError if they are not all the ranks that do.
        """
        ranks = tuple(ranks)
        if ranks not in self._of_ranks:
            numbers = np.asarray(ranks)
            found = [axis for axis, (start, stop) in self._layout.items() if np.ptp(numbers % stop // start)]
            stages = len(np.unique(numbers // self._ranks))
            assert math.prod(axis.size() for axis in found) * stages == len(ranks), f"{ranks} are no product of axes"
            self._of_ranks[ranks] = frozenset(found)
        return self._of_ranks[ranks]

    def types(self, *, varying: Sequence[str] = (), invariant: Sequence[str] = ()) -> Types:
        """Return the type that is V, and I, along these axes of the mesh, and R along the others."""
        first, second = self.along(*varying), self.along(*invariant)
        return {axis: V if axis in first else I if axis in second else R for axis in self.all}


def _primes(number: int) -> list[int]:
    for divisor in range(2, number + 1):
        if number % divisor == 0:
            return [divisor, *_primes(number // divisor)]
    return []


def type_of(tensor: Tensor) -> Types:
    """Return a tensor's type; an empty one if it has none."""
    found: Types = get_local_type(tensor)
    return found


def set_type(tensor: Tensor, types: Types) -> Tensor:
    """Give a tensor a type that does not follow from an operation, and return the tensor."""
    found: Tensor = _set_local_type(tensor, dict(types))
    return found


def of_gradient(types: Types) -> Types:
    """Return the type that the gradient of a tensor of this type has."""
    return {axis: kind.backward_type() for axis, kind in types.items()}


def require(found: Types, wanted: Types, what: str) -> None:
    """Raise SpmdTypeError if a tensor of one type stands where another is due.

    Only gradients differ between R and I. What is equal on all ranks may stand for what need not be, and what differs
    for terms of a sum. Equal values are no terms of a sum: they would count once per rank.
    """
    serving = {R: (R, I), I: (R, I), V: (R, I, V), P: (P, V)}
    wrong = [axis for axis, kind in wanted.items() if found[axis] not in serving[kind]]
    if wrong:
        shown = ", ".join(f"{found[axis].value} where {wanted[axis].value} is due over {axis!r}" for axis in wrong)
        raise SpmdTypeError(f"{what}: {shown}")
