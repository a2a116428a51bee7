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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite_kernels.activation import soft_cap
from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import Tile, as_rows, tile

if TYPE_CHECKING:
    import triton.language as tl

STATISTICS_COLUMNS = 2048  # at once, and as many are under way
GRADIENT_COLUMNS = 4096  # of a program
ACCESS_BYTES = 16  # of neighbours that a thread reads at once
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
        """Where each rank has `width` columns, in rank order."""
        return Columns(rank * width, min(max(vocab_size - rank * width, 0), width), vocab_size)


@dataclass(frozen=True)
class Terms:
    """What the loss is beside the cross entropy of the logits."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None


# ------------------------------------------------------------------------------------------------- the reference


def statistics_reference(logits: Tensor, labels: Tensor, columns: Columns, terms: Terms) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = torch.empty(3 if terms.label_smoothing else 2, labels.shape[0], dtype=dtype, device=logits.device)
    local, inside = _local(labels, columns)
    label_logits = _capped(logits.gather(1, local.unsqueeze(1)).squeeze(1).to(dtype), terms)
    found[1] = label_logits.masked_fill_(~inside, 0.0)
    for tokens in _chunks(logits):
        valid = _capped(logits[tokens, : columns.valid].to(dtype), terms)
        torch.logsumexp(valid, dim=1, out=found[0, tokens])
        if terms.label_smoothing:
            torch.sum(valid, dim=1, out=found[2, tokens])
    return found


def gradient_reference_(
    logits: Tensor, labels: Tensor, log_sums: Tensor, scales: Tensor, columns: Columns, terms: Terms
) -> None:
    local, inside = _local(labels, columns)
    on_labels = (-(1.0 - terms.label_smoothing) * scales * inside).unsqueeze(1)
    factors = scales * (1.0 + 2.0 * terms.z_loss * log_sums) if terms.z_loss else scales
    for tokens in _chunks(logits):
        chunk = logits[tokens]
        own = chunk.dtype == log_sums.dtype
        gradient = chunk if own else chunk.to(log_sums.dtype)
        slopes = None
        if terms.soft_cap is not None:
            bent = torch.tanh(gradient / terms.soft_cap)
            gradient, slopes = gradient.copy_(bent).mul_(terms.soft_cap), 1.0 - bent.square_()
        gradient.sub_(log_sums[tokens].unsqueeze(1)).exp_().mul_(factors[tokens].unsqueeze(1))
        if terms.label_smoothing:
            gradient.sub_((scales[tokens] * (terms.label_smoothing / columns.vocab_size)).unsqueeze(1))
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


def _capped(logits: Tensor, terms: Terms) -> Tensor:
    return logits if terms.soft_cap is None else soft_cap(logits, terms.soft_cap)


def _chunks(logits: Tensor) -> list[slice]:
    """Of the tokens."""
    tokens, width = logits.shape
    step = max(CPU_CHUNK_ELEMENTS // width if logits.device.type == "cpu" else tokens, 1)
    return [slice(start, start + step) for start in range(0, tokens, step)]


# ------------------------------------------------------------------------------------------------- the kernels


@kernel
def _exp(x: tl.tensor) -> tl.tensor:
    """tl.exp takes twice the instructions, to be exact below 1e-38 too."""
    return tl.exp2(x * 1.4426950408889634)


@kernel
def _tanh(x: tl.tensor) -> tl.tensor:
    """To about 1e-7, absolutely."""
    return 2.0 / (1.0 + _exp(-2.0 * x)) - 1.0


@kernel
def _statistics(
    logits: tl.tensor,
    labels: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    cap: tl.tensor,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program has a row. Each GROUP of neighbours, which one thread reads at once, has a maximum and a sum of its
    own, so that threads wait for each other only at the end; the next tile is on its way while one is summed.
    """
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * stride
    local = tl.load(labels + row) - first
    owned = (local >= 0) & (local < VALID)
    label_logit = tl.load(place + tl.where(owned, local, 0)).to(tl.float32)
    column = tl.arange(0, COLUMNS // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.full((COLUMNS // GROUP,), -1e38, tl.float32)  # finite, so that two of them have a difference
    exponentials = tl.zeros((COLUMNS // GROUP,), tl.float32)
    total = tl.zeros((COLUMNS // GROUP,), tl.float32)
    coming = tl.load(place + column, mask=column < WIDTH, other=0.0)
    for start in tl.range(0, VALID, COLUMNS, loop_unroll_factor=2):
        x = coming.to(tl.float32)
        following = start + COLUMNS + column
        coming = tl.load(place + following, mask=following < WIDTH, other=0.0)
        if CAPPED:
            x = tl.cast(cap, tl.float32) * _tanh(x / tl.cast(cap, tl.float32))
        if SMOOTHED:
            total += tl.sum(tl.where(start + column < VALID, x, 0.0), 1)
        if VALID % COLUMNS != 0:
            x = tl.where(start + column < VALID, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 1))
        exponentials = exponentials * _exp(largest - larger) + tl.sum(_exp(x - larger[:, None]), 1)
        largest = larger
    highest = tl.max(largest, 0)
    tl.store(found + row, highest + tl.log(tl.sum(exponentials * _exp(largest - highest), 0)))
    if CAPPED:
        label_logit = tl.cast(cap, tl.float32) * _tanh(label_logit / tl.cast(cap, tl.float32))
    tl.store(found + tl.cast(rows, tl.int64) + row, tl.where(owned, label_logit, 0.0))
    if SMOOTHED:
        tl.store(found + tl.cast(rows, tl.int64) * 2 + row, tl.sum(total, 0))


@kernel
def _gradient(
    logits: tl.tensor,
    labels: tl.tensor,
    log_sums: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    on_label: tl.tensor,
    on_all: tl.tensor,
    z_loss: tl.tensor,
    cap: tl.tensor,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program has COLUMNS columns of a row. Of the target `on_label` is the label's alone, `on_all` everyone's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + row * stride + column
    x = tl.load(place, mask=column < WIDTH, other=0.0).to(tl.float32)
    label = (tl.load(labels + row) - first).to(tl.int32)
    log_sum = tl.load(log_sums + row).to(tl.float32)
    scale = tl.load(scales + row).to(tl.float32)
    if CAPPED:
        bent = _tanh(x / tl.cast(cap, tl.float32))
        x = tl.cast(cap, tl.float32) * bent
    gradient = _exp(x - log_sum)
    if Z_LOSS:
        gradient *= 1.0 + 2.0 * tl.cast(z_loss, tl.float32) * log_sum
    gradient -= tl.where(column == label, tl.cast(on_label, tl.float32), 0.0)
    if SMOOTHED:
        gradient -= tl.cast(on_all, tl.float32)
    gradient *= scale
    if CAPPED:
        gradient *= 1.0 - bent * bent
    if VALID < WIDTH:
        gradient = tl.where(column < VALID, gradient, 0.0)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < WIDTH)


def _tile(width: int, largest: int) -> Tile:
    """Of one row, at most `largest` columns of it: each is read once, so that a thread may hold as many as it can."""
    return tile(min(width, largest), largest=largest)


# ------------------------------------------------------------------------------------------------- what is called


def statistics(logits: Tensor, labels: Tensor, columns: Columns, terms: Terms) -> Tensor:
    """Of each token over this rank's columns: log of the sum of exponentials, the label's logit (0 where another rank
    has it) and, where labels are smoothed, the sum of the logits. Of no column the log is minus infinity.

    logits [tokens, width], labels [tokens] in int64, ids of the whole vocabulary; [2 or 3, tokens] in fp32 or wider.
    """
    if not runs_triton("cross_entropy", logits):
        return statistics_reference(logits, labels, columns, terms)
    flat, (rows, width) = as_rows(logits), logits.shape
    smoothed = terms.label_smoothing != 0.0
    found = torch.empty((2 + smoothed, rows), dtype=torch.float32, device=logits.device)
    if rows:
        shape, group = _tile(width, STATISTICS_COLUMNS), ACCESS_BYTES // logits.element_size()
        _statistics[(rows,)](
            *(flat, labels.contiguous(), found, rows, flat.stride(0), columns.first, terms.soft_cap or 1.0),
            *(width, columns.valid, smoothed, terms.soft_cap is not None, group, max(shape.columns, group)),
            num_warps=shape.warps,
        )
    return found


def combined(statistics: Tensor) -> Tensor:
    """The statistics of all ranks' columns from those of each, [ranks, 2 or 3, tokens] in rank order."""
    return torch.cat([torch.logsumexp(statistics[:, :1], dim=0), statistics[:, 1:].sum(dim=0)])


def losses(statistics: Tensor, vocab_size: int, terms: Terms) -> Tensor:
    """[tokens], from the statistics of all ranks' columns."""
    log_sums, label_logits, *sums = statistics.unbind()
    if not sums:
        found = log_sums - label_logits
    else:
        smoothing = terms.label_smoothing
        found = log_sums - (1.0 - smoothing) * label_logits - smoothing / vocab_size * sums[0]
    return found + terms.z_loss * log_sums.square() if terms.z_loss else found


def gradient_(logits: Tensor, labels: Tensor, log_sums: Tensor, scales: Tensor, columns: Columns, terms: Terms) -> None:
    """Overwrite logits [tokens, width], whose columns lie side by side, with the gradient of the losses' sum weighted
    by `scales`. labels, log_sums (over all ranks' columns) and scales: [tokens].
    """
    if not runs_triton("cross_entropy", logits):
        gradient_reference_(logits, labels, log_sums, scales, columns, terms)
        return
    rows, width = logits.shape
    if rows:
        shape, smoothing = _tile(width, GRADIENT_COLUMNS), terms.label_smoothing
        _gradient[(rows, -(-width // shape.columns))](
            *(logits, labels.contiguous(), log_sums.contiguous(), scales.contiguous(), logits.stride(0), columns.first),
            *(1.0 - smoothing, smoothing / columns.vocab_size, terms.z_loss, terms.soft_cap or 1.0),
            *(width, columns.valid, smoothing != 0.0, terms.z_loss != 0.0, terms.soft_cap is not None, shape.columns),
            num_warps=shape.warps,
        )
