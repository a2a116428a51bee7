"""Cross entropy over this rank's columns of the logits, with the vocabulary split over ranks.

With x the logits of a token over the V entries of the vocabulary, y its label and Z = sum of exp(x), the loss is

    log Z - (1 - s) x_y - s / V * sum of x + z (log Z)^2

Label smoothing s is defined as in torch: the target is 1 - s + s / V at the label and s / V at every other entry
(in Megatron-LM the label has 1 - s). z is the coefficient of the z-loss (arXiv:2204.02311), which keeps log Z near 0.
Logits l may be capped first: x = cap * tanh(l / cap) (arXiv:2408.00118). With p = exp(x - log Z), the gradient of x is

    p (1 + 2 z log Z) - (1 - s) [v = y] - s / V

Forward reads the logits once to compute the `statistics` of this rank's columns, and `combined` merges those of all
ranks. `gradient_` reads the logits again and overwrites them with their gradient. Padding columns are in no sum, and
their gradient is zero. Arithmetic is in fp32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite_kernels.activation import soft_cap
from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.loss_options import Columns, LossOptions

CPU_CHUNK_ELEMENTS = 1 << 18
"""Logits per chunk on the CPU: few enough to stay in the cache between passes."""


# ------------------------------------------------------------------------------------------------- the reference


def statistics_reference(logits: Tensor, labels: Tensor, columns: Columns, options: LossOptions) -> Tensor:
    """Compute what `statistics` returns, [2 or 3, tokens] in fp32 or wider, a few tokens at a time."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = torch.empty(3 if options.label_smoothing else 2, labels.shape[0], dtype=dtype, device=logits.device)
    local, inside = _local(labels, columns)
    label_logits = _capped(logits.gather(1, local.unsqueeze(1)).squeeze(1).to(dtype), options)
    found[1] = label_logits.masked_fill_(~inside, 0.0)
    for tokens in _chunks(logits):
        valid = _capped(logits[tokens, : columns.valid].to(dtype), options)
        torch.logsumexp(valid, dim=1, out=found[0, tokens])
        if options.label_smoothing:
            torch.sum(valid, dim=1, out=found[2, tokens])
    return found


def gradient_reference_(
    logits: Tensor, labels: Tensor, log_sums: Tensor, scales: Tensor, columns: Columns, options: LossOptions
) -> None:
    """Overwrite the logits as `gradient_` does, a few tokens at a time."""
    local, inside = _local(labels, columns)
    on_labels = (-(1.0 - options.label_smoothing) * scales * inside).unsqueeze(1)
    factors = scales * (1.0 + 2.0 * options.z_loss * log_sums) if options.z_loss else scales
    for tokens in _chunks(logits):
        chunk = logits[tokens]
        own = chunk.dtype == log_sums.dtype
        gradient = chunk if own else chunk.to(log_sums.dtype)
        slopes = None
        if options.soft_cap is not None:
            bent = torch.tanh(gradient / options.soft_cap)
            gradient, slopes = gradient.copy_(bent).mul_(options.soft_cap), 1.0 - bent.square_()
        gradient.sub_(log_sums[tokens].unsqueeze(1)).exp_().mul_(factors[tokens].unsqueeze(1))
        if options.label_smoothing:
            gradient.sub_((scales[tokens] * (options.label_smoothing / columns.vocab_size)).unsqueeze(1))
        gradient.scatter_add_(1, local[tokens].unsqueeze(1), on_labels[tokens])
        if slopes is not None:
            gradient.mul_(slopes)
        if not own:
            chunk.copy_(gradient)
        chunk[:, columns.valid :].zero_()


def _local(labels: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Return the local column of each label (0 if another rank has it), and a mask of labels on this rank."""
    local = labels - columns.first
    inside = (local >= 0) & (local < columns.valid)
    return local.masked_fill_(~inside, 0), inside


def _capped(logits: Tensor, options: LossOptions) -> Tensor:
    return logits if options.soft_cap is None else soft_cap(logits, options.soft_cap)


def _chunks(logits: Tensor) -> list[slice]:
    """Cut the tokens into the slices that are processed one at a time."""
    tokens, width = logits.shape
    step = max(tokens if on_gpu(logits) else CPU_CHUNK_ELEMENTS // width, 1)
    return [slice(start, start + step) for start in range(0, tokens, step)]


# ------------------------------------------------------------------------------------------------- public functions


def statistics(logits: Tensor, labels: Tensor, columns: Columns, options: LossOptions) -> Tensor:
    """Compute the statistics of each token over this rank's columns.

    Args:
        logits: [tokens, width].
        labels: [tokens], int64 ids in the global vocabulary.

    Returns:
        [2 or 3, tokens], in fp32 or wider: the log-sum-exp (minus infinity if the rank has only padding), the label's
        logit (0 if another rank has it) and, with label smoothing, the sum of the logits.
    """
    if not current().runs_triton("cross_entropy", logits):
        return statistics_reference(logits, labels, columns, options)
    from megalite_kernels.cross_entropy_kernels import launch_statistics

    return launch_statistics(logits, labels, columns, options)


def combined(statistics: Tensor) -> Tensor:
    """Merge the statistics of each rank's columns, [ranks, 2 or 3, tokens] in rank order."""
    return torch.cat([torch.logsumexp(statistics[:, :1], dim=0), statistics[:, 1:].sum(dim=0)])


def losses(statistics: Tensor, vocab_size: int, options: LossOptions) -> Tensor:
    """Compute the losses [tokens] from the merged statistics."""
    log_sums, label_logits, *sums = statistics.unbind()
    if not sums:
        found = log_sums - label_logits
    else:
        smoothing = options.label_smoothing
        found = log_sums - (1.0 - smoothing) * label_logits - smoothing / vocab_size * sums[0]
    return found + options.z_loss * log_sums.square() if options.z_loss else found


def gradient_(
    logits: Tensor, labels: Tensor, log_sums: Tensor, scales: Tensor, columns: Columns, options: LossOptions
) -> None:
    """Overwrite the logits with the gradient of the sum of scales * losses.

    Args:
        logits: [tokens, width], each row contiguous.
        labels: [tokens].
        log_sums: [tokens], over all ranks' columns.
        scales: [tokens], the gradients of the losses.
    """
    if not current().runs_triton("cross_entropy", logits):
        gradient_reference_(logits, labels, log_sums, scales, columns, options)
        return
    from megalite_kernels.cross_entropy_kernels import launch_gradient_

    launch_gradient_(logits, labels, log_sums, scales, columns, options)
