"""The feed-forward layer, with its inner width split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.config.activations import Activation
from megalite.model.batch import LayerContext
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import NO_SUMS, TermSums
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import activation


@dataclass(frozen=True)
class FeedForwardSizes:
    """Sizes and options of a feed-forward layer, or of each expert.

    Attributes:
        ffn: inner width; with a gate, that of each half.
        std: standard deviation of the initial weights.
        output_std: the same of the last matrix.
        offset: see `megalite_kernels.activation.activation`.
        limit: the same.
    """

    hidden: int
    ffn: int
    activation: Activation
    std: float
    output_std: float
    bias: bool
    offset: float = 0.0
    limit: float | None = None

    @property
    def function(self) -> Callable[..., Tensor]:
        """The activation, of the inner states and a bias."""
        return activation(self.activation.name, offset=self.offset, limit=self.limit)


class MLP(nn.Module):
    """Feed-forward layer: down(activation(up(x))), or down(activation(gate(x)) * up(x)) with gate and up fused."""

    def __init__(self, context: ParallelContext, name: str, sizes: FeedForwardSizes) -> None:
        super().__init__()
        hidden, ffn, draw = sizes.hidden, sizes.ffn, Normal(sizes.std)
        self.activation = sizes.function
        if sizes.activation.gated:
            inner = LogicalTensor(f"{name}.gate_up", (2, ffn, hidden), draw, True, "two ffn hidden -> two ffn hidden")
            inner_bias = LogicalTensor(f"{name}.gate_up_bias", (2, ffn), Constant(0.0), False)
        else:
            inner = LogicalTensor(f"{name}.up", (ffn, hidden), draw, True, "ffn hidden -> 1 ffn hidden")
            inner_bias = LogicalTensor(f"{name}.up_bias", (ffn,), Constant(0.0), False)
        dimension = len(inner.shape) - 2
        self.up = ColumnParallelLinear(
            context,
            "ffn",
            [context.split(inner, {dimension: "ffn"})],
            [context.split(inner_bias, {dimension: "ffn"}, columns=0)] if sizes.bias else [],
            adds_bias=False,
        )
        draw_down = Normal(sizes.output_std)
        down = LogicalTensor(f"{name}.down", (hidden, ffn), draw_down, True, "hidden ffn -> 1 hidden ffn")
        down_bias = LogicalTensor(f"{name}.down_bias", (hidden,), Constant(0.0), False)
        self.down = RowParallelLinear(
            context,
            "ffn",
            context.split(down, {1: "ffn"}),
            context.replicated(down_bias) if sizes.bias else None,
        )

    @property
    def stores_activation(self) -> bool:
        """True if codes of the activation's input are kept, of which backward computes it again."""
        return self.down.products.stores_activations and self.down.update is None

    @property
    def inside(self) -> Sequence[Inside]:
        """The collectives of forward that are not those of its linear layers."""
        return self.down.products.inside_stored if self.stores_activation else ()

    def forward(self, hidden: Tensor, context: LayerContext, *, unread: bool = False) -> tuple[Tensor, TermSums]:
        """Apply the layer to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape.

        `unread`: see `RowParallelLinear.forward`.
        """
        inner, bias = self.up(hidden, context), self.up.bias
        if self.stores_activation:
            inner = inner if bias is None else inner + bias
            return self.down(inner, context, unread=unread, activation=self.activation), NO_SUMS
        inner = self.activation(inner, bias)
        return self.down(inner, context, unread=unread), NO_SUMS
