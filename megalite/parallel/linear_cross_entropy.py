"""Fused output layer and cross entropy: logits exist only for one chunk of tokens at a time.

Forward saves the hidden states and each token's log-sum-exp. Backward computes the logits of a chunk again, overwrites
them with their gradient, and multiplies this gradient with the weight and with the hidden states. This costs a fourth
matrix product and saves the memory of the logits. Communication is the same as without fusion: that of a
column-parallel layer and of its loss. The statistics of all chunks are gathered in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.cross_entropy import over_ranks
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import (
    DenseGradient,
    Gradient,
    Parameter,
    ProductGradient,
    accumulate_grad,
    is_deferred,
)
from megalite_kernels.cross_entropy import gradient_, losses, statistics
from megalite_kernels.implementation import on_gpu
from megalite_kernels.loss_options import Columns, LossOptions

CHUNK_ELEMENTS, CHUNK_TOKENS = 1 << 28, 1024
"""On a GPU: the most logits per chunk, and the fewest tokens per chunk. Fewer tokens do not keep a GPU busy."""
CPU_CHUNK_ELEMENTS, CPU_CHUNK_TOKENS = 1 << 21, 64
"""On a CPU: logits per chunk that fit in the cache, and enough tokens to amortize reading the weight."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Parameter,
    labels: Tensor,
    group: Group,
    vocab_size: int,
    options: LossOptions | None = None,
    *,
    sequence_parallel: bool = False,
    use: int = 0,
) -> Tensor:
    """Compute the loss of each token from the logits hidden @ weight.T, in fp32 or wider.

    Args:
        hidden: [sequence (/ size under sequence parallelism), batch, hidden].
        weight: [padded vocabulary / size, hidden], this rank's rows.
        labels: [sequence, batch], ids in [0, vocab_size).
        group: the ranks over which the vocabulary is split, in order.
        vocab_size: the true vocabulary size. Rows from this index on are padding.
        options: changes to the loss; None for plain cross entropy.
        use: the number of this use, if the weight is tied.

    Returns:
        The losses, [sequence, batch].
    """
    columns = Columns.of_rank(group.rank, weight.shape[0], vocab_size)
    split_over = group if sequence_parallel and group.size > 1 else None
    settings = _Settings(split_over, group, use, columns, options or LossOptions())
    found: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, settings)
    return found


class _Settings(NamedTuple):
    split_over: Group | None  # the ranks that share the hidden states' sequence, if it is split
    group: Group
    use: int
    columns: Columns
    options: LossOptions


@dataclass(frozen=True)
class _LogitGradients:
    """The inputs from which the gradient of the logits is computed, chunk by chunk."""

    labels: Tensor  # [tokens]
    log_sums: Tensor  # [tokens]
    scales: Tensor  # [tokens], gradients of the losses
    weight: Tensor
    columns: Columns
    options: LossOptions

    def of(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the tokens, each with the gradient of its logits [tokens in chunk, columns].

        The gradient is valid until the next chunk, which overwrites it.
        """
        for tokens, logits in _logits(hidden, self.weight):
            labels, log_sums, scales = (part[tokens] for part in (self.labels, self.log_sums, self.scales))
            gradient_(logits, labels, log_sums, scales, self.columns, self.options)
            yield tokens, logits


@dataclass(frozen=True)
class _WeightGradient(Gradient):
    """The gradient of the weight. It also computes `hidden_gradient`, if given, from the same chunks of logits."""

    logit_gradients: _LogitGradients
    hidden: Callable[[], Tensor]  # [tokens, hidden]
    hidden_gradient: Tensor | None = None  # [tokens, hidden], to be filled

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Add the sum over the chunks, which is in fp32 or wider even if the target is not."""
        hidden = self.hidden()
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if target.dtype != dtype:
            total = torch.empty_like(target, dtype=dtype)
            self.add_to(total, overwrite=True)
            DenseGradient(total).add_to(target, overwrite=overwrite)
            return
        for tokens, gradient in self.logit_gradients.of(hidden):
            if self.hidden_gradient is not None:
                torch.mm(gradient, self.logit_gradients.weight, out=self.hidden_gradient[tokens])
            ProductGradient(gradient, hidden[tokens]).add_to(target, overwrite=overwrite and tokens.start == 0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter, labels: Tensor, settings: _Settings) -> Tensor:
        columns, options = settings.columns, settings.options
        ids, whole = labels.reshape(-1), _whole(hidden, settings.split_over)
        parts = [statistics(logits, ids[tokens], columns, options) for tokens, logits in _logits(whole, weight)]
        found = over_ranks(torch.cat(parts, dim=1), settings.group)
        ctx.save_for_backward(hidden, labels, found[0].clone())  # a copy, so that the other statistics are freed
        # Not by save_for_backward: the saved tensor would not have the parameter's gradient buffer.
        ctx.weight, ctx.settings = weight, settings
        return losses(found, columns.vocab_size, options).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and the weight. The logits are computed again, a chunk at a time."""
        hidden, labels, log_sums = (
            saved.detach() for saved in ctx.saved_tensors
        )  # a deferred gradient must not keep the graph
        weight, (split_over, group, use, columns, options) = ctx.weight, ctx.settings
        tokens = labels.reshape(-1), log_sums, gradients[0].reshape(-1)
        logit_gradients = _LogitGradients(*tokens, weight, columns, options)
        whole = _whole(hidden, split_over)
        hidden_gradient = torch.empty_like(whole, memory_format=torch.contiguous_format)
        if is_deferred(weight) or not weight.requires_grad:
            for chunk, gradient in logit_gradients.of(whole):
                torch.mm(gradient, weight, out=hidden_gradient[chunk])
            if weight.gradient_buffer is not None and weight.gradient_buffer.frees_parameters:
                logit_gradients = replace(logit_gradients, weight=weight.detach().clone())
            product = _WeightGradient(logit_gradients, partial(_whole, hidden, split_over))
        else:
            product = _WeightGradient(logit_gradients, lambda: whole, hidden_gradient)
        weight_gradient = accumulate_grad(weight, product, use)
        hidden_gradient = hidden_gradient.view(-1, *hidden.shape[1:])
        if split_over is not None:
            hidden_gradient = collectives.reduce_scatter(hidden_gradient, split_over)
        else:
            collectives.all_reduce_(hidden_gradient, group)
        return hidden_gradient, weight_gradient, None, None


def _whole(hidden: Tensor, split_over: Group | None) -> Tensor:
    """Return states [sequence (/ size), batch, hidden], gathered if they are split, as [tokens, hidden]."""
    return (hidden if split_over is None else collectives.all_gather(hidden, split_over)).flatten(0, 1)


def _logits(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of the tokens with their logits [tokens in chunk, columns]. All chunks use the same memory."""
    tokens, width = hidden.shape[0], weight.shape[0]
    on_cpu = CPU_CHUNK_ELEMENTS, CPU_CHUNK_TOKENS
    elements, least = (CHUNK_ELEMENTS, CHUNK_TOKENS) if on_gpu(hidden) else on_cpu
    step = min(max(elements // width, least), tokens)
    place = hidden.new_empty(step, width)
    for start in range(0, tokens, max(step, 1)):
        chunk = slice(start, min(start + step, tokens))
        logits = place[: chunk.stop - start]
        torch.mm(hidden[chunk], weight.t(), out=logits)
        yield chunk, logits
