"""Modules of PEFT's folders: the linear layers, tables and experts of a Hugging Face model, with megalite's matrices.

transformers 5 has the experts of a layer in tensors [experts, outputs, inputs], whatever its files have. PEFT adapts
such a parameter as a whole (`target_parameters`), with A and B of all its experts in one tensor each: A is
[experts * rank, inputs], B [outputs, rank * experts]. Two parameters of a module are wrapped one in the other: the
adapters of all but the last have names with `base_layer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.conversion.mapping import FileTensor
from megalite.parallel.adapter_matrices import MAGNITUDE, A, B, Matrix, matrices_of
from megalite.parallel.sharding import Box, LogicalTensor

WORDS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
LOOKED_UP = {**WORDS, A: "lora_embedding_B", B: "lora_embedding_A"}
"""Words for the factors of a table that is looked up, whose transposed matrix PEFT adapts."""
_OF_EXPERTS = re.compile(r"(.*\.experts)\.(?:0\.\w+\.weight|\w+_proj)")
"""Tensors of the first expert, or of all."""
_RENAMED = {"block_sparse_moe": "mlp"}
"""Words in the names of files that are others in transformers 5."""


@dataclass(frozen=True)
class Place:
    """Part of a matrix of the network, or of one of each expert, in a module of the files.

    Attributes:
        box: the part of the logical tensor.
        rows: outputs of the module, in the order of the part's rows.
        columns: inputs of the module, in the order of its columns.
    """

    matrix: Matrix
    box: Box
    rows: Tensor
    columns: Tensor

    @property
    def with_lengths(self) -> Tensor:
        """Outputs or inputs of the module that have DoRA's lengths."""
        return self.columns if self.matrix.looked_up else self.rows


@dataclass(frozen=True)
class Module:
    """Linear layer of the files, a table, or a parameter of experts, with the matrices that it holds.

    Attributes:
        experts: their number, if it is theirs.
        parameter: the name of theirs.
        looked_up: True for an embedding.
    """

    name: str
    outputs: int
    inputs: int
    transposed: bool
    places: tuple[Place, ...]
    experts: int = 0
    parameter: str = ""
    looked_up: bool = False

    def beside(self, other: Module) -> Module:
        """Return the parameter of experts with its rows and those of another below, or above: gates are first."""
        first, second = (other, self) if _is_gate(other) else (self, other)
        below = tuple(replace(place, rows=place.rows + first.outputs) for place in second.places)
        return replace(self, outputs=first.outputs + second.outputs, places=(*first.places, *below))

    @property
    def target(self) -> str:
        """Name by which PEFT targets it."""
        return f"{self.name}.{self.parameter}" if self.parameter else self.name

    @property
    def largest_rank(self) -> int:
        """Largest rank of an update of its matrices, each of which has factors of its own."""
        return sum(min(len(place.rows), len(place.columns)) for place in self.places)

    @property
    def words(self) -> dict[str, str]:
        """Words of PEFT for the tensors of its adapter, by ours."""
        return LOOKED_UP if self.looked_up else {A: WORDS[A], B: WORDS[B]} if self.experts else WORDS

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of its adapter in files."""
        if self.looked_up:
            return {A: (self.inputs, rank), B: (rank, self.outputs), MAGNITUDE: (self.inputs,)}
        numbered = rank * max(self.experts, 1)
        found: dict[str, tuple[int, ...]] = {A: (numbered, self.inputs), B: (self.outputs, numbered)}
        return found if self.experts else {**found, MAGNITUDE: (self.outputs,)}

    def from_files(self, word: str, values: Tensor) -> Tensor:
        """Return a factor of a file as A [experts or 1, rank, inputs], or as B [experts or 1, outputs, rank]."""
        if word == MAGNITUDE:
            return values
        if self.looked_up:
            return values.t()[None]
        if not self.experts:
            return values[None]
        if word == A:
            return values.unflatten(0, (self.experts, -1))
        return values.unflatten(1, (-1, self.experts)).permute(2, 0, 1)

    def to_files(self, word: str, values: Tensor) -> Tensor:
        """Invert `from_files`."""
        if word == MAGNITUDE:
            return values
        if self.looked_up:
            return values[0].t().contiguous()
        if not self.experts:
            return values[0]
        return values.flatten(0, 1) if word == A else values.permute(1, 2, 0).flatten(1)


def _is_gate(module: Module) -> bool:
    return module.places[0].matrix.part is not None and module.places[0].matrix.part[1] == 0


def modules_of(mapping: Sequence[FileTensor], tensors: Mapping[str, LogicalTensor]) -> Iterator[Module]:
    """Yield the modules that hold matrices of the network, parameters of experts last.

    Args:
        mapping: the tensors of the files.
        tensors: the records of the network's weights.
    """
    experts = dict[str, Module]()
    for each in mapping:
        if len(each.shape) == 2 and each.name.endswith(".weight") and (found := _linear(each, tensors)) is not None:
            yield found
        elif (match := _OF_EXPERTS.fullmatch(each.name)) is not None and (own := _of_experts(each, match, tensors)):
            there = experts.get(own.target)
            experts[own.target] = own if there is None else there.beside(own)
    yield from sorted(experts.values(), key=lambda module: (module.name, module.parameter == "down_proj"))


def _linear(each: FileTensor, tensors: Mapping[str, LogicalTensor], *, of_experts: bool = False) -> Module | None:
    """Return the module of a weight of the files; None if it holds no matrix. `of_experts`: as the first expert's."""
    shape = each.shape
    number = [torch.arange(shape[-2])[:, None].expand(shape), torch.arange(shape[-1]).expand(shape)]
    places: list[Place] = []
    transposed = False
    for name, box, view in each.boxes:
        for matrix in matrices_of(tensors[name]) if name in tensors else ():
            part, at = box, [view(index) for index in number]
            if bool(matrix.experts) is not of_experts:
                continue
            if of_experts:
                at = [numbers[:1] for numbers in at]
                part = Box((0, *box.offset[1:]), (1, *box.size[1:]))
            if matrix.part is not None:
                dimension, index = matrix.part
                if index not in part.indices(dimension):
                    continue
                whole, part = part, part.at([dimension], [index])
                at = [numbers[part.relative_to(whole).slices()] for numbers in at]
            columns = math.prod(part.size[d] for d in matrix.columns)
            at = [numbers.reshape(-1, columns) for numbers in at]
            transposed = bool((at[0][:, 0] == at[0][0, 0]).all()) and len(at[0]) > 1
            rows, inner = at[1 if transposed else 0], at[0 if transposed else 1]
            places.append(Place(matrix, part, rows[:, 0].clone(), inner[0].clone()))
    if not places:
        return None
    outputs, inputs = shape[:-3:-1] if transposed else shape[-2:]
    return Module(
        each.name.removesuffix(".weight"),
        outputs,
        inputs,
        transposed,
        tuple(places),
        looked_up=places[0].matrix.looked_up,
    )


def _of_experts(each: FileTensor, match: re.Match[str], tensors: Mapping[str, LogicalTensor]) -> Module | None:
    """Return the parameter of experts in which a tensor of the files is, with the places of this tensor alone."""
    linear = _linear(each, tensors, of_experts=True)
    words = {place.matrix.name.rpartition(".")[2] for place in linear.places} if linear is not None else set()
    if linear is None:
        return None
    experts = linear.places[0].matrix.tensor.shape[0]
    places = tuple(replace(p, box=Box(p.box.offset, (experts, *p.box.size[1:]))) for p in linear.places)
    name = ".".join(_RENAMED.get(word, word) for word in match[1].split("."))
    parameter = "gate_up_proj" if linear.places[0].matrix.part is not None else f"{words.pop()}_proj"
    return replace(linear, name=name, transposed=False, places=places, experts=experts, parameter=parameter)


def prefixes(modules: Iterable[Module]) -> dict[str, str]:
    """Return what the names of the tensors of each adapted module begin with, by its target.

    `modules`: all that are adapted, in the order of `modules_of`.
    """
    found: dict[str, str] = {}
    of_parameters: dict[str, list[str]] = {}
    for module in modules:
        found[module.target] = module.name
        if module.parameter:
            of_parameters.setdefault(module.name, []).append(module.target)
    for name, targets in of_parameters.items():
        found |= {target: name + ".base_layer" * behind for behind, target in enumerate(reversed(targets))}
    return found


def shortest_names(chosen: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return the last words of names where they stand for chosen names alone, and the other names whole."""
    chosen = set(chosen)
    spared = {name.rpartition(".")[2] for name in set(every) - chosen}
    return sorted({word if (word := name.rpartition(".")[2]) not in spared else name for name in chosen})
