"""`Sharding`: the record of which part of the global model a parameter holds.

Initialization, gradient reduction, the gradient norm, ZeRO, checkpoints, resharding and conversion read this record.
No code depends on module types or on parts of names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution of mean zero."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same."""

    value: float


@dataclass(frozen=True)
class Drawn:
    """Initial values drawn by a function, whole and in fp32 on the CPU."""

    draw: Callable[[torch.Generator], Tensor]


@dataclass(frozen=True)
class AsBuilt:
    """Initial values that the module was built with, the same on every rank."""


@dataclass(frozen=True)
class LogicalTensor:
    """A global tensor of the model: unsharded, unpadded and the same under every layout.

    Attributes:
        matrices: an einops pattern to [matrices, rows, columns], for matrix-wise optimizers such as Muon; None for
            vectors and embedding tables.
        is_embedding_or_output: True if its rows stand for tokens, as in the word embedding and the output layer.
        optimizer: the name of the optimizer that updates it, in a run that has several.
        fp32: kept in fp32 in a network whose dtype is narrower. Its gradients are summed in fp32, too.
        fused: name of the matrix that other programs make of it and of others, whose rows lie below each other.
    """

    name: str
    shape: tuple[int, ...]
    initial: Normal | Constant | Drawn | AsBuilt
    weight_decay: bool
    matrices: str | None = None
    is_embedding_or_output: bool = False
    optimizer: str = ""
    fp32: bool = False
    fused: str = ""

    def as_matrices(self, values: Tensor) -> Tensor:
        """View a tensor of this shape, or a box of full matrices, as [matrices, rows, columns].

        Raises:
            ValueError: this logical tensor has no matrix view.
        """
        return rearrange(values, " -> ".join(self._matrix_view()))

    def from_matrices(self, matrices: Tensor, size: tuple[int, ...]) -> Tensor:
        """Invert `as_matrices`, returning a tensor of this size."""
        ours, theirs = self._matrix_view()
        return rearrange(matrices, f"{theirs} -> {ours}", **dict(zip(ours.split(), size, strict=True)))

    def by_head(self) -> LogicalTensor:
        """Return the tensor with a matrix for each head; itself if the rows of its matrices are not those of heads."""
        if self.matrices is None:
            return self
        of_each = re.sub(r"-> (\w+) \((heads|groups) (\w+)\)", r"-> (\1 \2) \3", self.matrices)
        return self if of_each == self.matrices else replace(self, matrices=of_each)

    @property
    def matrix_size(self) -> tuple[int, int]:
        """Numbers of rows and of columns of each matrix."""
        _, rows, columns = (math.prod(self.shape[dimension] for dimension in axis) for axis in self._matrix_axes())
        return rows, columns

    @property
    def matrix_dimensions(self) -> tuple[int, ...]:
        """The dimensions that enumerate the matrices: each index along them selects a separate matrix."""
        return self._matrix_axes()[0]

    @property
    def column_dimensions(self) -> tuple[int, ...]:
        """The dimensions that together are the columns of each matrix."""
        return self._matrix_axes()[2]

    def matrix_indices(self, box: Box) -> tuple[list[int], list[int], list[int]]:
        """Return the numbers of the matrices that a box overlaps, and those of their rows and columns in it.

        They are in the order of `as_matrices`, applied to the box.
        """
        found = []
        for dimensions in self._matrix_axes():
            numbers = [0]
            for dimension in dimensions:
                numbers = [at * self.shape[dimension] + index for at in numbers for index in box.indices(dimension)]
            found.append(numbers)
        matrices, rows, columns = found
        return matrices, rows, columns

    def matrices_in(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield, for each matrix that a box overlaps, the box of the matrix and the box of the overlap."""
        numbered = self.matrix_dimensions
        for index in itertools.product(*(box.indices(dimension) for dimension in numbered)):
            yield Box.whole(self.shape).at(numbered, index), box.at(numbered, index)

    def whole_matrices(self, box: Box) -> Box:
        """Return the box of all matrices that a box overlaps."""
        kept = self.matrix_dimensions
        both = enumerate(zip(box.offset, box.size, strict=True))
        offset, size = zip(*(at if d in kept else (0, self.shape[d]) for d, at in both), strict=True)
        return Box(offset, size)

    def _matrix_axes(self) -> list[tuple[int, ...]]:
        """Return the dimensions that make up the matrices' numbers, the rows and the columns."""
        ours, theirs = self._matrix_view()
        axes = re.findall(r"\(([^)]*)\)|(\S+)", theirs)
        named = [(merged or single).split() for merged, single in axes]
        return [tuple(ours.split().index(name) for name in names if name != "1") for names in named]

    def _matrix_view(self) -> tuple[str, str]:
        if self.matrices is None:
            raise ValueError(f"{self.name} has no matrix view")
        ours, theirs = self.matrices.split("->")
        return ours.strip(), theirs.strip()


@dataclass(frozen=True)
class Box:
    """A rectangular region of a logical tensor: an offset and a size per dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box that covers a full tensor of this shape."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.size, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Return the overlap of two boxes, or None if there is none."""
        bounds = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        ]
        if any(stop <= start for start, stop in bounds):
            return None
        return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    def indices(self, dimension: int) -> range:
        """Return the range of indices along a dimension."""
        return range(self.offset[dimension], self.offset[dimension] + self.size[dimension])

    def at(self, dimensions: Sequence[int], index: Sequence[int]) -> Box:
        """Return the region with the given dimensions reduced to one index each."""
        chosen = dict(zip(dimensions, index, strict=True))
        return Box(
            tuple(chosen.get(dimension, offset) for dimension, offset in enumerate(self.offset)),
            tuple(1 if dimension in chosen else size for dimension, size in enumerate(self.size)),
        )

    def runs_of(self, part: Box) -> Iterator[tuple[int, int]]:
        """Yield the elements of `part`, a box inside this box, as runs (start, stop) in this box's row-major order."""
        corner, size = part.relative_to(self).offset, part.size
        cut = next((d for d in reversed(range(len(size))) if size[d] != self.size[d]), 0)
        length = math.prod(size[cut:])
        inner = [math.prod(self.size[dimension + 1 :]) for dimension in range(cut + 1)]
        within = zip(corner[:cut], size[:cut], strict=True)
        for index in itertools.product(*(range(first, first + count) for first, count in within)):
            start = sum(at * width for at, width in zip((*index, corner[cut]), inner, strict=True))
            yield start, start + length

    def relative_to(self, outer: Box) -> Box:
        """Return the same region with its offset relative to the offset of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)

    def flat_range(self, start: int, stop: int) -> list[tuple[Box, int]]:
        """Cut the elements [start, stop) of this box, counted in row-major order, into boxes.

        Returns:
            At most 2 * dimensions - 1 boxes, each with the position of its first element in that order.
        """
        if stop <= start:
            return []
        if len(self.size) == 1:
            return [(Box((self.offset[0] + start,), (stop - start,)), start)]
        row = Box(self.offset[1:], self.size[1:])
        first_whole, last_whole = -(-start // row.numel), stop // row.numel

        def rows(first: int, count: int, part: Box) -> Box:
            return Box((self.offset[0] + first, *part.offset), (count, *part.size))

        def part_of_row(number: int, low: int, high: int) -> list[tuple[Box, int]]:
            begin = number * row.numel
            return [(rows(number, 1, part), begin + at) for part, at in row.flat_range(low - begin, high - begin)]

        if first_whole > last_whole:
            return part_of_row(last_whole, start, stop)
        boxes = part_of_row(first_whole - 1, start, first_whole * row.numel)
        if first_whole < last_whole:
            boxes.append((rows(first_whole, last_whole - first_whole, row), first_whole * row.numel))
        return boxes + part_of_row(last_whole, last_whole * row.numel, stop)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a local parameter that store a box of a logical tensor in row-major order.

    Attributes:
        row: the first of these rows.
        rows: the number of these rows.
        splits: the splits that made the box: (dimension of the logical tensor, mesh axis).
    """

    tensor: LogicalTensor
    box: Box
    row: int
    rows: int
    splits: tuple[tuple[int, str], ...] = ()

    def view(self, local: Tensor) -> Tensor:
        """View this piece of `local`, a tensor with the layout of the local parameter, in the box's shape."""
        if not local.dim():  # the logical tensor of a number has one element
            return local.view(self.box.size)
        return local[self.row : self.row + self.rows].view(self.box.size)


@dataclass(frozen=True)
class Use:
    """A place in the network that uses a weight. The gradients of each use are summed separately.

    Attributes:
        times: number of gradients that this use accumulates per micro-batch, for example 1 + n for an output layer that
            n prediction depths use in addition. Gradients that autograd sums by itself count as one.
        chunk: index of the use's chunk among the rank's chunks that hold the weight, from 0.
        late_sum: True if its sum, beside that of another use in its chunk, has memory only from when it is needed
            (`KeptGradients`), as for an embedding.
    """

    times: int = 1
    chunk: int = 0
    late_sum: bool = False


@dataclass(frozen=True)
class Sharding:
    """The parts of one or more logical tensors that a rank holds in one local parameter.

    Rows that no piece covers are padding: they start at zero and their gradient is zero.

    Attributes:
        replica_ranks: the ranks of this data-parallel replica that hold the same values, including this rank.
        grad_is_partial: True if each replica rank computes only a part of the gradient, which must be summed over them.
        expert: True if its data-parallel ranks are those of the expert view.
        uses: the uses of the weight; two for a weight that two layers share.
    """

    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica_ranks: tuple[int, ...]
    grad_is_partial: bool
    expert: bool = False
    uses: tuple[Use, ...] = (Use(),)

    @property
    def partial_group(self) -> tuple[int, ...]:
        """The ranks over which the gradient must still be summed; empty if it is complete on each rank."""
        return self.replica_ranks if self.grad_is_partial and len(self.replica_ranks) > 1 else ()

    @property
    def data_parallel_axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks process different samples (or tokens) and therefore sum the gradient."""
        return ("edp",) if self.expert else ("dp", "cp")

    @property
    def name(self) -> str:
        return "+".join(piece.tensor.name for piece in self.pieces)


def partition_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, length) of part `index` of `total` cut into parts of ceil(total / parts).

    The last parts may be short or empty.
    """
    run = -(-total // parts)
    start = min(index * run, total)
    return start, min(run, total - start)
