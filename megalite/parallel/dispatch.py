"""Rows of activations that travel to the ranks that work on them, by an all-to-all; gradients travel back.

How many rows go where, both sides say as numbers of the host: what a device counts is announced once a forward pass,
and backward knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return collectives.all_to_all_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.all_to_all_rows(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group) -> Tensor:
    """[n, width] to [m, width]: the first send_counts[0] rows go to rank 0, the next to rank 1, and so on; what has
    arrived stands in the order of the ranks that sent it. Counts may be zero.

    Every rank of the group must call it, and go backward through it, with rows or without.

    Raises ValueError if the counts are not one for each rank, or do not deal the rows.
    """
    for counts in (send_counts, receive_counts):
        if len(counts) != group.size or min(counts) < 0:
            raise ValueError(f"counts of rows for and from {group.size} ranks cannot be {list(counts)[:9]} ...")
    if sum(send_counts) != len(rows):
        raise ValueError(f"counts {list(send_counts)[:9]} ... add up to {sum(send_counts)}, not to {len(rows)} rows")
    if group.size == 1:
        if sum(receive_counts) != len(rows):
            raise ValueError(f"one rank alone receives the {len(rows)} rows that it sends, not {sum(receive_counts)}")
        return rows
    exchanged: Tensor = _Exchange.apply(rows, tuple(send_counts), tuple(receive_counts), group)
    return exchanged


def exchange_counts(counts: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """Announce numbers to each rank, equally many, in rank order: those for this one, in the order of their senders.

    Raises ValueError if they are not equally many.
    """
    if len(counts) % group.size:
        raise ValueError(f"{len(counts)} counts cannot be dealt evenly to {group.size} ranks")
    each = [len(counts) // group.size] * group.size
    found: list[int] = collectives.all_to_all_rows(torch.tensor(counts, device=device), each, each, group).tolist()
    return found
