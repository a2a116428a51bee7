"""Products of linear layers in the precision of their operands; `rounded_products.py` has those in 8 or 4 bits.

Y = X W' contracts over the columns of X [tokens, in] and W [out, in]; the gradient of X, dY W, over those of dY
[tokens, out] and the rows of W; that of W, dY' X, over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Gradient, LateGradient, Parameter, ProductGradient
from megalite.parallel.stage_module import Inside
from megalite_kernels.grouped import grouped_product

ALONE = Group((0,), 0)


def as_matrix(tensor: Tensor) -> Tensor:
    """View [..., width] as [rows, width]."""
    return tensor.reshape(-1, tensor.shape[-1])


def saved_by(ctx: Any) -> tuple[Any, ...]:
    """Return what a forward has saved, without its graph, which gradients that are added later must not keep."""
    return tuple(None if saved is None else saved.detach() for saved in ctx.saved_tensors)


@dataclass(frozen=True)
class KeptInput:
    """The input of a product, as a backward has it: its values.

    Attributes:
        tensors: what to save for a backward, where `Products.restored` makes this again.
    """

    tensors: tuple[Any, ...]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the input as a matrix [rows, width]."""
        return as_matrix(self.tensors[0])

    def gather(self, group: Group) -> Callable[[], KeptInput]:
        """Begin to join the rows that ranks keep. The function that is returned waits for them."""
        pending = collectives.all_gather_async(self.tensors[0], group)
        return lambda: KeptInput((pending.wait(),))

    def weight_gradient(self, gradient: Tensor, bound: Tensor | None) -> Gradient:
        """Return the gradient of the weight: the product of that of the output [rows, out] and of this [rows, width].

        `bound`: see `Products.bound`.
        """
        return LateGradient(lambda: ProductGradient(gradient, self.values(gradient.dtype)))


class Products:
    """The three products of a linear layer, in the precision of their operands."""

    rounds = False
    """True if operands are rounded."""
    stores_activations = False
    """True if a backward computes activations again, of what `keep` keeps of their inputs."""

    @property
    def inside(self) -> Sequence[Inside]:
        """The collectives of forward with other ranks than the tensor-parallel ones."""
        return ()

    @property
    def inside_stored(self) -> Sequence[Inside]:
        """The collectives of `keep` in forward, and of `keep` again in backward."""
        return ()

    def take(self, weight: Parameter, matrices: int = 1) -> None:
        """Take a weight, so many matrices one below the other, of which nothing but these products reads values."""

    def forward(self, input: Tensor, weight: Parameter, gathered: Group) -> tuple[Tensor, KeptInput]:
        """Multiply [n, ..., in] of the ranks of `gathered`, joined along the first dimension, with [out, in].

        Returns:
            The product, and what backward needs of this rank's input.
        """
        return F.linear(collectives.all_gather(input, gathered), weight), KeptInput((input,))

    def keep(self, values: Tensor, *, again: bool = False) -> KeptInput:
        """Return what to keep of [..., width], of which the ranks that split the inputs have other columns.

        `again`: they are those that a backward has computed again, for the gradient of the weight.
        """
        return KeptInput((values,))

    def restored(self, tensors: tuple[Any, ...]) -> KeptInput:
        """Return what these products have kept, of its saved tensors."""
        return KeptInput(tensors)

    def bound(self, gradient: Tensor) -> Tensor | None:
        """Return the largest value of a gradient of which ranks have parts; None: it is not needed."""
        return None

    def input_gradient(self, gradient: Tensor, weight: Parameter, gathered: Group, bound: Tensor | None) -> Tensor:
        """Multiply [rows, out] of the ranks of `gathered`, joined, with [out, in]: [rows, in], a new tensor."""
        return collectives.all_gather(gradient, gathered) @ weight

    def of_groups(
        self, rows: Tensor, weight: Parameter, offsets: Sequence[int], ends: Tensor, *, backward: bool = False
    ) -> tuple[Tensor, KeptInput]:
        """Multiply each row with the matrix of its group, as `forward` does, or `input_gradient` in backward.

        Args:
            weight: a matrix [out, in] for each group, one below the other.
            offsets, ends: see `grouped_product`.

        Returns:
            See `forward`.
        """
        matrices = weight.detach().view(len(offsets) - 1, -1, weight.shape[-1])
        found = grouped_product(rows, matrices if backward else matrices.transpose(1, 2), offsets, ends)
        return found, KeptInput((rows,))


PLAIN = Products()
