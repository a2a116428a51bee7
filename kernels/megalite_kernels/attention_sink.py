"""Attention whose softmax has one more logit for each head, the sink, which stands for no key and has no value.

With the log-sum-exp (lse) of a query's scores, total = log(exp(lse) + exp(sink)), and the output is that without a sink
times exp(lse - total). As for parts of the keys, the gradients of queries, keys and values depend on this output and
this total alone (`attention_parts`), so the same operators compute them. That of the sink is the sum over queries of
-exp(sink - total) * (gradient of the output @ output). Dropout changes neither the lse nor these formulas.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megalite_kernels.attention import Kept, Mask, attention_with_lse, draw_kept
from megalite_kernels.attention_parts import attend, part_gradients
from megalite_kernels.dropout_mask import DropoutMask
from megalite_kernels.products import rounded


class _Options(NamedTuple):
    mask: Tensor | None
    scale: float
    cap: float | None
    dropout: DropoutMask | None

    def of_part(self, query: Tensor, key: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of a part of all keys. Dropout draws the same in each call."""
        mask = "causal" if self.mask is None else self.mask
        kept = None
        if self.dropout is not None:
            kept = Kept(draw_kept(self.dropout, query, key.shape[2]).to(query.device), self.dropout.scale)
        return {"mask": mask, "scale": self.scale, "cap": self.cap, "kept": kept}


class _WithSink(torch.autograd.Function):
    """Attention of a dense mask, of which backward keeps inputs, output and log-sum-exp, and no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, options: _Options) -> Tensor:
        output, lse = attend(query, key, value, **options.of_part(query, key))
        output, total = with_sink(output, lse, sink)
        output = rounded(output, query.dtype)
        ctx.options = options
        ctx.save_for_backward(query, key, value, sink, output, total)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, output, total = (each.detach() for each in ctx.saved_tensors)
        options = ctx.options.of_part(query, key)
        of_inputs = part_gradients(gradients[0], query, key, value, output, total, **options)
        return *of_inputs, sink_gradient(gradients[0], output, total, sink), None


def attention_with_sink(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    sink: Tensor,
    *,
    scale: float | None,
    cap: float | None,
    dropout: DropoutMask | None,
) -> Tensor:
    """Compute `attention` with a sink. The arguments are the same; `sink` is [heads], and a dense mask is bool."""
    if isinstance(mask, BlockMask):
        output, lse = attention_with_lse(query, key, value, mask, scale=scale, cap=cap)
        return with_sink(output, lse, sink)[0].to(query.dtype)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    mixed: Tensor = _WithSink.apply(query, key, value, sink, _Options(mask, scale, cap, dropout))
    return mixed


def with_sink(output: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp with a sink, of those without, [batch, heads, queries, width] and less."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(-1))
    return output * torch.exp(lse - total).unsqueeze(-1), total


def sink_gradient(gradient: Tensor, output: Tensor, total: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of the sink. `output` and `total`: those of `with_sink`."""
    slope = (gradient.to(total.dtype) * output).sum(dim=-1)
    share = torch.exp(sink.to(total.dtype).unsqueeze(-1) - total)
    return rounded(-(share * slope).sum(dim=(0, 2)), sink.dtype)
