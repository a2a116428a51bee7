"""Divergence of predictions from those of a teacher, over logits whose vocabulary is split over ranks.

The ranks gather three floats per token, and no logits (with `top_k`, each its own largest ones). The gradient is
computed in forward, and backward scales it in place: the logits are not needed again, and may be overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite_kernels.activation import soft_cap
from megalite_kernels.loss_options import Columns


def vocab_parallel_divergence(
    logits: Tensor,
    teacher: Tensor,
    group: Group,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute KL(teacher || network) of each token times the square of the temperature, in fp32 or wider.

    Args:
        logits: [..., padded vocabulary / size], this rank's columns. They are not kept.
        teacher: the teacher's, of the same shape; they get no gradient.
        group: the ranks over which the vocabulary is split, in order.
        vocab_size: the true vocabulary size. Columns from this index on are padding.
        temperature: divides both logits.
        top_k: number of the teacher's largest logits that count, with those equal to the last of them; the probability
            of the others is 0, and that of these sums to 1. None: all.
        cap: soft cap of `logits`, as of the teacher's before.

    Returns:
        The divergences, [...].
    """
    options = temperature, top_k, cap
    found: Tensor = _Divergence.apply(logits, teacher, group, vocab_size, options)
    return found


def _kept(teacher: Tensor, group: Group, top_k: int) -> Tensor:
    """Return where the teacher's logits [..., columns] are among the largest of all ranks."""
    own = teacher.topk(min(top_k, teacher.shape[-1]), dim=-1).values
    every = collectives.all_gather_last(_filled(own, top_k), group)
    return teacher >= every.topk(top_k, dim=-1).values[..., -1:]


def _filled(values: Tensor, width: int) -> Tensor:
    """Return values with -inf behind them, so that all ranks have as many."""
    missing = values.new_full((*values.shape[:-1], width - values.shape[-1]), -torch.inf)
    return torch.cat([values, missing], dim=-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor,
        group: Group,
        vocab_size: int,
        options: tuple[float, int | None, float | None],
    ) -> Tensor:
        """Compute the divergences, and keep their gradient with respect to the logits."""
        (temperature, top_k, cap), width = options, logits.shape[-1]
        columns = Columns.of_rank(group.rank, width, vocab_size)
        wide = torch.promote_types(logits.dtype, torch.float32)
        own, its = (each[..., : columns.valid].to(wide) for each in (logits, teacher))
        capped = own if cap is None else soft_cap(own, cap)
        own, its = capped / temperature, its / temperature
        chosen = its
        if top_k is not None and top_k < vocab_size:
            chosen = its.masked_fill(~_kept(its, group, top_k), -torch.inf)
        sums = torch.stack([own.logsumexp(-1), chosen.logsumexp(-1)]).unsqueeze(0)
        own_sum, its_sum = collectives.all_gather(sums, group).logsumexp(0)
        own, its = own - own_sum.unsqueeze(-1), its - its_sum.unsqueeze(-1)
        probabilities = (chosen - its_sum.unsqueeze(-1)).exp()
        part = (probabilities * (its - own)).sum(-1)
        divergences = collectives.all_gather(part.unsqueeze(0), group).sum(0)
        slopes = logits.new_zeros(logits.shape)
        of_capped = own.exp_().sub_(probabilities).mul_(temperature)
        if cap is not None:
            of_capped.mul_(1.0 - (capped / cap).square())
        slopes[..., : columns.valid] = of_capped
        ctx.save_for_backward(slopes)
        ctx.consumed = False
        return divergences * temperature**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the gradient was scaled in place by the first backward pass through the divergence")
        ctx.consumed = True
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(gradients[0].unsqueeze(-1)), None, None, None, None
