"""The feed-forward layer, with its inner width split over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums
from megalite_kernels.activation import FUNCTIONS


class MLP(nn.Module):
    """Feed-forward layer: down(activation(up(x))), or down(activation(gate(x)) * up(x)) with gate and up fused."""

    def __init__(
        self, config: ModelConfig, context: ParallelContext, layer: int, name: str = "mlp", ffn_size: int | None = None
    ) -> None:
        """Build the layer, or the shared experts of a layer with another name and width."""
        super().__init__()
        name, hidden, ffn = f"layers.{layer}.{name}", config.hidden_size, ffn_size or config.ffn_size
        self.activation = FUNCTIONS[config.activation.name]
        draw = Normal(config.init_method_std)
        if config.activation.gated:
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
            [context.split(inner_bias, {dimension: "ffn"}, columns=0)] if config.add_bias_linear else [],
            adds_bias=False,
        )
        draw_down = Normal(config.output_init_std)
        down = LogicalTensor(f"{name}.down", (hidden, ffn), draw_down, True, "hidden ffn -> 1 hidden ffn")
        down_bias = LogicalTensor(f"{name}.down_bias", (hidden,), Constant(0.0), False)
        self.down = RowParallelLinear(
            context,
            "ffn",
            context.split(down, {1: "ffn"}),
            context.replicated(down_bias) if config.add_bias_linear else None,
        )

    @staticmethod
    def loss_terms(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
        """Declare the loss terms of this kind of layer: none."""
        return ()

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        """Apply the layer to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape.

        The result is independent for each token, so `context` is not used.
        """
        return self.down(self.activation(self.up(hidden), self.up.bias)), NO_SUMS
