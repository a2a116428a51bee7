"""Mamba-2 (arXiv:2405.21060), with its heads and their groups split over the tensor-parallel ranks.

The state S of a head is a matrix [state, head_dim]. With dt = softplus(raw dt + dt_bias) of each token:

    S <- exp(-exp(A_log) dt) S + B (x dt)^T;    y = S^T C + D x

x, B and C have passed a causal convolution by channel. Heads of a group are consecutive, and share B and C. The output
y * silu(z) is normalized over the channels of each group, and projected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.recompute import Recompute
from megalite.model.recurrent import RecurrentCore, Run
from megalite.model.recurrent_weights import (
    LogOfUniform,
    StepBias,
    SumOverSharers,
    of_heads,
    of_parts,
    sharers,
    taps_of,
)
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.sharding import Constant, Drawn, LogicalTensor, Normal
from megalite_kernels.norm import norm

NORM_EPSILON = 1e-5
"""Epsilon of the norm of the output, whatever the other norms have."""


@dataclass(frozen=True)
class MambaSizes:
    """Sizes and options of a Mamba-2 layer.

    Attributes:
        width: channels of a head.
        state: width of the state of each channel.
        taps: tokens that the convolution sees.
        limits: least and largest step (dt); None for no largest one.
        chunk: tokens that are computed by matrix products.
    """

    hidden: int
    heads: int
    groups: int
    width: int
    state: int
    std: float = 0.02
    output_std: float = 0.02
    taps: int = 4
    limits: tuple[float, float | None] = (0.0, None)
    chunk: int = 128


class Mamba(nn.Module):
    """Mamba-2 layer. Input and output are [sequence (/ size under sequence parallelism), batch, hidden]."""

    def __init__(self, context: ParallelContext, name: str, sizes: MambaSizes, *, recompute: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        heads, groups, width, state, hidden = sizes.heads, sizes.groups, sizes.width, sizes.state, sizes.hidden
        self.over, self.sharers = context.group("heads"), sharers(context, groups)
        ranks = self.over.size
        self.heads, self.groups = heads // ranks, max(groups // ranks, 1)

        def projection(part: str, count: int, each: int) -> LogicalTensor:
            matrix = "count each hidden -> 1 (count each) hidden"
            return LogicalTensor(f"{name}.{part}", (count, each, hidden), Normal(sizes.std), True, matrix)

        step = LogicalTensor(f"{name}.dt", (heads, hidden), Normal(sizes.std), True, "heads hidden -> 1 heads hidden")
        parts = [("x", heads, width), ("B", groups, state), ("C", groups, state)]
        own = [projection("z", heads, width), step, projection(*parts[0])]
        weights = of_parts(context, own, [projection(*part) for part in parts[1:]])
        self.input = ColumnParallelLinear(context, "heads", weights)
        taps = sizes.taps
        convolved = [
            LogicalTensor(f"{name}.conv_{part}", (count, each, taps), taps_of((count, each, taps), taps), True)
            for part, count, each in parts
        ]
        biases = [
            LogicalTensor(f"{name}.conv_{part}_bias", (count, each), taps_of((count, each), taps), False)
            for part, count, each in parts
        ]
        self.core = RecurrentCore(
            context,
            of_parts(context, convolved[:1], convolved[1:]),
            of_parts(context, biases[:1], biases[1:], columns=0),
            taps=taps,
            delta=False,
            chunk=sizes.chunk,
            recompute=recompute,
        )

        def vector(part: str, initial: Drawn | Constant) -> nn.Parameter:
            return context.parameter(context.split(of_heads(f"{name}.{part}", heads, initial), {0: "heads"}, columns=0))

        self.dt_bias = vector("dt_bias", Drawn(StepBias((heads,), 1e-3, 1e-1)))
        self.A_log = vector("A_log", Drawn(LogOfUniform((heads,), 1.0, 16.0)))
        self.D = vector("D", Constant(1.0))
        weight = LogicalTensor(f"{name}.norm.weight", (heads, width), Constant(1.0), weight_decay=False)
        self.norm_weight = context.parameter(context.split(weight, {0: "heads"}, columns=0))
        matrix = "hidden heads width -> 1 hidden (heads width)"
        output = LogicalTensor(f"{name}.output", (hidden, heads, width), Normal(sizes.output_std), True, matrix)
        self.output = RowParallelLinear(context, "heads", context.split(output, {1: "heads"}, columns=2), None)

    @staticmethod
    def of(config: ModelConfig, context: ParallelContext, name: str, recompute: Recompute) -> Mamba:
        """Make the Mamba-2 layer of a network. `name`: the begin of the names of its tensors."""
        sizes = MambaSizes(
            hidden=config.hidden_size,
            heads=config.mamba_heads,
            groups=config.mamba_num_groups,
            width=config.mamba_head_dim,
            state=config.mamba_state_dim,
            std=config.init_method_std,
            output_std=config.output_init_std,
            taps=config.mamba_conv_kernel_dim,
            limits=(config.mamba_dt_min, config.mamba_dt_max),
            chunk=config.mamba_chunk_size,
        )
        return Mamba(context, name, sizes, recompute=recompute.attention)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        sizes = self.sizes
        inner, shared = self.heads * sizes.width, self.groups * sizes.state
        gate, raw, mixed = self.input(hidden, context).split([inner, self.heads, inner + 2 * shared], dim=-1)
        return self.output(self.core.run(self._mix, mixed, gate, raw, context=context, owner=self), context)

    def _mix(self, mixed: Tensor, gate: Tensor, raw: Tensor, run: Run) -> Tensor:
        """Return the input of the output layer from the parts of the projection."""
        sizes = self.sizes
        inner, shared = self.heads * sizes.width, self.groups * sizes.state
        mixed = self.core.convolve(mixed, run)
        x, b, c = mixed.split([inner, shared, shared], dim=-1)
        x = x.unflatten(-1, (self.heads, sizes.width))
        b, c = (each.unflatten(-1, (self.groups, sizes.state)) for each in (b, c))
        least, most = sizes.limits
        step = F.softplus(raw.to(self.dt_bias.dtype) + self.dt_bias)
        if least > 0 or most is not None:
            step = step.clamp(least, most)
        decay = -self.A_log.exp() * step
        y = self.core.recur(c, b, x, decay, step, run)
        y = (y + (self.D.unsqueeze(-1) * x).to(y.dtype)).flatten(-2)
        return self._normed(y, gate)

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate [tokens, batch, heads * width], and normalize the channels of each group."""
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = (y.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (self.groups, -1))
        if len(self.sharers) == 1:
            normed = norm(gated, torch.ones(gated.shape[-1], dtype=wide, device=y.device), None, NORM_EPSILON)
        else:
            squares = SumOverSharers.apply(gated.square().sum(-1, keepdim=True), self.over, self.sharers)
            normed = gated * (squares / (len(self.sharers) * gated.shape[-1]) + NORM_EPSILON).rsqrt()
        return (normed.flatten(-2) * self.norm_weight).to(y.dtype)
