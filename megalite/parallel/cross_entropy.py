"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks.

The ranks communicate once, two floats per token: the log-sum-exp of the rank's logits and the label's logit. Label
smoothing adds a third, the sum of the rank's logits. Backward overwrites the logits with their gradient, so nothing
else may read the logits after the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite_kernels.cross_entropy import combined, gradient_, losses, statistics
from megalite_kernels.launch import as_rows
from megalite_kernels.loss_options import Columns, LossOptions


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, vocab_size: int, options: LossOptions | None = None
) -> Tensor:
    """Compute the loss of each token, in fp32 or wider.

    Args:
        logits: [..., padded vocabulary / size], this rank's columns. Backward overwrites them.
        labels: [...], ids in [0, vocab_size).
        group: the ranks over which the vocabulary is split, in order.
        vocab_size: the true vocabulary size. Columns from this index on are padding.
        options: changes to the loss; None for plain cross entropy.

    Returns:
        The losses, [...].

    Raises:
        RuntimeError: the logits are a leaf tensor, whose values the caller may still need. Also raised in a second
            backward pass.
    """
    if logits.is_leaf and logits.requires_grad:
        raise RuntimeError("the logits handed to the loss must be an intermediate result: backward overwrites them")
    columns = Columns.of_rank(group.rank, logits.shape[-1], vocab_size)
    found: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, group, columns, options or LossOptions())
    return found


def vocab_parallel_entropy(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Compute the entropy of each token's prediction, -sum of p log p, in fp32 or wider.

    The arguments are those of `vocab_parallel_cross_entropy`. The logits are not overwritten.
    """
    found: Tensor = _VocabParallelEntropy.apply(
        logits, group, Columns.of_rank(group.rank, logits.shape[-1], vocab_size)
    )
    return found


def over_ranks(statistics: Tensor, group: Group) -> Tensor:
    """Merge the statistics of all ranks' columns. The result has the same bits on all ranks."""
    if group.size == 1:
        return statistics
    return combined(collectives.all_gather(statistics.unsqueeze(0), group))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, columns: Columns, options: LossOptions
    ) -> Tensor:
        matrix = as_rows(logits)
        found = over_ranks(statistics(matrix, labels.reshape(-1), columns, options), group)
        ctx.save_for_backward(matrix, labels, found[0].clone())  # a copy, so that the other statistics are freed
        ctx.shape, ctx.columns, ctx.options, ctx.consumed = logits.shape, columns, options, False
        return losses(found, columns.vocab_size, options).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the logits were overwritten by the first backward pass through their loss")
        ctx.consumed = True
        matrix, labels, log_sums = ctx.saved_tensors
        gradient = matrix.detach()
        gradient_(gradient, labels.reshape(-1), log_sums, gradients[0].reshape(-1), ctx.columns, ctx.options)
        return gradient.view(ctx.shape), None, None, None, None


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, columns: Columns) -> Tensor:
        valid = logits[..., : columns.valid].to(torch.promote_types(logits.dtype, torch.float32))
        sums = collectives.all_gather(valid.logsumexp(-1).unsqueeze(0), group).logsumexp(0)
        log_p = valid - sums.unsqueeze(-1)
        entropy = collectives.all_gather(-(log_p.exp() * log_p).sum(-1).unsqueeze(0), group).sum(0)
        ctx.save_for_backward(log_p, entropy)
        ctx.width, ctx.dtype = logits.shape[-1], logits.dtype
        return entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_p, entropy = ctx.saved_tensors
        slopes = -log_p.exp() * (log_p + entropy.unsqueeze(-1)) * gradients[0].unsqueeze(-1)
        return F.pad(slopes, (0, ctx.width - slopes.shape[-1])).to(ctx.dtype), None, None
