"""Kimi delta attention (arXiv:2510.26692), with its heads split over the tensor-parallel ranks.

The state S of a head is a matrix [width, width]. Of each token, with keys and queries of length one:

    S <- Diag(e^g) S;    S <- S + k (sigmoid(beta) (v - S^T k))^T;    o = S^T q

Each key channel has a decay of its own: g = -exp(A_log) softplus(f + dt_bias), or with a lower bound, bound *
sigmoid(exp(A_log) (f + dt_bias)). q, k and v have passed a causal convolution by channel. The output is normalized by
head, multiplied with the sigmoid of a gate, and projected. f and the gate are each made of the input by two matrices,
with one head's width between them; every rank has the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.norm import RMSNorm
from megalite.model.recompute import Recompute
from megalite.model.recurrent import RecurrentCore, Run, of_length_one
from megalite.model.recurrent_weights import LogOfUniform, StepBias, by_heads, of_heads, taps_of
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.placement import stacked
from megalite.parallel.sharding import Constant, Drawn, LogicalTensor, Normal


@dataclass(frozen=True)
class KimiDeltaSizes:
    """Sizes and options of Kimi delta attention.

    Attributes:
        width: channels of a head of queries, keys and values.
        epsilon: number added to the variance in the norm of the output.
        taps: tokens that the convolution sees.
        bound: least logarithm of a decay; None for none.
        chunk: tokens that are computed by matrix products, a power of two.
    """

    hidden: int
    heads: int
    width: int
    std: float = 0.02
    output_std: float = 0.02
    epsilon: float = 1e-5
    taps: int = 4
    bound: float | None = None
    chunk: int = 64


class KimiDelta(nn.Module):
    """Kimi delta attention. Input and output are [sequence (/ size under sequence parallelism), batch, hidden]."""

    def __init__(self, context: ParallelContext, name: str, sizes: KimiDeltaSizes, *, recompute: bool = False) -> None:
        super().__init__()
        self.sizes, self.heads = sizes, sizes.heads // context.group("heads").size
        heads, width, taps, draw = sizes.heads, sizes.width, sizes.taps, Normal(sizes.std)

        def projection(part: str, input: int) -> LogicalTensor:
            matrix = "heads width input -> 1 (heads width) input"
            return LogicalTensor(f"{name}.{part}", (heads, width, input), draw, True, matrix)

        parts = ("query", "key", "value")
        step = LogicalTensor(f"{name}.beta", (heads, sizes.hidden), draw, True, "heads hidden -> 1 heads hidden")
        projections = [*(projection(part, sizes.hidden) for part in parts), step]
        self.input = ColumnParallelLinear(context, "heads", [by_heads(context, projections)])
        first = [
            LogicalTensor(f"{name}.{part}_a", (width, sizes.hidden), draw, True, "width hidden -> 1 width hidden")
            for part in ("decay", "gate")
        ]
        self.first = context.parameter(stacked([context.replicated(tensor) for tensor in first]))
        plain = replace(context, rounding=None)  # narrow, and decays multiply over all tokens
        self.decay, self.gate = (
            ColumnParallelLinear(plain, "heads", [by_heads(context, [projection(f"{part}_b", width)])])
            for part in ("decay", "gate")
        )
        shape = (heads, width, taps)
        convolved = [LogicalTensor(f"{name}.conv_{part}", shape, taps_of(shape, taps), True) for part in parts]
        places = by_heads(context, convolved)
        self.core = RecurrentCore(context, [places], [], taps=taps, delta=True, chunk=sizes.chunk, recompute=recompute)

        def vector(tensor: LogicalTensor) -> nn.Parameter:
            return context.parameter(context.split(tensor, {0: "heads"}, columns=0))

        biases = Drawn(StepBias((heads, width), 1e-3, 1e-1))
        self.dt_bias = vector(LogicalTensor(f"{name}.dt_bias", (heads, width), biases, weight_decay=False, fp32=True))
        rates = Drawn(LogOfUniform((heads,), 1.0, 16.0)) if sizes.bound is None else Constant(0.0)
        self.A_log = vector(of_heads(f"{name}.A_log", heads, rates))
        # All heads share its weight, and a rank has some of them.
        self.norm = RMSNorm(context, f"{name}.norm", width, sizes.epsilon, of_part=True)
        matrix = "hidden heads width -> 1 hidden (heads width)"
        output = LogicalTensor(f"{name}.output", (sizes.hidden, heads, width), Normal(sizes.output_std), True, matrix)
        self.output = RowParallelLinear(context, "heads", context.split(output, {1: "heads"}, columns=2), None)

    @staticmethod
    def of(config: ModelConfig, context: ParallelContext, name: str, recompute: Recompute) -> KimiDelta:
        """Make the Kimi delta attention of a network. `name`: the begin of the names of its tensors."""
        sizes = KimiDeltaSizes(
            hidden=config.hidden_size,
            heads=config.kda_num_heads,
            width=config.kda_head_dim,
            std=config.init_method_std,
            output_std=config.output_init_std,
            epsilon=config.norm_epsilon,
            taps=config.kda_conv_kernel_dim,
            bound=config.kda_lower_bound,
            chunk=config.kda_chunk_size,
        )
        return KimiDelta(context, name, sizes, recompute=recompute.attention)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        mixed, beta = self.input(hidden, context).split([3 * self.heads * self.sizes.width, self.heads], dim=-1)
        of_decay, of_gate = F.linear(hidden, self.first).split(self.sizes.width, dim=-1)
        others = beta, self.decay(of_decay, context), self.gate(of_gate, context)
        return self.output(self.core.run(self._mix, mixed, *others, context=context, owner=self), context)

    def _mix(self, mixed: Tensor, beta: Tensor, decay: Tensor, gate: Tensor, run: Run) -> Tensor:
        """Return the input of the output layer from the parts of the projections."""
        width, wide, heads = self.sizes.width, self.dt_bias.dtype, (self.heads, self.sizes.width)
        query, key, value = (each.unflatten(-1, heads) for each in self.core.convolve(mixed, run).chunk(3, dim=-1))
        query, key = of_length_one(query, width**-0.5), of_length_one(key, 1.0)
        decay = self._decay((decay.to(wide) + self.dt_bias).unflatten(-1, heads))
        output = self.norm(self.core.recur(query, key, value, decay, beta.to(wide).sigmoid(), run))
        gated = output.to(wide) * gate.unflatten(-1, heads).to(wide).sigmoid()
        return gated.to(output.dtype).flatten(-2)

    def _decay(self, raw: Tensor) -> Tensor:
        """Return the logarithm of the decay, [tokens, batch, heads, width]."""
        rate = self.A_log.exp().unsqueeze(-1)
        if self.sizes.bound is None:
            return -rate * F.softplus(raw)
        return self.sizes.bound * torch.sigmoid(rate * raw)
