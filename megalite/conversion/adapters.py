"""Weights with adapters, merged: those of a network without adapters that computes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind, Source
from megalite.config.adapters import AdaptersConfig
from megalite.errors import CheckpointError
from megalite.parallel.adapter_matrices import MAGNITUDE, A, B, Matrix, matrices_of, row_factors
from megalite.parallel.sharding import Box, LogicalTensor


class InMemory:
    """Tensors in memory (a `Source`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self._values[name][box.slices()])


class Joined:
    """Tensors of two sources with different names (a `Source`)."""

    def __init__(self, first: Source, second: Source) -> None:
        self._first, self._second = first, second
        self.tensors = {**first.tensors, **second.tensors}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        (self._second if name in self._second.tensors else self._first).fill(name, box, values)


@dataclass(frozen=True)
class Adapters:
    """Adapters of a network, with the base that they adapt.

    Attributes:
        base: the weights of the base, by their logical names.
        own: the tensors of the adapters.
        tensors: the records of the base's weights.
        base_path: the folder of the base, if it has one.
        changed: what the network computes otherwise than the base, in words; empty if nothing.
    """

    config: AdaptersConfig
    base: Source
    own: Source
    tensors: Mapping[str, LogicalTensor]
    base_path: str | None = None
    changed: str = ""

    def matrices(self) -> list[Matrix]:
        """Return the matrices that have adapters. Raises CheckpointError for adapters of none, or of other shapes."""
        every = [matrix for tensor in self.tensors.values() for matrix in matrices_of(tensor)]
        found = [matrix for matrix in every if f"{matrix.name}.{A}" in self.own.tensors]
        factors = (factor for matrix in found for factor in matrix.factors(self.config))
        expected = {factor.tensor.name: factor.tensor.shape for factor in factors}
        for name in sorted(self.own.tensors.keys() | expected.keys()):
            kind, shape = self.own.tensors.get(name), expected.get(name)
            if kind is None or kind.shape != shape:
                there = "is missing" if kind is None else f"has shape {list(kind.shape)}"
                raise CheckpointError(f"{name} {there}, but the network has {'none' if shape is None else list(shape)}")
        return found

    def joined(self) -> Source:
        """Return the weights of the base beside those of the adapters."""
        return Joined(self.base, self.own)

    def merged(self) -> Source:
        """Return the weights in which the adapters are merged."""
        return Merged(self)


def check_finite(adapters: Source, what: object) -> None:
    """Raise CheckpointError if a tensor of the adapters of `what` has NaN or infinities."""
    for name, kind in adapters.tensors.items():
        values = torch.empty(kind.shape, dtype=kind.dtype)
        adapters.fill(name, kind.whole, values)
        if not values.isfinite().all():
            raise CheckpointError(f"{what}: {name} has NaN or infinities: take an earlier checkpoint")


class Merged:
    """Weights of a base in which adapters are merged, box by box (a `Source`). They are added in fp32 or wider."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters, self.tensors = adapters, adapters.base.tensors
        self._of: dict[str, list[Matrix]] = {}
        for matrix in adapters.matrices():
            self._of.setdefault(matrix.tensor.name, []).append(matrix)

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """See `Source`. With DoRA, whole rows are read."""
        matrices, config = self._of.get(name, []), self._adapters.config
        if not matrices:
            self._adapters.base.fill(name, box, values)
            return
        own = box
        if config.use_dora:  # lengths are those of whole rows, or of whole columns
            summed, shape = matrices[0].summed, self.tensors[name].shape
            both = [(0, shape[d]) if d in summed else (box.offset[d], box.size[d]) for d in range(len(shape))]
            own = Box(tuple(at for at, _ in both), tuple(size for _, size in both))
        wide = torch.promote_types(torch.promote_types(self.tensors[name].dtype, values.dtype), torch.float32)
        whole = torch.empty(own.size, dtype=wide, device=values.device)
        self._adapters.base.fill(name, own, whole)
        for matrix in matrices:
            part, at = whole, own
            if matrix.part is not None:
                dimension, index = matrix.part
                if index not in own.indices(dimension):
                    continue
                part = whole.narrow(dimension, index - own.offset[dimension], 1)
                at = own.at([dimension], [index])
            part.copy_(self._merged(matrix, at, part))
        values.copy_(whole[box.relative_to(own).slices()])

    def _merged(self, matrix: Matrix, box: Box, part: Tensor) -> Tensor:
        """Return a box of one matrix with its update. `part`: that of the base, in the shape of the box."""
        config, rank = self._adapters.config, self._adapters.config.lora_rank or 0
        experts = math.prod(box.size[d] for d in matrix.experts)
        a = self._factor(matrix, A, matrix.a(rank).dimensions, box, part).reshape(experts, rank, -1)
        b = self._factor(matrix, B, matrix.b(rank).dimensions, box, part).reshape(experts, -1, rank)
        rows = part.reshape(experts, b.shape[1], -1)
        changed = torch.baddbmm(rows, b, a, alpha=config.lora_scale)
        if config.use_dora:
            summed = -2 if matrix.looked_up else -1
            first, now = (torch.linalg.vector_norm(each, dim=summed, keepdim=True) for each in (rows, changed))
            lengths = self._factor(matrix, MAGNITUDE, matrix.magnitude().dimensions, box, part).view(first.shape)
            changed = changed * row_factors(first, lengths, now)
        return changed.view(part.shape)

    def _factor(self, matrix: Matrix, word: str, dimensions: tuple[int | None, ...], box: Box, like: Tensor) -> Tensor:
        """Return the part of a factor that a box of the matrix needs, with the dtype and on the device of a tensor."""
        rank = self._adapters.config.lora_rank or 0
        own = [(0, rank) if d is None else (box.offset[d], box.size[d]) for d in dimensions]
        found = like.new_empty([size for _, size in own])
        part = Box(tuple(at for at, _ in own), tuple(size for _, size in own))
        self._adapters.own.fill(f"{matrix.name}.{word}", part, found)
        return found
