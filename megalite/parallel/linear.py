"""Linear layers split over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

A is the transposed weight, and rank i of p ranks has A_i:

    column-parallel:  Y = X [A_1, ..., A_p] = [X A_1, ..., X A_p]; backward sums the gradient of X over the ranks.
    row-parallel:     Y = [X_1, ..., X_p] [A_1; ...; A_p] = X_1 A_1 + ... + X_p A_p, summed over the ranks.

With sequence parallelism (arXiv:2205.05198), X of the column-parallel layer and Y of the row-parallel layer are split
along the sequence: the column-parallel layer all-gathers its input, and the row-parallel layer reduce-scatters its
output. The gathered input is not saved: backward gathers it again while it computes the input gradient, and reduces the
input gradient while it computes the weight gradient. Deferred weight gradients keep the split tensors and gather them
when they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.adapter import Adaptable, Places, Update
from megalite.parallel.context import Meaning, ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Gradient, LateGradient, Parameter, accumulate_grad, is_deferred
from megalite.parallel.products import ALONE, PLAIN, KeptInput, Products, as_matrix, saved_by
from megalite.parallel.sequence import Runs
from megalite.parallel.sharding import Sharding


def _restored(ctx: Any) -> tuple[KeptInput, Tensor | None]:
    """Return the input that a forward has kept, and with an update A x. What an update is of is frozen."""
    saved = saved_by(ctx)
    return (ctx.products.restored(saved), None) if ctx.update is None else (KeptInput(saved[:1]), saved[1])


def _gathered_gradient(input: Callable[[], KeptInput], gradient: Tensor, bound: Tensor | None) -> Gradient:
    return input().weight_gradient(gradient, bound)


class _ColumnParallel(torch.autograd.Function):
    """Product of input [sequence (/ size), batch, in] and weights [out_i, in]: [sequence, batch, sum of out_i].

    `use`: the number of this use of a tied weight, whose uses have separate sums of gradients. With an `update`, its A
    follows the weights, and B for each adapted weight follows A.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        group: Group,
        sequence_parallel: bool,
        use: int,
        products: Products,
        update: Update | None,
        *weights: Parameter,
    ) -> Tensor:
        """Multiply, and save what the products keep of the input as it is split; with an update, its values and A x.

        If the weights are frozen, and have no update, nothing reads the input again.
        """
        # Not by save_for_backward: under recomputation the saved tensor would not have the gradient buffer.
        ctx.group, ctx.sequence_parallel, ctx.use, ctx.update = group, sequence_parallel, use, update
        ctx.weights, ctx.b, ctx.products = weights, (), products
        keeps = update is not None or any(weight.requires_grad for weight in weights)
        if update is None and len(weights) == 1:
            output, kept = products.forward(input, weights[0], group if sequence_parallel else ALONE)
            ctx.save_for_backward(*(kept.tensors if keeps else ()))
            return output
        whole = collectives.all_gather(input, group) if sequence_parallel else input
        if update is not None:
            ctx.weights, ctx.b = weights[: -update.weights], weights[-update.weights :]
        multiplied = ctx.weights if update is None else ctx.weights[:-1]
        ctx.products = products if multiplied else PLAIN
        if len(multiplied) == 1:
            output, _ = products.forward(whole, multiplied[0], ALONE)
        else:
            width = sum(map(len, multiplied)) if update is None else update.width
            output = (whole.new_empty if multiplied else whole.new_zeros)(*whole.shape[:-1], width)
            for weight, part in zip(multiplied, _split_outputs(as_matrix(output), multiplied), strict=True):
                torch.mm(as_matrix(whole), weight.t(), out=part)
        inner = [] if update is None else [torch.mm(as_matrix(whole), ctx.weights[-1].t())]
        if update is not None:
            update.add(as_matrix(output), inner[0], ctx.b)
        ctx.save_for_backward(*((input,) if keeps else ()), *inner)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the weights, whose products run beside the messages."""
        weights, b, update, products = ctx.weights, ctx.b, ctx.update, ctx.products
        group: Group = ctx.group
        kept, inner = _restored(ctx)
        later = ctx.sequence_parallel and any(map(is_deferred, weights))
        gather_now = ctx.sequence_parallel and not later and any(weight.requires_grad for weight in weights)
        gradient = as_matrix(gradients[0])
        bound = products.bound(gradient)
        gathering = kept.gather(group) if gather_now else None
        if update is None:
            parts = _split_outputs(gradient, weights)
        else:
            parts = (*_split_outputs(gradient, weights[:-1]), update.of_inner(gradient, weights[-1], b))
        input_gradient = reduction = None
        if ctx.needs_input_grad[0]:  # not if all before is frozen
            input_gradient = products.input_gradient(parts[0], weights[0], ALONE, bound)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                input_gradient.addmm_(part, weight)
        kept = kept if gathering is None else gathering()
        if input_gradient is not None:
            input_gradient = input_gradient.view(*gradients[0].shape[:-1], -1)
            if ctx.sequence_parallel:
                reduction = collectives.reduce_scatter_async(input_gradient, group)
            else:
                reduction = collectives.all_reduce_async_(input_gradient, group)
        found: list[Gradient]
        if later:
            whole = functools.cache(lambda: kept.gather(group)())  # once for all of them
            found = [LateGradient(functools.partial(_gathered_gradient, whole, part, bound)) for part in parts]
        else:
            found = [kept.weight_gradient(part, bound) for part in parts]
        found += [update.of_b(gradient, inner, number) for number in range(len(b))]
        weight_gradients = [
            accumulate_grad(weight, each, ctx.use) for weight, each in zip((*weights, *b), found, strict=True)
        ]
        return None if reduction is None else reduction.wait(), *[None] * 5, *weight_gradients


class _RowParallel(torch.autograd.Function):
    """Product of input [sequence, batch, in / size] and weight [out, in / size]: [sequence (/ size), batch, out].

    With an `activation`, the product is of what this returns of the input, of which backward computes it again. With an
    `update`, its A and B follow the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        group: Group,
        sequence_parallel: bool,
        unread: bool,
        activation: Callable[[Tensor], Tensor] | None,
        products: Products,
        update: Update | None,
        *weights: Parameter,
    ) -> Tensor:
        """Multiply, add the update, and sum over the ranks."""
        ctx.weights, ctx.group, ctx.sequence_parallel, ctx.update = weights, group, sequence_parallel, update
        width = len(weights[0]) if update is None else update.width
        multiplied = weights if update is None else weights[:-2]
        ctx.products = products if multiplied else PLAIN
        ctx.activation, ctx.dtype, ctx.shape = activation, input.dtype, input.shape
        inner = [] if update is None else [torch.mm(as_matrix(input), weights[-2].t())]
        kept: KeptInput | None = None
        if activation is not None:
            kept = products.keep(input)
        elif update is not None:
            kept = KeptInput((input,))
        elif not weights[0].requires_grad:
            kept = KeptInput(())
        if unread:
            ctx.save_for_backward(*(kept or products.keep(input)).tensors, *inner)
            if update is not None:
                inner[0].mul_(update.scale)
            sequence = len(input) // group.size if sequence_parallel else len(input)
            return input.new_zeros(sequence, *input.shape[1:-1], width)
        if activation is not None:
            input = activation(input)
        # A new tensor: it can be changed and reduced in place.
        if multiplied:
            term, of_product = products.forward(input, multiplied[0], ALONE)
        else:
            term, of_product = input.new_zeros(*input.shape[:-1], width), KeptInput((input,))
        ctx.save_for_backward(*(kept or of_product).tensors, *inner)
        if update is not None:
            update.add(as_matrix(term), inner[0], weights[-1:])
        return collectives.reduce_scatter(term, group) if sequence_parallel else collectives.all_reduce_(term, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the weights."""
        weights, update, products = ctx.weights, ctx.update, ctx.products
        kept, inner = _restored(ctx)
        gradient, gathered_by, bound = gradients[0], ALONE, products.bound(gradients[0])
        reads_values = update is not None or (weights[0].requires_grad and not is_deferred(weights[0]))
        if ctx.sequence_parallel and products.rounds and not reads_values:
            gathered_by = ctx.group  # codes
        elif ctx.sequence_parallel:
            gradient = collectives.all_gather(gradient, ctx.group)
        gradient_matrix = as_matrix(gradient)
        parts = [gradient_matrix]
        if update is not None:
            parts = [*parts[: len(weights) - 2], update.of_inner(gradient_matrix, weights[-2], weights[-1:])]
        # First: accumulating the last gradient may free the weights.
        input_gradient = products.input_gradient(parts[0], weights[0], gathered_by, bound)
        for part, weight in zip(parts[1:], weights[1:], strict=False):
            input_gradient.addmm_(part, weight)
        if ctx.activation is not None:
            input = kept.values(ctx.dtype)
            with torch.enable_grad():
                activated = ctx.activation(input.requires_grad_())
            (input_gradient,) = torch.autograd.grad(activated, input, input_gradient)
            kept = products.keep(activated.detach(), again=True)
        found: list[Gradient]
        if update is not None:
            found = [*(kept.weight_gradient(part, bound) for part in parts), update.of_b(gradient_matrix, inner, 0)]
        elif ctx.sequence_parallel and is_deferred(weights[0]):
            split, over = gradients[0], ctx.group
            found = [LateGradient(lambda: kept.weight_gradient(as_matrix(collectives.all_gather(split, over)), bound))]
        else:
            found = [kept.weight_gradient(gradient_matrix, bound)]
        weight_gradients = [accumulate_grad(weight, each) for weight, each in zip(weights, found, strict=True)]
        return input_gradient.view(ctx.shape), *[None] * 6, *weight_gradients


def product(input: Tensor, weight: Tensor) -> Tensor:
    """Return the product of [..., in] and a weight [out, in], without communication.

    The gradient of the weight goes to its buffer, or later if it is deferred, as those of the layers here.
    """
    return updated_product(input, None, weight)


def updated_product(input: Tensor, update: Update | None, *weights: Tensor, products: Products = PLAIN) -> Tensor:
    """Return the sum of `product` and an update. `weights`: the weights, A of the update, and its B."""
    output: Tensor = _ColumnParallel.apply(input, ALONE, False, 0, products, update, *weights)
    return output


class _SharedByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return collectives.all_gather(input, group) if sequence_parallel else input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        if ctx.sequence_parallel:
            return collectives.reduce_scatter(gradient, ctx.group), None, None
        return collectives.all_reduce_async_(gradient.clone(), ctx.group).wait(), None, None


def shared_by_heads(input: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
    """Return [sequence, batch, width] for the heads of each rank, from [sequence (/ size), batch, width].

    Its gradient is the sum of those of all ranks' heads.
    """
    if group.size == 1:
        return input
    output: Tensor = _SharedByHeads.apply(input, group, sequence_parallel)
    return output


def gathered(input: Tensor, group: Group) -> Tensor:
    """Return [size * sequence, batch, width] of all ranks from [sequence, batch, width] of each.

    Its gradient is the sum of those of all ranks, cut likewise.
    """
    return shared_by_heads(input, group, sequence_parallel=True)


def _split_outputs(matrix: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return matrix.split([weight.shape[0] for weight in weights], dim=-1) if weights else ()


class ColumnParallelLinear(Adaptable):
    """A linear layer whose outputs are split over ranks; the input is replicated, or split along the sequence.

    Several weights (queries, and keys and values that ranks share) are applied to the same input, which is gathered
    once; their outputs are concatenated along the last dimension.
    """

    def __init__(
        self,
        context: ParallelContext,
        outputs: Meaning,
        weights: Sequence[Sharding | Parameter],
        biases: Sequence[Sharding] = (),
        *,
        use: int = 0,
        adds_bias: bool = True,
    ) -> None:
        """Make the layer.

        Args:
            outputs: the meaning of the output dimension, which is split.
            weights: the placement of each weight; or, for a weight tied to another layer's, that `Parameter`.
            use: the number of this use, if the weight is tied.
            adds_bias: False if the next operation adds `bias` instead of this layer.
        """
        super().__init__()
        self.weights = nn.ParameterList(
            [weight if isinstance(weight, Parameter) else context.parameter(weight) for weight in weights]
        )
        self.biases = nn.ParameterList(map(context.parameter, biases))
        self.group, self.use, self.adds_bias = context.group(outputs), use, adds_bias
        self.sequence_parallel = context.sequence_parallel
        self.products = context.products(rows=self.group)
        if self.products.rounds and len(self.weights) > 1:
            raise ValueError("ranks that share a weight would round parts of its output's gradient")
        self.products.take(self.weights[0])
        self.inside = self.products.inside

    @property
    def bias(self) -> Tensor | None:
        """The biases concatenated, [out / size]."""
        if len(self.biases) < 2:
            return self.biases[0] if self.biases else None
        return torch.cat(list(self.biases))

    def forward(self, input: Tensor, places: Places | None = None, *, frozen: bool = False) -> Tensor:
        """Map [sequence (/ size under sequence parallelism), batch, in] to [sequence, batch, out / size].

        Args:
            places: of the tokens, for the dropout of adapters.
            frozen: the weights get no gradient.
        """
        weights = [weight.frozen_alias() for weight in self.weights] if frozen else list(self.weights)
        output = self.adapted(self._product, input, weights, places)
        bias = self.bias if self.adds_bias else None
        return output if bias is None else output + bias

    def _product(self, input: Tensor, update: Update | None, *weights: Parameter) -> Tensor:
        found: Tensor = _ColumnParallel.apply(
            input, self.group, self.sequence_parallel, self.use, self.products, update, *weights
        )
        return found

    def weights_to_adapt(self) -> list[Parameter]:
        return list(self.weights)

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        return self.group, None


class ReplicatedLinear(Adaptable):
    """A linear layer that every rank has whole and applies to its own tokens."""

    def __init__(self, context: ParallelContext, weight: Sharding, bias: Sharding | None) -> None:
        super().__init__()
        self.weight = context.parameter(weight)
        self.bias = context.parameter(bias) if bias is not None else None
        self.products = context.products()
        self.products.take(self.weight)
        self.inside = self.products.inside

    def forward(self, input: Tensor, places: Places | None = None) -> Tensor:
        """Map [sequence (/ size under sequence parallelism), batch, in] to the same with out.

        `places`: see `ColumnParallelLinear`.
        """
        product = functools.partial(updated_product, products=self.products)
        output = self.adapted(product, input, [self.weight], places)
        return output if self.bias is None else output + self.bias

    def weights_to_adapt(self) -> list[Parameter]:
        return [self.weight]

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        return None, None


class RowParallelLinear(Adaptable):
    """A linear layer whose inputs are split over ranks. Partial outputs are summed, then the bias is added once.

    `inputs`: the meaning of the input dimension, which is split.
    """

    def __init__(self, context: ParallelContext, inputs: Meaning, weight: Sharding, bias: Sharding | None) -> None:
        super().__init__()
        self.weight = context.parameter(weight)
        self.bias = context.parameter(bias) if bias is not None else None
        self.group, self.sequence_parallel = context.group(inputs), context.sequence_parallel
        self.products = context.products(columns=self.group)
        self.products.take(self.weight)
        self.inside = self.products.inside

    def forward(
        self,
        input: Tensor,
        places: Places | None = None,
        *,
        unread: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Map [sequence, batch, in / size] to [sequence (/ size under sequence parallelism), batch, out].

        Args:
            places: see `ColumnParallelLinear`.
            unread: only backward is asked for. The output is then not computed, and has zeros in place of the product,
                but with DoRA, whose magnitudes have gradients of the product.
            activation: map the input by it first, and again in backward, of what the products keep of it. Without
                adapters.
        """
        unread = unread and (self.update is None or not self.magnitudes)
        if activation is not None and not torch.is_grad_enabled():
            input, activation = activation(input), None  # nothing is kept of what it is of

        def product(input: Tensor, update: Update | None, *weights: Parameter) -> Tensor:
            found: Tensor = _RowParallel.apply(
                input, self.group, self.sequence_parallel, unread, activation, self.products, update, *weights
            )
            return found

        output = self.adapted(product, input, [self.weight], places)
        return output if self.bias is None else output + self.bias

    def weights_to_adapt(self) -> list[Parameter]:
        return [self.weight]

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        return None, self.group

    @property
    def splits_output(self) -> bool:  # type: ignore[override]
        return self.sequence_parallel

    def rows_of_input(self, places: Places) -> Runs:
        return places.layout.part(0, 1)
