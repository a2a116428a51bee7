"""Counterparts of a program's tensors in megalite's network, and the part of them that each of its ranks has.

Nothing here is written by hand for a model: the rules by which checkpoints are converted say which rows and columns of
the program's matrices are which of ours, so they also say in which order its modules take and give features. Which rows
a tensor-parallel rank has is what a rank of ours has, since both split by heads, groups and inner features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from megalite.conversion.mapping import FileTensor
from megalite.extras.verify.cuts import (
    Cut,
    NoCounterpart,
    box_of,
    fitting,
    same,
    shape_after,
    split_by,
    tokens_of,
)
from megalite.extras.verify.features import Features
from megalite.extras.verify.points import LOGITS, PRODUCT, Point
from megalite.extras.verify.trace import OF_MODULES, Entry, Role
from megalite.model.gpt import GPT
from megalite.parallel.mesh import UnconnectedMesh

_CORES = ("core_attention", "dot_product_attention", "attn", "inner_attention")
"""Last words in the names of modules of attention proper, whose output is what the output layer gets."""
_LOGITS = ("output_layer", "lm_head", "output", "embed_out")
"""Names of an output layer that is tied to the embedding, and therefore not in files."""
_FUSED_NORM = ".layer_norm"
"""Text in the names of the weights of a norm that a linear layer computes, too (Transformer Engine)."""
_OF_EXPERT = re.compile(
    r"(.+\.experts)\.(?:local_experts\.(\d{1,6})\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d{1,6}))"
)
"""Names of Megatron-LM's weights of one expert, by its number among those of the rank."""
_WITHIN_EXPERTS = re.compile(r"\.experts(\.|$)")
"""Text in the names of experts and of what is in them: which tokens these get, in which order, is the layout's."""
_FURTHER_WORDS = "prediction.embedding.word"
"""Our embedding of the inputs of depths that predict further tokens."""
_HEAD_NORM = re.compile(r"layers\.\d+\.attention\.(query|key)_norm")
"""Our norms of queries and keys, which see [sequence, batch, heads, width of a head]."""
_SHARES_INPUT = re.compile(r"layers\.\d+\.(mlp\.shared_experts(\.up)?|mlp\.router|attention\.(of_input|down))")
"""Our modules beside which others read the same tensor."""
_GRADIENTS: tuple[Role, ...] = ("input_gradient", "output_gradient")


@dataclass(frozen=True)
class Counterpart:
    """Point of megalite's network that a recorded tensor shows, and how to cut the recorded part out of it."""

    point: Point
    cut: Cut
    """Function from the point [sequence, batch, features] of whole samples to the recorded tensor."""


@dataclass(frozen=True)
class WeightCounterpart:
    """Tensor of a program's checkpoint that a recorded weight or gradient shows, and the rank's part of it."""

    tensor: FileTensor
    cut: Cut
    logical: tuple[str, ...]

    def whole(self, values: Mapping[str, Tensor]) -> Tensor:
        """Assemble the whole tensor from logical ones."""
        first = values[self.logical[0]]
        found = first.new_zeros(self.tensor.shape)
        for name, box, view in self.tensor.boxes:
            view(found).copy_(values[name][box.slices()])
        return found


@dataclass(frozen=True)
class _Module:
    """Module of the program: where its inputs and outputs are in our network, and in which order."""

    inputs: str = ""
    """Our module whose input it takes; empty for none."""
    outputs: str = ""
    columns: Tensor | None = None
    """Our feature for each of its input features; None: the same order."""
    rows: Tensor | None = None
    """Our feature for each of its output features."""
    output_role: Role = "output"
    """Role of the point that it gives, in our network."""


@dataclass(eq=False)
class Correspondence(Features):
    """Names and layouts of one program for one network.

    Attributes:
        program: its name.
        tensors: the tensors of the program's checkpoints.
        canonical: from the name of a recorded parameter to the name in `tensors`.
        order: meaning of the dimensions of hidden states where neither the trace nor the shapes tell: sbh or bsh.
        returns_bias: pattern of the names of modules that return their bias instead of adding it.
        gradients_of: as in `Trace`.
    """

    program: str
    tensors: Sequence[FileTensor]
    canonical: Callable[[str], str] = str
    order: str = "sbh"
    returns_bias: re.Pattern[str] | None = None
    gradients_of: Literal["tensors", "modules"] = "tensors"
    _by_name: dict[str, FileTensor] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {tensor.name: tensor for tensor in self.tensors}

    def count_known(self, names: Iterable[str]) -> int:
        """Return how many of these names of modules and parameters are known."""
        return sum(name in self._modules or self.canonical(name) in self._by_name for name in names)

    # -------------------------------------------------------------------------------------------- weights

    def of_weight(self, entry: Entry, coordinates: Mapping[str, tuple[int, int]]) -> WeightCounterpart:
        """Return the counterpart of a recorded parameter or gradient. Raises NoCounterpart."""
        tensor = self._by_name.get(self.canonical(entry.name)) or self._tied(entry.name)
        if tensor is None:
            if (of_expert := self._of_expert(entry, coordinates)) is not None:
                return of_expert
            raise NoCounterpart(f"{entry.name} is no weight of this network")
        logical = tuple(dict.fromkeys(name for name, _, _ in tensor.boxes))
        if entry.shape == tensor.shape:
            return WeightCounterpart(tensor, same, logical)
        if entry.place is not None and entry.place.offset is not None:
            return WeightCounterpart(tensor, box_of(entry.place.offset, entry.shape, tensor.shape), logical)
        splits = () if entry.place is None else entry.place.splits
        cut = self._cut_of_rank(tensor, coordinates) if all(split.axis == "tp" for split in splits) else None
        if cut is not None and shape_after(cut, tensor.shape) == entry.shape:
            return WeightCounterpart(tensor, cut, logical)
        if entry.place is not None and splits:
            return WeightCounterpart(tensor, split_by(entry.place, entry.shape, tensor.shape), logical)
        contiguous = _contiguous(tensor.shape, coordinates.get("tp", (0, 1)))
        if len(tensor.shape) <= 2 and shape_after(contiguous, tensor.shape) == entry.shape:
            return WeightCounterpart(tensor, contiguous, logical)
        raise NoCounterpart(
            f"{entry.name} has shape {list(entry.shape)} on rank {entry.rank}, which is no part of "
            f"{list(tensor.shape)} that is known"
        )

    def _of_expert(self, entry: Entry, coordinates: Mapping[str, tuple[int, int]]) -> WeightCounterpart | None:
        """Return the counterpart of a weight of one of a rank's experts, all of which are one tensor in files."""
        found = _OF_EXPERT.fullmatch(entry.name)
        tensor = None if found is None else self._by_name.get(f"{found[1]}.experts.{found[3] or found[4]}.weight")
        if found is None or tensor is None:
            return None
        (rank, ranks), (part, parts) = coordinates.get("ep", (0, 1)), coordinates.get("etp", (0, 1))
        expert = rank * (tensor.shape[0] // ranks) + int(found[2] or found[5])
        is_first = "linear_fc1" in entry.name
        halves = 1 + (is_first and self.model.activation.gated)

        def cut(whole: Tensor) -> Tensor:
            if is_first:
                return whole[expert].unflatten(0, (halves, -1)).chunk(parts, 1)[part].flatten(0, 1)
            return whole[expert].chunk(parts, 1)[part]

        if expert >= tensor.shape[0] or shape_after(cut, tensor.shape) != entry.shape:
            raise NoCounterpart(f"{entry.name} has shape {list(entry.shape)}, which is no part of an expert's")
        return WeightCounterpart(tensor, cut, tuple(dict.fromkeys(name for name, _, _ in tensor.boxes)))

    def _tied(self, name: str) -> FileTensor | None:
        """Return the tensor of the embedding for the weight of an output layer that is tied to it, on a last stage."""
        if self.model.untie_embeddings_and_output_weights or name not in [f"{each}.weight" for each in _LOGITS]:
            return None
        return next((each for each in self.tensors if each.boxes[0][0] == "embedding.word"), None)

    def _cut_of_rank(self, tensor: FileTensor, coordinates: Mapping[str, tuple[int, int]]) -> Cut | None:
        """Return the cut of a tensor of the files for a tensor-parallel rank, by what a rank of ours has."""
        own = self._placed.get(tensor.boxes[0][0])
        if own is None or len(tensor.shape) > 2:
            return None
        part = self._part(self._stage_of(own.module), *coordinates.get("tp", (0, 1)))
        kept: list[Tensor | None] = []
        for dimension, numbers in enumerate(self._numbers(tensor)):
            kinds = part.columns if self._is_input(tensor, dimension) else part.rows
            own_numbers = kinds.get(own.module)
            inside = None if numbers is None or own_numbers is None else torch.isin(numbers, own_numbers)
            kept.append(None if inside is None else inside.nonzero().flatten())

        def cut(whole: Tensor) -> Tensor:
            for dimension, numbers in enumerate(kept):
                if numbers is not None and len(numbers) < whole.shape[dimension]:
                    whole = whole.index_select(dimension, numbers)
            return whole

        return cut

    # -------------------------------------------------------------------------------------------- modules

    def of_module(
        self, entry: Entry, coordinates: Mapping[str, tuple[int, int]], batch: int, sequence: int
    ) -> Counterpart:
        """Return the counterpart of a recorded input, output or gradient of a module.

        Args:
            batch: samples of a micro-batch.
            sequence: tokens of a sample, over all context-parallel ranks.

        Raises:
            NoCounterpart: the module has none, or the tensor has a shape that is not understood.
        """
        if entry.role not in OF_MODULES:
            raise ValueError(f"{entry.role} is not of a module")
        module = self._modules.get(entry.name)
        if module is None:
            raise NoCounterpart(f"{entry.name or 'the whole model'} has no counterpart in this network")
        takes = entry.role.startswith("input")
        name = module.inputs if takes else module.outputs
        if not name or entry.number > 0:
            which = f"a further {entry.role}" if entry.number else entry.role
            raise NoCounterpart(f"{which} of {entry.name} has no counterpart in this network")
        # The last tokens of depths are others, in front of labels that do not count: the gradients there are zero.
        of_depth = name.startswith("prediction.") and entry.role != "output_gradient"
        if self.program != "megalite" and self.model.depths and (name == LOGITS or of_depth):
            raise NoCounterpart(f"{entry.role} of {entry.name}: depths have it, too, and other tokens")
        if self.program == "megalite" and name in self._of_all_depths:
            raise NoCounterpart(f"{entry.role} of {entry.name} is that of the tokens of all depths together")
        if entry.place is not None and entry.place.partial:
            axes = ", ".join(entry.place.partial)
            raise NoCounterpart(f"{entry.role} of {entry.name} is one term of a sum over axis {axes}")
        if entry.role == "input_gradient" and self.gradients_of == "modules" and not self._reads_alone(module):
            raise NoCounterpart(f"the input of {entry.name} has other readers, and its gradient only one part")
        role: Role = entry.role
        if not takes and module.output_role == "input":
            role = "input" if entry.role == "output" else "input_gradient"
        order = module.columns if takes else module.rows
        tp = coordinates.get("tp", (0, 1))
        shares = name.endswith(".attention.key_norm") and role.endswith("gradient") and tp[1] > self.model.kv_groups
        if shares or Point(name, role) in self._part(self._stage_of(name), *tp).terms:
            raise NoCounterpart(f"{entry.role} of {entry.name} is one term of a sum over ranks that share its heads")
        features = self._features(name, role)
        order = torch.arange(features) if order is None else order
        cut = self._cut(entry, coordinates, name, role, order, batch, sequence)
        if entry.role == "output" and self.returns_bias is not None and self.returns_bias.search(entry.name):
            name = self._without_bias(name)
        return Counterpart(Point(name, role), cut)

    def _without_bias(self, module: str) -> str:
        """Return the name of a module's output without the bias of its last linear layer, if that has one."""
        last = next((each for each in (module, f"{module}.output", f"{module}.down") if each in self._biased), None)
        return module if last is None else f"{last}{PRODUCT}"

    def _reads_alone(self, module: _Module) -> bool:
        """Tell whether a module of the program is the only one that reads its input."""
        if module.inputs.endswith("norm") or _SHARES_INPUT.fullmatch(module.inputs) is not None:
            return False
        return module.rows is None or len(module.rows) == self._features(module.outputs, "output")

    @cached_property
    def _of_all_depths(self) -> frozenset[str]:
        """Names of our modules that take the tokens of several depths at once, of which ranks have parts of each."""
        if not self.model.depths:
            return frozenset()
        return frozenset({_FURTHER_WORDS} if self.model.mtp_detach_heads else {_FURTHER_WORDS, LOGITS})

    def _cut(
        self,
        entry: Entry,
        coordinates: Mapping[str, tuple[int, int]],
        name: str,
        role: Role,
        order: Tensor,
        batch: int,
        sequence: int,
    ) -> Cut:
        """Return the cut of a point: the rank's tokens, then its features, in the order of the program's dimensions."""
        tp, cp = coordinates.get("tp", (0, 1)), coordinates.get("cp", (0, 1))
        places = tokens_of(cp, sequence)
        own = self._own(name, role, order, tp)
        dimensions = entry.place.dimensions if entry.place is not None else ""
        shape, heads = entry.shape, 0 if self._head_norm(name) is None else self.model.head_dim
        if heads and shape[-1] == heads and len(shape) > 2:
            shape, dimensions = (*shape[:-2], shape[-2] * heads), dimensions[:-1]
        choices = [own]
        if len(order) % tp[1] == 0:  # ours may have all of it on each rank
            choices.append(order.view(tp[1], -1)[tp[0]])
        for own in choices:
            found = fitting(
                shape, dimensions or self.order, not dimensions, batch, len(places), tp, len(order), len(own)
            )
            if found is not None:
                break
        if found is None:
            raise NoCounterpart(
                f"{entry.role} of {entry.name} has shape {list(entry.shape)} on rank {entry.rank}, which is no part of "
                f"{len(places)} tokens x {batch} samples x {len(order)} features that is known"
            )
        dimensions, split = found
        if split.tokens:
            places = places.chunk(tp[1])[tp[0]]
        features = own if split.features else order

        def cut(whole: Tensor) -> Tensor:
            whole = whole.flatten(2) if heads else whole
            part = whole.index_select(0, places).index_select(-1, features)
            if dimensions == "sbh":
                return part.reshape(entry.shape)
            if dimensions == "bsh":
                return part.transpose(0, 1).reshape(entry.shape)
            return part.reshape(entry.shape)

        return cut

    def _own(self, name: str, role: Role, order: Tensor, tp: tuple[int, int]) -> Tensor:
        """Return the features in `order` that a tensor-parallel rank has, if the point is split over them."""
        if tp[1] == 1:
            return order
        if self._head_norm(name) is not None:
            heads = order.view(-1, self.model.head_dim)
            start, count = len(heads) * tp[0] // tp[1], max(len(heads) // tp[1], 1)
            return heads[start : start + count].flatten()
        stage = self._stage_of(name)
        part = self._part(stage, *tp)
        kept = (part.columns if role.startswith("input") else part.rows).get(name)
        return order if kept is None else order[torch.isin(order, kept)]

    @cached_property
    def _modules(self) -> Mapping[str, _Module]:
        """Modules of the program that have a counterpart, by name."""
        if self.program == "megalite":
            return {name: _Module(name, name) for name in self._own_names()}
        found: dict[str, _Module] = {}
        inside: dict[str, set[str]] = {}
        fused: dict[str, str] = {}
        for tensor in self.tensors:
            name, dot, _ = tensor.name.rpartition(".")
            own = self._placed.get(tensor.boxes[0][0])
            if not dot or own is None:
                continue
            if _FUSED_NORM in tensor.name and tensor.name.rpartition(".")[2].startswith("layer_norm_"):
                fused[name] = own.module
                continue
            parent = name
            while parent := parent.rpartition(".")[0]:
                if _WITHIN_EXPERTS.search(parent) is None:
                    inside.setdefault(parent, set()).add(own.module)
            if _WITHIN_EXPERTS.search(name) is not None:
                continue
            columns, rows = self._features_of(tensor)
            if own.module == "embedding.word" or own.module.endswith("norm"):
                found.setdefault(name, _Module("" if own.module == "embedding.word" else own.module, own.module))
            elif own.module in self._composed:
                found[name] = _Module()  # one product of several within a module of ours
            elif own.is_matrix and rows is not None and len(tensor.shape) == 2:
                found[name] = _Module(own.module, own.module if own.is_linear else "", columns, rows)
        for name, norm in fused.items():  # the norm by itself has the names of other versions
            if name in found:
                found[name] = replace(found[name], inputs=norm, columns=None)
        for name, ours in inside.items():
            if name not in found and (path := _common(ours)) and not _is_part_of_layer(name, path):
                norms = [norm for each, norm in fused.items() if each.startswith(f"{name}.")]
                enters = norms[0] if norms and re.fullmatch(r"layers\.\d+\.\w+", path) else path
                found[name] = _Module(enters, path)
            self._add_core(found, name, ours)
        for name in _LOGITS:
            if name not in found:
                found[name] = _Module(LOGITS, LOGITS)
        return found

    def _own_names(self) -> Iterator[str]:
        """Yield the names of our modules, without experts: which tokens these get, in which order, is the layout's."""
        network = GPT(self.model, UnconnectedMesh(device=torch.device("meta")))
        return (name for name, _ in network.named_modules() if name and "experts" not in name.split("."))

    def _add_core(self, found: dict[str, _Module], name: str, ours: set[str]) -> None:
        """Add the names that a module of attention proper may have, within an attention layer."""
        output = next((each for each in ours if re.fullmatch(r"layers\.\d+\.attention\.output", each)), None)
        if output is None or _common(ours) != output.rpartition(".")[0] or self.model.attention_output_gate:
            return  # a gate stands between the two
        columns = next(
            (each.columns for each in found.values() if each.outputs == output and each.columns is not None), None
        )
        for word in _CORES:
            found.setdefault(f"{name}.{word}", _Module("", output, None, columns, "input"))

    def separate_norms(self, names: Sequence[str]) -> None:
        """Take norms as modules of their own where the trace has such modules, as without Transformer Engine."""
        modules = dict(self._modules)
        for name in dict.fromkeys(names):
            target, dot, rest = self.canonical(f"{name}.weight").rpartition(".layer_norm_")
            if not dot or name in modules or rest != "weight":
                continue
            tensor = self._by_name.get(f"{target}.layer_norm_weight")
            if tensor is None:
                continue
            norm = self._placed[tensor.boxes[0][0]].module
            modules[name] = _Module(norm, norm)
            parent = target
            while parent:  # also if the target is no module of its own, as with experts
                if parent in modules and modules[parent].inputs == norm:
                    linear = modules[parent].outputs
                    columns = None if parent != target else self._features_of(self._by_name[f"{target}.weight"])[0]
                    modules[parent] = replace(modules[parent], inputs=linear, columns=columns)
                parent = parent.rpartition(".")[0]
        self.__dict__["_modules"] = modules


def _contiguous(shape: Sequence[int], tp: tuple[int, int]) -> Cut:
    """Return the cut of rows in a row for a rank, of a matrix that each of our ranks has whole."""
    return lambda whole: whole.chunk(tp[1])[tp[0]] if shape and shape[0] % tp[1] == 0 else whole


def _is_part_of_layer(name: str, path: str) -> bool:
    """Tell whether a layer of the program, with its norm and residual, has the weights of a part of a layer of ours.

    So it is with --hybrid-layer-pattern, where a mixer is a layer, and an MLP another one.
    """
    return re.search(r"\.\d+$", name) is not None and re.fullmatch(r"layers\.\d+\..+", path) is not None


def _common(names: set[str]) -> str:
    """Return the path that contains all of these modules; empty if only the whole network does."""
    first, *others = [name.split(".") for name in names]
    parts = first if others else first[:-1]
    for other in others:
        parts = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, other, strict=False))]
    path = ".".join(parts)
    return path if re.fullmatch(r"layers\.\d+(\.\w+)*|embedding|head", path) else ""
