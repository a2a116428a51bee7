"""Features of megalite's modules: which a rank has, and which rows and columns of other programs' matrices they are.

Which of them a tensor-parallel rank has is what a rank of megalite has: programs split by heads, groups and inner
features alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.mapping import FileTensor
from megalite.extras.verify.points import HEAD, Point, global_name, owners
from megalite.extras.verify.trace import Role
from megalite.model.gpt import GPT
from megalite.model.norm import LayerNorm
from megalite.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.parallel.mesh import UnconnectedMesh

_HEAD_NORM = re.compile(r"layers\.\d+\.attention\.(query|key)_norm")
"""Our norms of queries and keys, which see [sequence, batch, heads, width of a head]."""
_GRADIENTS: tuple[Role, ...] = ("input_gradient", "output_gradient")


@dataclass(eq=False)
class Features:
    """Features of the modules of one network.

    Attributes:
        model: the network, with its vocabulary size.
    """

    model: ModelConfig

    def _features(self, module: str, role: Role) -> int:
        """Return the number of features of a point."""
        if (norm := self._head_norm(module)) is not None:
            return self._heads(norm[1]) * self.model.head_dim
        sizes = self._widths.get(module)
        if (module, role) == (HEAD, "output"):
            return 1
        if sizes is None:
            return self.model.hidden_size
        return sizes[0 if role.startswith("input") else 1]

    def _head_norm(self, module: str) -> re.Match[str] | None:
        """Return the match of the name of a norm of each head, which those of latents are not."""
        found = _HEAD_NORM.fullmatch(module)
        return None if found is None or f"{module.rpartition('.')[0]}.down" in self._widths else found

    def _heads(self, kind: str) -> int:
        """Return the number of heads of queries or keys."""
        return self.model.num_attention_heads if kind == "query" else self.model.kv_groups

    def part_of_rank(self, module: str, rank: int, ranks: int) -> Part:
        """Return what a tensor-parallel rank has of the features of a module of ours, and of its neighbours."""
        return self._part(self._stage_of(module), rank, ranks)

    def module_of(self, logical: str) -> str:
        """Return the module of ours that uses a logical tensor."""
        return self._placed[logical].module

    def rows_of(self, logical: str) -> Tensor | None:
        """Return our output features that a logical tensor gives; None if the network has no such tensor."""
        placed = self._placed.get(logical)
        return None if placed is None else placed.rows.unique()

    def features(self, module: str) -> tuple[int, int]:
        """Return the numbers of input and output features of a module of ours."""
        return self._features(module, "input"), self._features(module, "output")

    def is_transposed(self, tensor: FileTensor) -> bool:
        """Tell whether files have a matrix as [inputs, outputs]."""
        return self._is_input(tensor, 0)

    @cached_property
    def _placed(self) -> Mapping[str, _Placed]:
        """Places of all logical tensors, by name. Numbers of rows and columns are expanded, and take no memory."""
        found: dict[str, _Placed] = {}
        network = GPT(self.model, UnconnectedMesh(device=torch.device("meta")))
        modules = dict(network.named_modules())
        for path, _, parameter in owners(network):
            shape = tuple(parameter.shape)
            linear = isinstance(modules[path], ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)
            rows = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape) if shape else torch.zeros(())
            columns = torch.arange(shape[-1]).expand(shape) if shape else torch.zeros(())
            for piece in parameter.sharding.pieces:
                placed = _Placed(path, piece.view(rows), piece.view(columns), len(shape) == 2, linear)
                found.setdefault(piece.tensor.name, placed)
        return found

    @cached_property
    def _widths(self) -> Mapping[str, tuple[int, int]]:
        """Numbers of input and output features of our linear layers and norms, by name."""
        network = GPT(self.model, UnconnectedMesh(device=torch.device("meta")))
        found: dict[str, tuple[int, int]] = {}
        for path, _, parameter in owners(network):
            if path.endswith("norm"):
                found[path] = parameter.shape[-1], parameter.shape[-1]
            elif len(parameter.shape) == 2 and not path.startswith("embedding") and path not in self._composed:
                before = found.get(path, (parameter.shape[1], 0))
                found[path] = parameter.shape[1], before[1] + parameter.shape[0]
        return found

    @cached_property
    def _composed(self) -> frozenset[str]:
        """Names of our modules that have weights of their own, and others within them that have some."""
        names = {placed.module for placed in self._placed.values()}
        return frozenset(name for name in names if any(each.startswith(f"{name}.") for each in names))

    @cached_property
    def _biased(self) -> frozenset[str]:
        """Names of our linear layers that have a bias."""
        network = GPT(self.model, UnconnectedMesh(device=torch.device("meta")))
        return frozenset(
            path
            for path, _, parameter in owners(network)
            if len(parameter.shape) == 1 and path in self._widths and not path.endswith("norm")
        )

    def _stage_of(self, module: str) -> StageLayers:
        """Return a stage that has a module of ours, and little else."""
        match = re.match(r"layers\.(\d+)", module)
        if match is not None:
            return StageLayers(int(match[1]), 1, embedding=False, loss=False)
        return StageLayers(0, 0, module.startswith("embedding"), not module.startswith("embedding"))

    @lru_cache(maxsize=4096)  # noqa: B019  # a correspondence lives as long as the program
    def _part(self, stage: StageLayers, rank: int, ranks: int) -> Part:
        """Return what a tensor-parallel rank has of the features of a stage's linear layers."""
        mesh = UnconnectedMesh(rank=rank, world_size=ranks, tensor_parallel_size=ranks, device=torch.device("meta"))
        network = GPT(self.model, mesh, stage_layers=stage)
        rows: dict[str, list[Tensor]] = {}
        columns: dict[str, list[Tensor]] = {}
        terms: set[Point] = set()
        for path, _, parameter in owners(network):
            name, module = global_name(path, stage.first_layer), network.get_submodule(path)
            if parameter.sharding.partial_group and not isinstance(module, LayerNorm):
                terms |= _terms(name, module)
            for piece in parameter.sharding.pieces:
                placed = self._placed.get(piece.tensor.name)
                if placed is None:
                    continue
                rows.setdefault(name, []).append(placed.rows[piece.box.slices()].unique())
                if placed.is_matrix:
                    columns.setdefault(name, []).append(placed.columns[piece.box.slices()].unique())
        return Part(
            {name: torch.cat(each).unique() for name, each in rows.items()},
            {name: torch.cat(each).unique() for name, each in columns.items()},
            frozenset(terms),
        )

    def _numbers(self, tensor: FileTensor) -> tuple[Tensor | None, ...]:
        """Return our output or input feature for each index of each dimension of a file's tensor.

        None for a tensor that is no matrix or vector of one of our modules.
        """
        shape = tensor.shape
        if not 1 <= len(shape) <= 2 or any(name not in self._placed for name, _, _ in tensor.boxes):
            return (None, None)
        found = []
        for dimension, length in enumerate(shape):
            theirs = torch.arange(length).view([-1 if each == dimension else 1 for each in range(len(shape))])
            numbers = torch.zeros(length, dtype=torch.long)
            for name, box, view in tensor.boxes:
                placed, index = self._placed[name], box.slices()
                ours = placed.columns if self._is_input(tensor, dimension) else placed.rows
                _pair(numbers, view(theirs.expand(shape)), ours[index])
            found.append(numbers)
        return tuple(found)

    def _is_input(self, tensor: FileTensor, dimension: int) -> bool:
        """Tell whether a dimension of a file's matrix is that of input features: files may have matrices transposed."""
        if len(tensor.shape) == 1:
            return False
        name, _, view = tensor.boxes[0]
        theirs = torch.arange(tensor.shape[dimension]).view([-1 if at == dimension else 1 for at in range(2)])
        moves = [stride != 0 for stride in view(theirs.expand(tensor.shape)).stride()]
        return moves == [stride != 0 for stride in self._placed[name].columns.stride()]

    def _features_of(self, tensor: FileTensor) -> tuple[Tensor | None, Tensor | None]:
        """Return our input feature and our output feature for each of those of a module with this weight."""
        numbers = self._numbers(tensor)
        if len(numbers) != 2 or numbers[0] is None:
            return None, None
        return (numbers[0], numbers[1]) if self._is_input(tensor, 0) else (numbers[1], numbers[0])


@dataclass(frozen=True)
class _Placed:
    """Place of a logical tensor: the module that uses it, and our row and column of each of its elements."""

    module: str
    rows: Tensor
    columns: Tensor
    is_matrix: bool
    is_linear: bool
    """True if the module gives the product with it, and no more."""


@dataclass(frozen=True)
class Part:
    """Numbers of our output features (rows) and input features (columns) that a rank has, by module of ours.

    Attributes:
        terms: gradients that on each rank are one term of a sum, since ranks use the same features for different heads.
    """

    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    terms: frozenset[Point]


def _terms(name: str, module: nn.Module) -> set[Point]:
    """Return the gradients that are terms, of a module with weights that ranks use for different heads."""
    if not isinstance(module, ColumnParallelLinear):
        return {Point(name, role) for role in _GRADIENTS}
    after = name.replace(".query_key_value", ".key_norm")
    return {Point(name, "output_gradient"), *(Point(after, role) for role in _GRADIENTS if after != name)}


def _pair(numbers: Tensor, theirs: Tensor, ours: Tensor) -> None:
    """Write our numbers at their places. Dimensions along which neither changes are left out."""
    for dimension in reversed(range(theirs.dim())):
        if theirs.stride(dimension) == 0 and ours.stride(dimension) == 0:
            theirs, ours = theirs.select(dimension, 0), ours.select(dimension, 0)
    numbers[theirs.reshape(-1)] = ours.reshape(-1).long()
