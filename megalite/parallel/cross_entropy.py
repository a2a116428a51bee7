"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks.

Two floats a token travel: the log-sum-exp of the rank's logits and the label's logit. Padding of the vocabulary is
outside the sum. The gradient softmax(logits) - onehot(label) is written into the logits' own storage, which the caller
hands over: nothing else may read those logits after the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group

CPU_CHUNK_ELEMENTS = 1 << 18
"""Logits treated at once on the CPU, so that the passes over them stay in the cache."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Loss of each token, in fp32 or wider.

    Args:
        logits: [..., padded vocabulary / size], this rank's columns; handed over, backward overwrites them.
        labels: [...], ids in [0, vocab_size).
        group: the ranks that hold the vocabulary, in order.
        vocab_size: the true vocabulary; columns at or past it are padding.
    Returns: [...].
    Raises: RuntimeError in a second backward pass, and for leaf logits, which are somebody's to keep.
    """
    if logits.is_leaf and logits.requires_grad:
        raise RuntimeError("the logits handed to the loss must be an intermediate result: backward overwrites them")
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, group, vocab_size)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group, vocab_size: int) -> Tensor:
        columns = logits.shape[-1]
        first = group.rank * columns
        valid = min(max(vocab_size - first, 0), columns)
        matrix = logits.reshape(-1, columns)
        local = labels.reshape(-1) - first
        inside = (local >= 0) & (local < valid)
        local = local.masked_fill(~inside, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sums = [torch.logsumexp(chunk[:, :valid].to(dtype), dim=1) for chunk in _chunks(matrix)]
        label_logits = matrix.gather(1, local.unsqueeze(1)).squeeze(1).to(dtype).masked_fill_(~inside, 0.0)
        log_sum, label_logit = _combine(torch.cat(log_sums), label_logits, group)
        ctx.save_for_backward(logits, local, inside, log_sum)
        ctx.valid, ctx.consumed = valid, False
        return (log_sum - label_logit).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the logits were overwritten by the first backward pass through their loss")
        ctx.consumed = True
        logits, local, inside, log_sum = ctx.saved_tensors
        scale = gradients[0].reshape(-1)
        matrix = logits.detach().view(-1, logits.shape[-1])
        start = 0
        for chunk in _chunks(matrix):
            tokens = slice(start, start + chunk.shape[0])
            start = tokens.stop
            _gradient_(chunk, ctx.valid, local[tokens], inside[tokens], log_sum[tokens], scale[tokens])
        return logits.detach(), None, None, None


def _chunks(matrix: Tensor) -> tuple[Tensor, ...]:
    rows = matrix.shape[0]
    if matrix.device.type == "cpu":
        rows = max(1, CPU_CHUNK_ELEMENTS // matrix.shape[1])
    return matrix.split(rows)


def _combine(log_sum: Tensor, label_logit: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    if group.size == 1:
        return log_sum, label_logit
    both = collectives.all_gather(torch.stack([log_sum, label_logit]).unsqueeze(0), group)
    return torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(dim=0)


def _gradient_(logits: Tensor, valid: int, local: Tensor, inside: Tensor, log_sum: Tensor, scale: Tensor) -> None:
    """Overwrite logits [tokens, columns] with (softmax - onehot) * scale; padding gets zero."""
    same = logits.dtype == log_sum.dtype
    shifted = logits.sub_(log_sum.unsqueeze(1)) if same else logits.to(log_sum.dtype) - log_sum.unsqueeze(1)
    gradient = shifted.exp_().mul_(scale.unsqueeze(1))
    gradient.scatter_add_(1, local.unsqueeze(1), -(scale * inside).unsqueeze(1))
    if not same:
        logits.copy_(gradient)
    logits[:, valid:].zero_()
