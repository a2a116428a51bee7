"""Gated delta net (arXiv:2412.06464), with its heads split over the tensor-parallel ranks.

The state S of a head is a matrix [key width, value width]. Of each token, with keys and queries of length one:

    S <- exp(-exp(A_log) softplus(alpha + dt_bias)) S;    S <- S + k (sigmoid(beta) (v - S^T k))^T;    o = S^T q

q, k and v have passed a causal convolution by channel. Consecutive heads of values share a head of keys. The output is
normalized by head, multiplied with silu(z), and projected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.norm import RMSNorm
from megalite.model.recompute import Recompute
from megalite.model.recurrent import RecurrentCore, Run, of_length_one
from megalite.model.recurrent_weights import LogOfUniform, of_heads, of_parts, taps_of
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.sharding import Constant, Drawn, LogicalTensor, Normal


@dataclass(frozen=True)
class GatedDeltaSizes:
    """Sizes and options of a gated delta net.

    Attributes:
        key_heads: heads of queries and keys, each for equally many consecutive heads.
        heads: heads of values.
        key_width: channels of a head of queries and keys.
        value_width: channels of a head of values.
        epsilon: number added to the variance in the norm of the output.
        taps: tokens that the convolution sees.
        strength: factor of sigmoid(beta).
        chunk: tokens that are computed by matrix products.
    """

    hidden: int
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    std: float = 0.02
    output_std: float = 0.02
    epsilon: float = 1e-6
    taps: int = 4
    strength: float = 1.0
    chunk: int = 64


class GatedDelta(nn.Module):
    """Gated delta net. Input and output are [sequence (/ size under sequence parallelism), batch, hidden]."""

    def __init__(self, context: ParallelContext, name: str, sizes: GatedDeltaSizes, *, recompute: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        ranks = context.group("heads").size
        self.key_heads, self.heads = max(sizes.key_heads // ranks, 1), sizes.heads // ranks
        taps, draw, hidden, heads = sizes.taps, Normal(sizes.std), sizes.hidden, sizes.heads
        keys, values = (sizes.key_heads, sizes.key_width), (sizes.heads, sizes.value_width)

        def projection(part: str, shape: tuple[int, int]) -> LogicalTensor:
            matrix = "heads width hidden -> 1 (heads width) hidden"
            return LogicalTensor(f"{name}.{part}", (*shape, hidden), draw, True, matrix)

        def gate(part: str) -> LogicalTensor:
            return LogicalTensor(f"{name}.{part}", (heads, hidden), draw, True, "heads hidden -> 1 heads hidden")

        parts = [("value", values), ("query", keys), ("key", keys)]
        own = [projection("z", values), gate("beta"), gate("alpha"), projection(*parts[0])]
        weights = of_parts(context, own, [projection(*part) for part in parts[1:]])
        self.input = ColumnParallelLinear(context, "heads", weights)
        convolved = [
            LogicalTensor(f"{name}.conv_{part}", (*shape, taps), taps_of((*shape, taps), taps), True)
            for part, shape in parts
        ]
        places = of_parts(context, convolved[:1], convolved[1:])
        self.core = RecurrentCore(context, places, [], taps=taps, delta=True, chunk=sizes.chunk, recompute=recompute)

        def vector(part: str, initial: Drawn | Constant) -> nn.Parameter:
            return context.parameter(context.split(of_heads(f"{name}.{part}", heads, initial), {0: "heads"}, columns=0))

        self.dt_bias = vector("dt_bias", Constant(1.0))
        self.A_log = vector("A_log", Drawn(LogOfUniform((heads,), 1.0, 16.0)))
        # All heads share its weight, and a rank has some of them.
        self.norm = RMSNorm(context, f"{name}.norm", sizes.value_width, sizes.epsilon, of_part=True)
        matrix = "hidden heads width -> 1 hidden (heads width)"
        output = LogicalTensor(f"{name}.output", (hidden, *values), Normal(sizes.output_std), True, matrix)
        self.output = RowParallelLinear(context, "heads", context.split(output, {1: "heads"}, columns=2), None)

    @staticmethod
    def of(config: ModelConfig, context: ParallelContext, name: str, recompute: Recompute) -> GatedDelta:
        """Make the gated delta net of a network. `name`: the begin of the names of its tensors."""
        sizes = GatedDeltaSizes(
            hidden=config.hidden_size,
            key_heads=config.linear_num_key_heads,
            heads=config.linear_num_value_heads,
            key_width=config.linear_key_head_dim,
            value_width=config.linear_value_head_dim,
            std=config.init_method_std,
            output_std=config.output_init_std,
            epsilon=config.norm_epsilon if config.linear_norm_epsilon is None else config.linear_norm_epsilon,
            taps=config.linear_conv_kernel_dim,
            strength=2.0 if config.linear_allow_neg_eigval else 1.0,
            chunk=config.linear_chunk_size,
        )
        return GatedDelta(context, name, sizes, recompute=recompute.attention)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        sizes = self.sizes
        keys, values = self.key_heads * sizes.key_width, self.heads * sizes.value_width
        *others, mixed = self.input(hidden, context).split([values, self.heads, self.heads, values + 2 * keys], dim=-1)
        return self.output(self.core.run(self._mix, mixed, *others, context=context, owner=self), context)

    def _mix(self, mixed: Tensor, gate: Tensor, beta: Tensor, alpha: Tensor, run: Run) -> Tensor:
        """Return the input of the output layer from the parts of the projection."""
        sizes = self.sizes
        keys, values = self.key_heads * sizes.key_width, self.heads * sizes.value_width
        value, query, key = self.core.convolve(mixed, run).split([values, keys, keys], dim=-1)
        query, key = (each.unflatten(-1, (self.key_heads, sizes.key_width)) for each in (query, key))
        query, key = of_length_one(query, sizes.key_width**-0.5), of_length_one(key, 1.0)
        value = value.unflatten(-1, (self.heads, sizes.value_width))
        wide = self.dt_bias.dtype
        decay = -self.A_log.exp() * F.softplus(alpha.to(wide) + self.dt_bias)
        step = sizes.strength * torch.sigmoid(beta.to(wide))
        output = self.norm(self.core.recur(query, key, value, decay, step, run))
        gate = gate.unflatten(-1, (self.heads, sizes.value_width))
        gated = (output.to(wide) * F.silu(gate.to(wide))).to(output.dtype)
        return gated.flatten(-2)
