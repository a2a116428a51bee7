"""Dispatch of tokens to the ranks of their experts, and the way back.

The ranks of ("ep", "etp") share one replica of a layer's experts. A token is sent once to each rank that has one of its
experts, with the numbers and the weights of its experts. There, a row is made for each of the token's experts on that
rank; rows are sorted by expert, sending rank and position. On the way back, each rank adds the rows of its experts for
a token, and the token's own rank adds the ranks' sums in rank order. So the result has the same bits whether a token is
sent only to the ranks that need it (all-to-all) or to all of them (all-gather).

The host must know the number of rows, for which it waits once per layer and forward pass. With a capacity, it knows
them beforehand and never waits. Backward and the way back reuse the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.deep_ep import DeepEPExchange, Waiting
from megalite.parallel.grouped import Groups
from megalite.parallel.mesh import Group
from megalite_kernels.permutation import group_rows, occurrences, permute, unpermute


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


def _transfer(there: Callable[..., Waiting], back: Callable[..., Waiting], *rows: Tensor) -> Waiting:
    """Begin a transfer of rows, and return the function that waits for its end and returns the received rows.

    Work between the two runs while the rows are under way. So does its backward: autograd runs the nodes that are ready
    in the reverse order of forward.
    """
    transfer = _Transfer(there, back)
    begun = _Begin.apply(transfer, *rows)

    def end() -> tuple[Tensor, ...]:
        received: tuple[Tensor, ...] = _End.apply(begun, transfer)
        return received

    return end


def _transfer_rows(
    rows: Tensor, there: Callable[[Tensor], Pending], back: Callable[[Tensor], Pending]
) -> Callable[[], Tensor]:
    """Begin the transfer of one tensor by collectives, and return the function that waits for the received rows."""

    def waiting(send: Callable[[Tensor], Pending]) -> Callable[[Tensor], Waiting]:
        def begin(rows: Tensor) -> Waiting:
            pending = send(rows)
            return lambda: (pending.wait(),)

        return begin

    end = _transfer(waiting(there), waiting(back), rows)
    return lambda: end()[0]


def exchange_rows_async(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> Callable[[], Tensor]:
    """Begin to send rows [n, width], and return the function that returns the received rows [m, width].

    The first send_counts[0] rows go to rank 0, the next send_counts[1] to rank 1, and so on. Counts may be zero.
    Received rows are sorted by the rank that sent them. Every rank of the group must call this function and run its
    backward, even without rows.
    """
    if group.size == 1:
        return lambda: rows

    def there(rows: Tensor) -> Pending:
        return collectives.all_to_all_rows_async(rows, send_counts, receive_counts, group)

    def back(rows: Tensor) -> Pending:
        return collectives.all_to_all_rows_async(rows, receive_counts, send_counts, group)

    return _transfer_rows(rows, there, back)


def _add_in_rank_order_async(rows: Tensor, group: Group) -> Pending:
    """Reduce-scatter rows [size * n, width] to [n, width], adding in fp32 or wider as `unpermute` does."""
    equal = [len(rows) // group.size] * group.size
    pending = collectives.all_to_all_rows_async(rows, equal, equal, group)

    def added() -> Tensor:
        received = pending.wait().view(group.size, equal[0], -1)
        total = received[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        for other in received[1:]:
            total += other
        return total.to(rows.dtype)

    return Pending(None, added)


class Dispatched(NamedTuple):
    """The tokens that have reached this rank.

    Attributes:
        rows: [rows, hidden], one row per token and expert of this rank, sorted by expert.
        weights: [rows], the weight of the expert for the token; 0 for a row of padding.
        groups: the rows of each expert.
        combine: returns each token's sum over its experts, on the token's own rank: [rows, hidden] to [tokens, hidden].
    """

    rows: Tensor
    weights: Tensor
    groups: Groups
    combine: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Dispatcher:
    """Rule by which tokens reach the experts of a layer.

    Attributes:
        group: the ranks of ("ep", "etp"), in the order of the mesh.
        experts: number of experts of the layer.
        parts: number of ranks that share an expert (etp).
        kind: "alltoall" sends a token to the ranks that need it, "allgather" to all of them. "flex" does what
            "alltoall" does by DeepEP (`deep_ep.why_unavailable` must have returned None).
    """

    group: Group
    experts: int
    parts: int = 1
    kind: Literal["allgather", "alltoall", "flex"] = "alltoall"

    @property
    def local_experts(self) -> int:
        """Number of experts of each rank."""
        return self.experts * self.parts // self.group.size

    def collectives(self, padded: bool) -> list[tuple[str, bool]]:
        """List the collectives of `dispatch` and `combine` in order, each with whether it has a gradient.

        Args:
            padded: True if `dispatch` gets a capacity.
        """
        if self.group.size == 1:
            return []
        back = ("sums of experts", True)
        if self.kind == "allgather":
            return [("choices of tokens", False), ("tokens", True), ("weights of experts", True), back]
        if self.kind == "flex":
            return [("tokens and weights", True), back]
        counts = [] if padded else [("counts of tokens", False)]
        return [*counts, ("choices and weights", True), ("tokens", True), back]

    def dispatch(
        self, tokens: Tensor, experts: Tensor, weights: Tensor, capacity: int | None = None
    ) -> Callable[[], Dispatched]:
        """Begin to send tokens [tokens, hidden] to their experts, and return the function that waits for their arrival.

        Every rank has the same number of tokens and choices.

        Args:
            experts: [tokens, choices], int64: the number of each chosen expert; -1 for none.
            weights: [tokens, choices], in fp32 or wider.
            capacity: most tokens of this rank that choose the same expert. The rows of each expert are padded to this
                many per rank.
        """
        if self.group.size == 1:
            return lambda: self._arrange(tokens, experts, weights, lambda rows: rows, capacity)
        ways = {"allgather": self._gather, "alltoall": self._exchange, "flex": self._exchange_by_deep_ep}
        return ways[self.kind](tokens, experts, weights, capacity)

    def _gather(
        self, tokens: Tensor, experts: Tensor, weights: Tensor, capacity: int | None
    ) -> Callable[[], Dispatched]:
        def gather(rows: Tensor) -> Pending:
            return collectives.all_gather_async(rows, self.group)

        def add(rows: Tensor) -> Pending:
            return _add_in_rank_order_async(rows, self.group)

        numbers = collectives.all_gather(experts, self.group)
        arriving, of_choices = _transfer_rows(tokens, gather, add), _transfer_rows(weights, gather, add)

        def back(rows: Tensor) -> Tensor:
            return _transfer_rows(rows, add, gather)()

        return lambda: self._arrange(arriving(), numbers, of_choices(), back, capacity)

    def _exchange(
        self, tokens: Tensor, experts: Tensor, weights: Tensor, capacity: int | None
    ) -> Callable[[], Dispatched]:
        ranks, size, local = self._ranks_of(experts), self.group.size, self.local_experts
        if capacity is None:
            counts = torch.cat([occurrences(ranks.flatten(), size)[:, None], self._pairs_by_rank(experts)], dim=1)
            equal = [1] * size
            arriving = collectives.all_to_all_rows(counts, equal, equal, self.group)
            # The host waits for the device here, and only here.
            sent, received, *pairs = torch.stack([counts[:, 0], *arriving.t()]).tolist()
            by_expert = [sum(each) for each in pairs]
            sending = group_rows(ranks, size, rows=sum(sent))
        else:
            most = min(len(tokens), local * capacity)
            sent = received = [most] * size
            sending = group_rows(ranks, size, capacity=most)
            by_expert = None
        # Small whole numbers are exact in fp32, so a token's choices and their weights travel as one row.
        with_numbers = torch.cat([(experts + 1).to(weights.dtype), weights], dim=1)
        arriving_choices = exchange_rows_async(permute(with_numbers, sending), sent, received, self.group)
        arriving_tokens = exchange_rows_async(permute(tokens, sending), sent, received, self.group)

        def back(rows: Tensor) -> Tensor:
            return unpermute(exchange_rows_async(rows, received, sent, self.group)(), sending)

        def arrived() -> Dispatched:
            numbers, of_choices = arriving_choices().tensor_split(2, dim=1)
            return self._arrange(arriving_tokens(), numbers.detach().long() - 1, of_choices, back, capacity, by_expert)

        return arrived

    def _exchange_by_deep_ep(
        self, tokens: Tensor, experts: Tensor, weights: Tensor, capacity: int | None
    ) -> Callable[[], Dispatched]:
        local, first = self.local_experts, self.group.rank // self.parts * self.local_experts
        # DeepEP knows experts of ranks, but no parts of experts: for it, each part is an expert of its rank.
        ranks = (experts // local * self.parts)[..., None] + torch.arange(self.parts, device=experts.device)
        of_parts = torch.where(experts[..., None] < 0, -1, ranks * local + experts[..., None] % local).flatten(1)
        exchange = DeepEPExchange(of_parts, local * self.group.size, self.group)
        weights = weights.float().repeat_interleave(self.parts, dim=1)
        arriving = _transfer(exchange.send, exchange.send_gradients, tokens, weights)

        def back(rows: Tensor) -> Tensor:
            return _transfer(exchange.add_up, exchange.add_up_gradients, rows)()[0]

        def arrived() -> Dispatched:
            rows, of_choices = arriving()
            numbers = torch.where(exchange.numbers < 0, -1, exchange.numbers + first)
            return self._arrange(rows, numbers, of_choices, back, capacity, exchange.counts)

        return arrived

    def _arrange(
        self,
        rows: Tensor,
        experts: Tensor,
        weights: Tensor,
        back: Callable[[Tensor], Tensor],
        capacity: int | None,
        by_expert: list[int] | None = None,
    ) -> Dispatched:
        """Sort the received rows by expert, once per expert of this rank."""
        count = self.local_experts
        own = experts - self.group.rank // self.parts * count
        own = torch.where((own < 0) | (own >= count) | (experts < 0), -1, own)
        if capacity is not None:
            most = capacity * self.group.size
            permutation = group_rows(own, count, capacity=most)
            offsets = tuple(range(0, (count + 1) * most, most))
        else:
            by_expert = occurrences(own.flatten(), count).tolist() if by_expert is None else by_expert
            offsets = (0, *accumulate(by_expert))
            permutation = group_rows(own, count, rows=offsets[-1])
        of_rows = permute(weights.reshape(-1, 1), permutation.of_choices).squeeze(1)

        def combine(outputs: Tensor) -> Tensor:
            return back(unpermute(outputs, permutation))

        return Dispatched(permute(rows, permutation), of_rows, Groups(offsets, permutation.ends), combine)

    def _ranks_of(self, experts: Tensor) -> Tensor:
        """Return the ranks that each token is sent to, ascending and each once: [tokens, choices * parts]; -1: none."""
        owners = torch.where(experts < 0, -1, experts // self.local_experts).sort(dim=1).values
        again = torch.zeros_like(owners, dtype=torch.bool)
        again[:, 1:] = owners[:, 1:] == owners[:, :-1]
        owners = torch.where(again, -1, owners)[:, :, None]
        parts = torch.arange(self.parts, device=owners.device)
        return torch.where(owners < 0, -1, owners * self.parts + parts).flatten(1)

    def _pairs_by_rank(self, experts: Tensor) -> Tensor:
        """Return the number of this rank's tokens that choose each expert of each rank: [ranks, local experts]."""
        counts = occurrences(experts.flatten(), self.experts).view(-1, self.local_experts)
        return counts.repeat_interleave(self.parts, dim=0)
