"""Layer of a short convolution (LFM2, arXiv:2511.23404), with its channels split over the tensor-parallel ranks.

With projections B, C and x of the input, y = C * conv(B * x), element by element, is projected to the output. The
convolution is causal and by channel, and sees no token of an earlier document.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.recompute import Recompute
from megalite.model.recurrent import Convolution
from megalite.model.recurrent_weights import by_heads, taps_of
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.sharding import Constant, LogicalTensor, Normal


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes and options of a short convolution.

    Attributes:
        taps: tokens that it sees.
        bias: biases in the projections and in the convolution.
    """

    hidden: int
    std: float = 0.02
    output_std: float = 0.02
    taps: int = 3
    bias: bool = False


class ShortConvolution(nn.Module):
    """Short convolution. Input and output are [sequence (/ size under sequence parallelism), batch, hidden].

    As to ranks, each channel is a head of width 1.
    """

    def __init__(self, context: ParallelContext, name: str, sizes: ConvolutionSizes) -> None:
        super().__init__()
        hidden, taps, parts = sizes.hidden, sizes.taps, ("B", "C", "x")
        matrix = "channels hidden -> 1 channels hidden"
        projections = [
            LogicalTensor(f"{name}.{part}", (hidden, hidden), Normal(sizes.std), True, matrix) for part in parts
        ]

        def bias(part: str) -> LogicalTensor:
            return LogicalTensor(f"{name}.{part}_bias", (hidden,), Constant(0.0), weight_decay=False)

        input_biases = [by_heads(context, [bias(part) for part in parts], columns=0)] if sizes.bias else []
        self.input = ColumnParallelLinear(context, "heads", [by_heads(context, projections)], input_biases)
        weight = LogicalTensor(f"{name}.conv", (hidden, taps), taps_of((hidden, taps), taps), True)
        biases = [LogicalTensor(f"{name}.conv_bias", (hidden,), taps_of((hidden,), taps), False)]
        self.core = Convolution(
            context,
            [by_heads(context, [weight])],
            [by_heads(context, biases, columns=0)] if sizes.bias else [],
            taps=taps,
            silu=False,
        )
        output = LogicalTensor(
            f"{name}.output", (hidden, hidden), Normal(sizes.output_std), True, "hidden channels -> 1 hidden channels"
        )
        self.output = RowParallelLinear(
            context,
            "heads",
            context.split(output, {1: "heads"}),
            context.replicated(bias("output")) if sizes.bias else None,
        )

    @staticmethod
    def of(config: ModelConfig, context: ParallelContext, name: str, recompute: Recompute) -> ShortConvolution:
        """Make the short convolution of a network. `name`: the begin of the names of its tensors."""
        sizes = ConvolutionSizes(
            hidden=config.hidden_size,
            std=config.init_method_std,
            output_std=config.output_init_std,
            taps=config.short_conv_kernel_dim,
            bias=config.short_conv_bias,
        )
        return ShortConvolution(context, name, sizes)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        entering, leaving, x = self.input(hidden, context).chunk(3, dim=-1)
        product = entering * x
        return self.output(leaving * self.core.convolve(product, self.core.begin(product, context, self)), context)
