"""Parts that recurrent layers share: their convolution, and their recurrence over ranks and with a cache.

A recurrent layer has a state of fixed size in place of keys and values. `megalite_kernels/recurrence.py` has the
arithmetic, in chunks that are counted from the start of the sample. Documents begin with a state of zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.model.batch import LayerContext
from megalite.parallel.context import ParallelContext
from megalite.parallel.sharding import Sharding
from megalite.parallel.stage_module import Inside
from megalite.parallel.state_chain import StateChain, states_of_runs
from megalite.parallel.state_scan import INSIDE, StateScan, tokens_before
from megalite_kernels.convolution import convolution_step, short_convolution
from megalite_kernels.recurrence import Chain, Found, Kept, Segment, recurrence, step_once

LENGTH_EPSILON = 1e-6
"""Number added to the squared length of queries and keys of a delta rule."""


class RecurrentCache:
    """State of a batch of sequences in one recurrent layer, and the last tokens that its convolution has seen.

    Padding changes neither.
    """

    def __init__(self) -> None:
        self.state: Tensor | None = None
        """[batch, heads, key width, value width]."""
        self.tail: Tensor | None = None
        """[taps - 1, batch, channels]."""

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences of the batch."""
        if self.state is not None:
            self.state = self.state[rows]
        if self.tail is not None:
            self.tail = self.tail[:, rows]


@dataclass(frozen=True)
class Run:
    """One run of a layer through a micro-batch.

    Attributes:
        cache: state of the layer in generation; None in training.
        halos: tokens before each run of this rank's tokens; None: zeros.
        kept: results of the recurrence, for a layer that is recomputed around it.
    """

    context: LayerContext
    cache: RecurrentCache | None
    halos: list[Tensor] | None = None
    kept: Kept | None = None

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """The runs of tokens that this rank has of each sample."""
        first, runs = self.context.first_keys, self.context.layout.runs
        return [Segment(run, None if first is None else first[:, run.start : run.stop]) for run in runs]


class Convolution(nn.Module):
    """Short causal convolution by channel, over the runs of tokens that this rank has of each sample."""

    def __init__(
        self,
        context: ParallelContext,
        weights: Sequence[Sharding],
        biases: Sequence[Sharding],
        *,
        taps: int,
        silu: bool,
    ) -> None:
        """Make the layer.

        Args:
            weights: places of its weight, in the order of its channels; see `of_parts`.
            biases: those of its bias; none without one.
            silu: SiLU follows it.
        """
        super().__init__()
        self.weights = nn.ParameterList(map(context.parameter, weights))
        self.biases = nn.ParameterList(map(context.parameter, biases))
        self.taps, self.silu = taps, silu
        group = context.mesh.group("cp")
        self.over = group if group.size > 1 else None

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        return [] if self.over is None or self.taps == 1 else [INSIDE[0]]

    def _taps(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [channels, taps] and the bias [channels] of the convolution."""
        weight, bias = list(self.weights), list(self.biases)
        if len(weight) == 1:
            return weight[0], bias[0] if bias else None
        return torch.cat(weight), torch.cat(bias) if bias else None

    def begin(self, input: Tensor, context: LayerContext, owner: nn.Module) -> Run:
        """Return the run of this rank's tokens, [tokens, batch, channels]. `owner`: the layer, whose cache is taken."""
        if context.cache is not None:
            return Run(context, context.cache.of(owner, RecurrentCache))
        if self.over is None or self.taps == 1:
            return Run(context, None)
        return Run(context, None, tokens_before(input, self.taps - 1, self.over, context.layout))

    def convolve(self, input: Tensor, run: Run) -> Tensor:
        """Apply the convolution to this rank's tokens [tokens, batch, channels]."""
        if run.cache is not None and run.context.cache is not None:
            return self._convolve_further(input, run.cache, run.context.cache.real)
        return short_convolution(input, *self._taps(), run.segments, run.halos, silu=self.silu)

    def _convolve_further(self, input: Tensor, cache: RecurrentCache, real: Tensor | None) -> Tensor:
        """Convolve further tokens of each sequence, and keep the last true ones. `real`: see `StageCache`."""
        tail = input.new_zeros(self.taps - 1, *input.shape[1:]) if cache.tail is None else cache.tail
        if len(input) == 1 and real is None:
            output, cache.tail = convolution_step(input, *self._taps(), tail, silu=self.silu)
            return output
        whole = torch.cat([tail, input])
        output = short_convolution(input, *self._taps(), None, [tail], silu=self.silu)
        if real is None:
            cache.tail = whole[len(input) :]
        else:
            last = real.sum(1) + torch.arange(len(tail), device=input.device)[:, None]
            cache.tail = whole.gather(0, last.unsqueeze(-1).expand(*last.shape, input.shape[-1]))
        return output


class RecurrentCore(Convolution):
    """Convolution with SiLU, and recurrence of a layer."""

    def __init__(
        self,
        context: ParallelContext,
        weights: Sequence[Sharding],
        biases: Sequence[Sharding],
        *,
        taps: int,
        delta: bool,
        chunk: int,
        recompute: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            weights, biases, taps: see `Convolution`.
            delta, chunk: see `recurrence`.
            recompute: compute all but the recurrence again in backward, from the projection.
        """
        super().__init__(context, weights, biases, taps=taps, silu=True)
        self.delta, self.chunk, self.recompute = delta, chunk, recompute
        self.chains = context.attention_ways[0].chains

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        if self.over is None:
            return []
        return [*super().inside, *(states_of_runs(self.over.size) if self.chains else [INSIDE[1]])]

    def run(
        self, mix: Callable[..., Tensor], mixed: Tensor, *others: Tensor, context: LayerContext, owner: nn.Module
    ) -> Tensor:
        """Return mix(mixed, *others, run), all of parts of the projection, with the run of this rank's tokens.

        `mixed`, [tokens, batch, channels], is what is convolved. `owner`: the layer, whose cache is taken.
        """
        run = self.begin(mixed, context, owner)
        if run.cache is not None or not (self.recompute and torch.is_grad_enabled()):
            return mix(mixed, *others, run)
        run = replace(run, kept=(kept := Kept()))
        output = checkpoint(mix, mixed, *others, run, use_reentrant=False, preserve_rng_state=False)
        held: Tensor = _Held.apply(output, kept)
        return held

    def recur(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, run: Run) -> Tensor:
        """Run the recurrence on this rank's tokens. The arguments are those of `recurrence`."""
        context, cache = run.context, run.cache
        if cache is not None and context.cache is not None:
            if (real := context.cache.real) is not None:
                decay, step = (
                    each.masked_fill(~real.t().view(*each.shape[:2], *[1] * (each.dim() - 2)), 0.0)
                    for each in (decay, step)
                )
            if len(query) == 1 and cache.state is not None:
                output, cache.state = step_once(query, key, value, decay, step, delta=self.delta, state=cache.state)
                return output
            output, cache.state = recurrence(
                query, key, value, decay, step, delta=self.delta, chunk=self.chunk, state=cache.state
            )
            return output
        scan, chain = None, Chain()
        if self.over is not None and self.chains:
            chain = StateChain(self.over, context.layout)
        elif self.over is not None:
            scan = StateScan(self.over, context.layout)
        output, _ = recurrence(
            *(query, key, value, decay, step),
            delta=self.delta,
            chunk=self.chunk,
            segments=run.segments,
            scan=scan,
            chain=chain,
            kept=run.kept,
        )
        return output


class _Held(torch.autograd.Function):
    """The output of a recomputed layer, which saves the results of the recurrence until they are needed again."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, kept: Kept) -> Tensor:
        found = kept.take()
        ctx.save_for_backward(*(each.detach() for each in (found.output, found.last, *found.saved)))
        ctx.kept = kept
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        output, last, *saved = ctx.saved_tensors
        ctx.kept.found = Found(output, last, saved)
        return gradients[0], None


def of_length_one(heads: Tensor, factor: float) -> Tensor:
    """Divide each head [..., width] by its length, in fp32 or wider, and multiply it with `factor`."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    inverse = (wide.square().sum(-1, keepdim=True) + LENGTH_EPSILON).rsqrt()
    return (wide * (inverse * factor)).to(heads.dtype)
