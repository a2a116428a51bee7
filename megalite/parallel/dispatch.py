"""All-to-all of activation rows for expert parallelism. Forward sends rows, backward returns their gradients.

Sender and receiver both pass the numbers of rows as Python integers. If only the sender has them, `exchange_counts`
sends them to the receivers, once per forward pass. Backward reuses them.
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
    """Send rows [n, width] and return the received rows [m, width]. Counts may be zero.

    The first send_counts[0] rows go to rank 0, the next send_counts[1] to rank 1, and so on. Received rows are sorted
    by the rank that sent them. Every rank of the group must call this function and run its backward, even without rows.

    Raises:
        ValueError: there is not one count per rank, or the counts do not add up to the rows.
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
    """Send an equal number of counts to each rank, in rank order, and return the received counts, sorted by sender.

    Raises:
        ValueError: the counts do not divide evenly over the ranks.
    """
    if len(counts) % group.size:
        raise ValueError(f"{len(counts)} counts cannot be divided evenly among {group.size} ranks")
    each = [len(counts) // group.size] * group.size
    found: list[int] = collectives.all_to_all_rows(torch.tensor(counts, device=device), each, each, group).tolist()
    return found
