"""Cross entropy over this rank's columns of the logits, where the vocabulary is split over ranks.

With x the logits of a token over the V entries of the vocabulary, y its label and Z = sum of exp(x), the loss is

    log Z - (1 - s) x_y - s / V * sum of x + z (log Z)^2

Label smoothing s is torch's: of the target the label has 1 - s + s / V and every other entry s / V (Megatron-LM's
leaves the label 1 - s). z is the coefficient of the z-loss (arXiv:2204.02311), which holds log Z near 0. Logits l may
be capped before: x = cap * tanh(l / cap) (arXiv:2408.00118). The gradient of x is, with p = exp(x - log Z),

    p (1 + 2 z log Z) - (1 - s) [v = y] - s / V

Forward reads the logits once, to the `statistics` of this rank's columns, which `combined` makes those of all ranks;
`gradient_` reads them once more and writes their gradient in their place. Columns of padding are in no sum, and their
gradient is zero. Everything in fp32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite_kernels.activation import soft_cap
from megalite_kernels.implementation import current

CPU_CHUNK_ELEMENTS = 1 << 18
"""Logits treated at once on the CPU, so that the passes over them stay in the cache."""


@dataclass(frozen=True)
class Columns:
    """The entries of the vocabulary that a rank has: `first`, `first` + 1, ...; columns from `valid` on are padding."""

    first: int
    valid: int
    vocab_size: int
    """V, of all ranks."""

    @staticmethod
    def of_rank(rank: int, width: int, vocab_size: int) -> Columns:
        """Return a rank's columns if each rank has `width` of them, in rank order."""
        return Columns(rank * width, min(max(vocab_size - rank * width, 0), width), vocab_size)


@dataclass(frozen=True)
class LossOptions:
    """Options that change the loss from the plain cross entropy of the logits."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None


# ------------------------------------------------------------------------------------------------- the reference


def statistics_reference(logits: Tensor, labels: Tensor, columns: Columns, options: LossOptions) -> Tensor:
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
    """The labels' columns, 0 where another rank has them, and whether this one has."""
    local = labels - columns.first
    inside = (local >= 0) & (local < columns.valid)
    return local.masked_fill_(~inside, 0), inside


def _capped(logits: Tensor, options: LossOptions) -> Tensor:
    return logits if options.soft_cap is None else soft_cap(logits, options.soft_cap)


def _chunks(logits: Tensor) -> list[slice]:
    """Cut the tokens into slices that are treated at once."""
    tokens, width = logits.shape
    step = max(CPU_CHUNK_ELEMENTS // width if logits.device.type == "cpu" else tokens, 1)
    return [slice(start, start + step) for start in range(0, tokens, step)]


# ------------------------------------------------------------------------------------------------- what is called


def statistics(logits: Tensor, labels: Tensor, columns: Columns, options: LossOptions) -> Tensor:
    """For each token, over this rank's columns: log of the sum of exponentials, the label's logit (0 where another rank
    has it) and, where labels are smoothed, the sum of the logits. Of no column the log is minus infinity.

    logits [tokens, width], labels [tokens] in int64, ids of the whole vocabulary; [2 or 3, tokens] in fp32 or wider.
    """
    if not current().runs_triton("cross_entropy", logits):
        return statistics_reference(logits, labels, columns, options)
    from megalite_kernels.cross_entropy_kernels import launch_statistics

    return launch_statistics(logits, labels, columns, options)


def combined(statistics: Tensor) -> Tensor:
    """The statistics of all ranks' columns from those of each, [ranks, 2 or 3, tokens] in rank order."""
    return torch.cat([torch.logsumexp(statistics[:, :1], dim=0), statistics[:, 1:].sum(dim=0)])


def losses(statistics: Tensor, vocab_size: int, options: LossOptions) -> Tensor:
    """[tokens], from the statistics of all ranks' columns."""
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
    """Overwrite logits [tokens, width], whose columns lie side by side, with the gradient of the losses' sum weighted
    by `scales`. labels, log_sums (over all ranks' columns) and scales: [tokens].
    """
    if not current().runs_triton("cross_entropy", logits):
        gradient_reference_(logits, labels, log_sums, scales, columns, options)
        return
    from megalite_kernels.cross_entropy_kernels import launch_gradient_

    launch_gradient_(logits, labels, log_sums, scales, columns, options)
