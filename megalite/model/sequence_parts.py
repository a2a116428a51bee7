"""Dense feed-forward layer that runs on parts of the sequence, one after another, and keeps only its input.

The wide tensors between its products, [sequence, batch, ffn], then have memory for one part at a time: in forward, and
in backward, which runs the forward of a part again just before the backward of this part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.batch import LayerContext
from megalite.model.mlp import MLP
from megalite.parallel.parameter import DenseGradient, Parameter, accumulate_grad
from megalite.parallel.randomness import Site, dropout
from megalite.parallel.sequence import between
from megalite.parallel.sharding import Use


class FeedForwardInParts:
    """Norm, feed-forward layer, norm of its output and dropout of a block, on parts of the tokens.

    Each parameter has a gradient of each part, which are added in the order of the tokens.
    """

    def __init__(
        self, norm: nn.Module | None, mlp: MLP, output_norm: nn.Module | None, site: Site, *, parts: int
    ) -> None:
        """Take the modules of a block. Their parameters expect the gradients of so many parts.

        Args:
            norm: norm of the input; None for none.
            output_norm: norm of the output; None for none.
            site: place of the dropout.
            parts: number of parts, at most the number of tokens that a rank trains on.
        """
        self.norm, self.mlp, self.output_norm, self.site, self.parts = norm, mlp, output_norm, site, parts
        self.transform = self._transform
        """Function of a part that `compile_layers` compiles."""
        for parameter in self._parameters():
            parameter.sharding = replace(parameter.sharding, uses=(Use(times=parts),))

    def __call__(self, hidden: Tensor, context: LayerContext, probability: float) -> Tensor:
        """Map [sequence (/ size under sequence parallelism), batch, hidden] to the branch, of the same shape.

        `probability`: that of the dropout.
        """
        tokens = _split(len(hidden), min(self.parts, len(hidden)))

        def run(part: Tensor, place: range) -> Tensor:
            rows = between(context.rows, place.start, place.stop)
            return dropout(self.transform(part, context), probability, context.key, self.site, rows)

        output: Tensor = _InParts.apply(hidden, run, tokens, *self._parameters())
        return output

    def _parameters(self) -> list[Parameter]:
        modules = [module for module in (self.norm, self.mlp, self.output_norm) if module is not None]
        return [each for module in modules for each in module.parameters() if isinstance(each, Parameter)]

    def _transform(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Return the branch of a part before dropout.

        Where gradients are recorded, for backward, nothing but a norm of the output reads the values of the product.
        """
        unread = torch.is_grad_enabled() and self.output_norm is None
        input = hidden if self.norm is None else self.norm(hidden)
        output, _ = self.mlp(input, context, unread=unread)
        return output if self.output_norm is None else self.output_norm(output)


class _InParts(torch.autograd.Function):
    """Runs a function on each part of [tokens, batch, hidden], and again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        run: Callable[[Tensor, range], Tensor],
        parts: Sequence[range],
        *parameters: Parameter,
    ) -> Tensor:
        """Run the function on each part, and save the input alone."""
        # Not by save_for_backward: under recomputation the saved tensors would not have the gradient buffers.
        ctx.run, ctx.parts, ctx.parameters = run, parts, parameters
        ctx.save_for_backward(input)
        output = torch.empty_like(input)
        for tokens in parts:
            place = slice(tokens.start, tokens.stop)
            output[place] = run(input[place], tokens)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, and of parameters without a buffer."""
        input = ctx.saved_tensors[0].detach()
        trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        input_gradient = torch.empty_like(input)
        sums: dict[int, Tensor] = {}
        for tokens in ctx.parts:
            place = slice(tokens.start, tokens.stop)
            run = partial(ctx.run, place=tokens)
            input_gradient[place], *found = _gradients(run, input[place], trained, gradients[0][place])
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:  # None: the product has accumulated it
                    plain = accumulate_grad(parameter, DenseGradient(gradient))
                    if plain is not None:
                        sums[id(parameter)] = sums[id(parameter)] + plain if id(parameter) in sums else plain
        return input_gradient, None, None, *(sums.get(id(parameter)) for parameter in ctx.parameters)


def _gradients(
    run: Callable[[Tensor], Tensor], input: Tensor, parameters: Sequence[Parameter], gradient: Tensor
) -> Sequence[Tensor]:
    """Return the gradients of a part's input and of the parameters."""
    own = input.requires_grad_()
    with torch.enable_grad():
        output = run(own)
    return torch.autograd.grad(output, [own, *parameters], gradient, allow_unused=True)


def _split(tokens: int, parts: int) -> list[range]:
    """Divide tokens into parts of equal size; without a whole division, the first parts have one more."""
    size, longer = divmod(tokens, parts)
    ends = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]
