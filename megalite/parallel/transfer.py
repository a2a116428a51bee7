"""Differentiable transfers of rows to other ranks, with work between their beginning and their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.deep_ep import Waiting
from megalite.parallel.mesh import Group


class _Transfer:
    """Transfer of rows to other ranks, and of their gradients back: under way between a `_Begin` and an `_End`."""

    def __init__(self, there: Callable[..., Waiting], back: Callable[..., Waiting]) -> None:
        self.there, self.back = there, back
        self._wait: Waiting | None = None

    def begin(self, send: Callable[..., Waiting], rows: tuple[Tensor, ...]) -> Tensor:
        """Begin to send, and return an empty tensor, which only orders the two nodes of the transfer."""
        self._wait = send(*rows)
        return rows[0].new_empty(0)

    def end(self) -> tuple[Tensor, ...]:
        """Wait for the received rows, which are not kept here."""
        assert self._wait is not None
        wait, self._wait = self._wait, None
        return wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *rows: Tensor) -> Tensor:
        ctx.transfer = transfer
        return transfer.begin(transfer.there, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.transfer.end()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, transfer: _Transfer) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.end()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.begin(ctx.transfer.back, gradients), None


def transfer(there: Callable[..., Waiting], back: Callable[..., Waiting], *rows: Tensor) -> Waiting:
    """Begin a transfer of rows, and return the function that waits for its end and returns the received rows.

    Work between the two runs while the rows are under way. So does its backward: autograd runs the nodes that are ready
    in the reverse order of forward.
    """
    under_way = _Transfer(there, back)
    begun = _Begin.apply(under_way, *rows)

    def end() -> tuple[Tensor, ...]:
        received: tuple[Tensor, ...] = _End.apply(begun, under_way)
        return received

    return end


def transfer_rows(
    rows: Tensor, there: Callable[[Tensor], Pending], back: Callable[[Tensor], Pending], what: str
) -> Callable[[], Tensor]:
    """Begin the transfer of one tensor by collectives, and return the function that waits for the received rows.

    `what`: what is waited for, for the message about a rank that has ended.
    """

    def waiting(send: Callable[[Tensor], Pending]) -> Callable[[Tensor], Waiting]:
        def begin(rows: Tensor) -> Waiting:
            pending = send(rows)
            return lambda: (pending.wait(what),)

        return begin

    end = transfer(waiting(there), waiting(back), rows)
    return lambda: end()[0]


def exchange_rows_async(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group, what: str = "rows"
) -> Callable[[], Tensor]:
    """Begin to send rows [n, width], and return the function that returns the received rows [m, width].

    The first send_counts[0] rows go to rank 0, the next send_counts[1] to rank 1, and so on. Counts may be zero.
    Received rows are sorted by the rank that sent them. Every rank of the group must call this function and run its
    backward, even without rows. `what`: name of the rows, for the message about a rank that has ended.
    """
    if group.size == 1:
        return lambda: rows

    def there(rows: Tensor) -> Pending:
        return collectives.all_to_all_rows_async(rows, send_counts, receive_counts, group)

    def back(rows: Tensor) -> Pending:
        return collectives.all_to_all_rows_async(rows, receive_counts, send_counts, group)

    ranks = ", ".join(map(str, group.ranks[:16])) + (", ..." if group.size > 16 else "")
    return transfer_rows(rows, there, back, f"waited for {what}, or for their gradients, from ranks {ranks}")
