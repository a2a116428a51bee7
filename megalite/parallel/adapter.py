"""Low-rank adapters of linear layers: LoRA (arXiv:2106.09685), rsLoRA (arXiv:2312.03732), DoRA (arXiv:2402.09353).

A layer with the frozen weights W has two small matrices for each matrix that it applies, of which B begins with zeros:

    y = W x + scale * B (A x);    with DoRA, (|W| + m) / |W + scale * B A| * (W x + scale * B (A x)), by row

A rank has the rows of B that it has of W, and the columns of A (`adapter_matrices.py`). What is not split (A of a
column-parallel layer, B of a row-parallel one) has a gradient that is partial over the ranks of the layer. So A x is
one more product of the input that the layer gathers anyway, and B is applied before the sum over the ranks: LoRA sends
no messages of its own.

DoRA learns the difference m between the lengths of rows and their first ones, which begins with zeros whatever the
weights are. As in PEFT, the norm has no gradient. Where ranks split columns (in row-parallel layers), each forward sums
the squares of both lengths over them: two numbers a row.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.config.adapters import AdaptersConfig, is_target
from megalite.config.fields import flag_of
from megalite.errors import ConfigurationError
from megalite.parallel import collectives
from megalite.parallel.adapter_matrices import MAGNITUDE, A, B, Matrix, matrices_of, row_factors
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Gradient, Parameter, ProductGradient
from megalite.parallel.placement import stacked
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite.parallel.sharding import Piece, Sharding


@dataclass(frozen=True)
class Term:
    """A part of the rows of a weight that belongs to one matrix, and the rows of B for it.

    Attributes:
        weight: the number of the weight among those of the layer.
        piece: the piece of the weight.
        part: `Matrix.part`.
        columns: number of last dimensions of the weight's tensor that are columns.
        first: the first column of the piece in the layer's output.
        inner: columns of A x.
        rows: rows of the layer's B for this weight.
    """

    weight: int
    piece: Piece
    part: tuple[int, int] | None
    columns: int
    first: int
    inner: slice
    rows: slice

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return self.piece.box.size[: len(self.piece.box.size) - self.columns]

    def of_output(self, output: Tensor) -> Tensor:
        """View columns of an output [tokens, columns] as [tokens, rows of B], or as [tokens, ..., ...]."""
        found = output[:, self.first : self.first + self.piece.rows]
        if self.part is None:
            return found
        found = found.unflatten(1, self._shape).select(1 + self.part[0], self.part[1])
        return found.flatten(1) if math.prod(self._shape[: self.part[0]]) == 1 else found

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return rows of a weight [rows of B, columns]."""
        found = self.piece.view(weight)
        found = found if self.part is None else found.select(*self.part)
        return found.reshape(self.rows.stop - self.rows.start, math.prod(found.shape[-self.columns :]))


@dataclass(frozen=True)
class _Products(Gradient):
    """The gradient of a parameter whose rows are each a factor of one product, in order; behind them is padding."""

    products: tuple[tuple[slice, ProductGradient], ...]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        for rows, product in self.products:
            product.add_to(target[rows], overwrite=overwrite)
        if overwrite:
            target[self.products[-1][0].stop :].zero_()


@dataclass(frozen=True)
class Update:
    """Addition to the output of a linear layer, from A x of all its matrices, [tokens, inner].

    Attributes:
        width: number of columns of the output.
        over: the ranks that have other columns of the weights; None if each has all columns.
    """

    scale: float
    terms: tuple[Term, ...]
    width: int
    over: Group | None = None

    @property
    def weights(self) -> int:
        """Number of adapted weights, each with a B."""
        return self.terms[-1].weight + 1

    def add(self, output: Tensor, inner: Tensor, b: Sequence[Tensor]) -> None:
        """Add scale * B (A x) to [tokens, columns], and multiply A x with the scale, both in place."""
        inner.mul_(self.scale)
        for term in self.terms:
            place, rows = term.of_output(output), b[term.weight][term.rows].t()
            if place.dim() == 2:
                place.addmm_(inner[:, term.inner], rows)
            else:
                place.add_((inner[:, term.inner] @ rows).view(place.shape))

    def of_inner(self, gradient: Tensor, a: Tensor, b: Sequence[Tensor]) -> Tensor:
        """Return the gradient of A x, from that of the output, [tokens, columns]."""
        found = gradient.new_zeros(len(gradient), len(a))
        for term in self.terms:
            rows = b[term.weight].detach()[term.rows]
            found[:, term.inner].addmm_(term.of_output(gradient).flatten(1), rows, alpha=self.scale)
        return found

    def of_b(self, gradient: Tensor, inner: Tensor, weight: int) -> Gradient:
        """Return the gradient of the rows of B for a weight. `inner`: scale * A x."""
        return _Products(
            tuple(
                (term.rows, ProductGradient(term.of_output(gradient).flatten(1), inner[:, term.inner]))
                for term in self.terms
                if term.weight == weight
            )
        )

    def row_changes(
        self, weights: Sequence[Tensor], a: Tensor, b: Sequence[Tensor], magnitudes: Sequence[Tensor]
    ) -> Tensor:
        """Return the factors of the output's columns by which rows get the lengths of DoRA, less 1: [width]."""
        # In fp32 or wider, and less 1: in bf16, a factor has no difference of a thousandth.
        wide = torch.promote_types(a.dtype, torch.float32)
        factors = torch.ones(self.width, dtype=wide, device=a.device)
        for term in self.terms:
            first, now = self._lengths(term, weights[term.weight], a, b[term.weight])
            columns = term.of_output(torch.arange(self.width, device=a.device)[None]).flatten()
            own = row_factors(first, magnitudes[term.weight][term.rows].to(wide), now)
            factors = factors.index_copy(0, columns, own)
        return (factors - 1.0).to(a.dtype)

    @torch.no_grad()
    def _lengths(self, term: Term, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Return the lengths of rows without and with the update, of one matrix."""
        rows = term.of_weight(weight)
        both = torch.stack([rows, torch.addmm(rows, b[term.rows], a[term.inner], alpha=self.scale)])
        squares = both.to(torch.promote_types(both.dtype, torch.float32)).square_().sum(-1)
        if self.over is not None:
            squares = collectives.all_reduce_(squares, self.over)
        return squares.sqrt_().unbind()


class Places(Protocol):
    """Places in their samples of the tokens of a micro-batch, for dropout."""

    @property
    def key(self) -> RandomKey: ...

    @property
    def layout(self) -> SequenceLayout: ...

    @property
    def rows(self) -> Runs: ...


class Adaptable(nn.Module):
    """A linear layer that can have adapters. Their parameters are its own, as what waits for parameters expects.

    Attributes:
        update: what adapters add to the output; None if there are none.
        can_have_adapters: False for a layer that a loss of its own trains, or whose weight another one has, too.
        lacks: options of adapters, by their fields, that this layer does not compute.
        splits_output: True if a sum over the ranks of the layer leaves each with a part of the tokens.
        a: A of all adapted matrices, one below the other.
        b: B for each adapted weight, by the rows of the weight.
        magnitudes: those of DoRA for each adapted weight; empty without it.
    """

    update: Update | None = None
    can_have_adapters = True
    lacks: tuple[str, ...] = ()
    splits_output = False
    a: Parameter
    b: nn.ParameterList
    magnitudes: nn.ParameterList
    _dropout: float = 0.0

    def weights_to_adapt(self) -> list[Parameter]:
        """Return the weights of the layer."""
        raise NotImplementedError

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        """Return the ranks that have all of A, and of B, with partial gradients; None: it is placed as the weight."""
        raise NotImplementedError

    def matrices(self) -> list[Matrix]:
        """Return the matrices of the layer that can have adapters."""
        pieces = (piece for weight in self.weights_to_adapt() for piece in weight.sharding.pieces)
        tensors = {piece.tensor.name: piece.tensor for piece in pieces}
        return [matrix for tensor in tensors.values() for matrix in matrices_of(tensor)]

    def chosen(self, config: AdaptersConfig) -> list[Matrix]:
        """Return those of the matrices that the configuration names.

        Raises ConfigurationError if one of them cannot have such adapters.
        """
        found = named(self.matrices(), config.lora_target_modules)
        for matrix in found:
            matrix.check(config.lora_rank or 0)
        if found and (lacking := [flag_of(name) for name in self.lacks if getattr(config, name)]):
            raise ConfigurationError(
                f"{lacking[0]}: {found[0].name} has adapters without it alone: leave the flag out, or name what to "
                "adapt without this matrix (--lora-target-modules)"
            )
        return found

    def adapt(self, config: AdaptersConfig) -> list[str]:
        """Give adapters to the matrices that the configuration names, and return their names."""
        assert config.lora_rank is not None
        rank, weights, chosen = config.lora_rank, self.weights_to_adapt(), self.chosen(config)
        if not chosen:
            return []
        with_a, with_b = self.ranks_of_factors()
        of_a: dict[str, Sharding] = {}
        terms: list[Term] = []
        self._adapted, adapters = list[int](), list[list[Sharding]]()
        column = 0
        for number, weight in enumerate(weights):
            like, found, row = weight.sharding, list[tuple[Sharding, Sharding]](), 0
            for piece, matrix in itertools.product(like.pieces, chosen):
                if piece.tensor.name != matrix.tensor.name:
                    continue
                of_a.setdefault(matrix.name, matrix.a(rank).place(piece, like, with_a))
                placed, behind = matrix.b(rank).place(piece, like, with_b), with_a if matrix.looked_up else with_b
                lengths = matrix.magnitude().place(piece, like, behind)
                if behind is not None:  # lengths are applied behind the sum over the ranks
                    lengths = replace(lengths, grad_is_partial=self.splits_output)
                found.append((placed, lengths))
                inner, rows = chosen.index(matrix) * rank, placed.pieces[0].rows
                terms.append(
                    Term(
                        weight=len(adapters),
                        piece=piece,
                        part=matrix.part,
                        columns=len(matrix.columns),
                        first=column + piece.row,
                        inner=slice(inner, inner + rank),
                        rows=slice(row, row + rows),
                    )
                )
                row += placed.local_shape[0]
            if found:
                self._adapted.append(number)
                adapters.append([stacked([each[kind] for each in found]) for kind in range(2)])
            column += len(weight)
        self.update = Update(config.lora_scale, tuple(terms), column, with_b)
        self._dropout, self._key = config.lora_dropout, chosen[0].name

        def parameter(place: Sharding) -> Parameter:
            return Parameter(place, weights[0].dtype, weights[0].device)

        self.a = parameter(stacked([of_a[matrix.name] for matrix in chosen]))
        self.b = nn.ParameterList(parameter(b) for b, _ in adapters)
        self.magnitudes = nn.ParameterList(parameter(each) for _, each in adapters if config.use_dora)
        return [matrix.name for matrix in chosen]

    def adapted(
        self, product: Callable[..., Tensor], input: Tensor, weights: Sequence[Parameter], places: Places | None
    ) -> Tensor:
        """Return the output of the layer with its adapters.

        Args:
            product: returns the sum of the products of an input with weights, and of an update if there is one.
            places: of the tokens of the input, for dropout.
        """
        if self.update is None:
            return product(input, None, *weights)
        factors = [self.a, *[self.b[number] for number in range(len(self.b))]]  # torch 2.11 compiles no *self.b
        if self._dropout and self.training:
            output = product(input, None, *weights)
            output = output + product(self._dropped(input, places), self.update, *factors)
        else:
            output = product(input, self.update, *weights, *factors)
        if self.magnitudes:
            frozen = [self.weights_to_adapt()[number] for number in self._adapted]
            changes = self.update.row_changes(frozen, self.a, list(self.b), list(self.magnitudes))
            output = torch.addcmul(output, output, changes)
        return output

    def merged_weight(self, weight: Parameter) -> Tensor:
        """Return the only weight of a layer with its adapters merged, whose gradients autograd adds; or it itself."""
        if self.update is None:
            return weight
        if self._dropout and self.training:
            raise ConfigurationError(f"--lora-dropout: {self._key} is merged before its input is there: give 0")
        merged = torch.addmm(weight, self.b[0], self.a, alpha=self.update.scale)
        if self.magnitudes:
            changes = self.update.row_changes([weight], self.a, list(self.b), list(self.magnitudes))
            merged = torch.addcmul(merged, merged, changes[:, None])
        return merged

    def rows_of_input(self, places: Places) -> Runs:
        """Return the indices in the sample of the tokens of the input."""
        return places.rows

    def _dropped(self, input: Tensor, places: Places | None) -> Tensor:
        """Return the input with dropout, whose mask is that of the unsplit input on all ranks."""
        if places is None:
            raise ConfigurationError(f"--lora-dropout: {self._key} is not told the places of its tokens: give 0")
        box, tensor = self.a.sharding.pieces[0].box, self.a.sharding.pieces[0].tensor
        size = len(tensor.shape) - len(tensor.column_dimensions)
        width, own = math.prod(tensor.shape[size:]), input.shape[-1]
        first = box.offset[size] * (own // box.size[size])
        number = int.from_bytes(hashlib.blake2b(self._key.encode(), digest_size=4).digest(), "little") >> 1
        ones = input.new_ones(*input.shape[:-1], width)
        mask = places.key.drop(ones, self._dropout, Site(number, "adapter"), self.rows_of_input(places))
        return input * mask[..., first : first + own]


def add_adapters(network: nn.Module, config: AdaptersConfig) -> list[str]:
    """Freeze a network, and give trained adapters to the matrices that the configuration names.

    Returns:
        The names of these matrices.
    """
    network.requires_grad_(False)
    return [name for layer in adaptable_layers(network) for name in layer.adapt(config)]


def named(matrices: Iterable[Matrix], targets: Sequence[str]) -> list[Matrix]:
    """Return the matrices that `--lora-target-modules` names."""
    return [matrix for matrix in matrices if is_target(matrix.name, targets, is_table=matrix.is_table)]


def adaptable_layers(network: nn.Module) -> list[Adaptable]:
    """Return the layers of a network that can have adapters."""
    return [each for each in network.modules() if isinstance(each, Adaptable) and each.can_have_adapters]


def is_adapters(name: str) -> bool:
    """Tell whether a tensor of this name belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B, MAGNITUDE)


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose tensors all have names that match a pattern."""
    for parameter in network.parameters():
        if isinstance(parameter, Parameter) and parameter.requires_grad:
            names = [piece.tensor.name for piece in parameter.sharding.pieces]
            parameter.requires_grad_(not all(is_frozen(name, patterns) for name in names))


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether `--freeze` has a weight of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def train_a_part(network: nn.Module, config: AdaptersConfig) -> None:
    """Add the adapters that a configuration asks for, or freeze the weights that it names."""
    if config.lora_rank is not None:
        add_adapters(network, config)
    elif config.freeze:
        freeze(network, config.freeze)
