"""Dispatch of tokens to the ranks of their experts, and the way back.

The ranks of ("ep", "etp") share one replica of a layer's experts. A token is sent once to each rank that has one of its
experts, with the numbers and the weights of its experts. There, a row is made for each of the token's experts on that
rank; rows are sorted by expert, sending rank and position. On the way back, each rank adds the rows of its experts for
a token, and the token's own rank adds the ranks' sums in rank order. So the result has the same bits whether a token is
sent only to the ranks that need it (all-to-all) or to all of them (all-gather).

The host must know the number of rows, for which it waits once per layer and forward pass. With a capacity, it knows
them beforehand and never waits. Backward and the way back reuse the numbers. On the meta device, where choices have no
values, every expert is taken to be chosen equally often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.deep_ep import DeepEPExchange
from megalite.parallel.grouped import ExpertRows
from megalite.parallel.mesh import Group
from megalite.parallel.transfer import exchange_rows_async, transfer, transfer_rows
from megalite_kernels.permutation import Permutation, group_rows, occurrences, permute, unpermute


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
    groups: ExpertRows
    combine: Callable[[Tensor], Tensor]


class PaddedRows(NamedTuple):
    """Numbers of rows that the host knows without asking the device, because experts have a capacity.

    Attributes:
        sent: most tokens of one rank that choose the same expert.
        received: rows of each expert, of all ranks together. Those that no token fills are padding.
    """

    sent: int
    received: int


@dataclass(frozen=True)
class Dispatcher:
    """Rule by which tokens reach the experts of a layer.

    Attributes:
        group: the ranks of ("ep", "etp"), in the order of the mesh.
        num_experts: number of experts of the layer.
        parts: number of ranks that share an expert (etp).
        kind: "alltoall" sends a token to the ranks that need it, "allgather" to all of them. "flex" does what
            "alltoall" does by DeepEP (`deep_ep.why_unavailable` must have returned None).
    """

    group: Group
    num_experts: int
    parts: int = 1
    kind: Literal["allgather", "alltoall", "flex"] = "alltoall"

    @property
    def local_experts(self) -> int:
        return self.num_experts * self.parts // self.group.size

    def collectives(self, padded: bool) -> list[tuple[str, bool]]:
        """List the collectives of `dispatch` and `combine` in order, each with whether it has a gradient.

        Args:
            padded: True if `dispatch` pads the rows of experts.
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
        self, tokens: Tensor, choices: Tensor, weights: Tensor, padded: PaddedRows | None = None
    ) -> Callable[[], Dispatched]:
        """Begin to send tokens [tokens, hidden] to their experts, and return the function that waits for their arrival.

        Every rank has the same number of tokens and choices.

        Args:
            choices: [tokens, topk], int64: the number of each chosen expert; -1 for none.
            weights: [tokens, topk], in fp32 or wider.
            padded: pad the rows of each expert. All ranks of the group give the same numbers.
        """
        if self.group.size == 1:
            by_expert = self._sort(choices, padded)
            return lambda: self._arrange(tokens, weights, lambda rows: rows, *by_expert)
        ways = {"allgather": self._gather, "alltoall": self._exchange, "flex": self._exchange_by_deep_ep}
        return ways[self.kind](tokens, choices, weights, padded)

    def _gather(
        self, tokens: Tensor, choices: Tensor, weights: Tensor, padded: PaddedRows | None
    ) -> Callable[[], Dispatched]:
        """Send all tokens to all ranks; each keeps the rows of its experts. See `dispatch`."""

        def gather(rows: Tensor) -> Pending:
            return collectives.all_gather_async(rows, self.group)

        def add(rows: Tensor) -> Pending:
            return _add_in_rank_order_async(rows, self.group)

        local_choices = self._local_choices(collectives.all_gather(choices, self.group))
        arriving, of_choices = (
            transfer_rows(each, gather, add, "waited for tokens of experts") for each in (tokens, weights)
        )
        by_expert = self._sort(local_choices, padded)

        def back(rows: Tensor) -> Tensor:
            return transfer_rows(rows, add, gather, "waited for sums of experts")()

        return lambda: self._arrange(arriving(), of_choices(), back, *by_expert)

    def _exchange(
        self, tokens: Tensor, choices: Tensor, weights: Tensor, padded: PaddedRows | None
    ) -> Callable[[], Dispatched]:
        """Send each token once to each rank that has a chosen expert of it. See `dispatch`."""
        ranks, size, local = self._ranks_of(choices), self.group.size, self.local_experts
        if padded is None:
            counts = torch.cat([occurrences(ranks.flatten(), size)[:, None], self._pairs_by_rank(choices)], dim=1)
            equal = [1] * size
            arriving = collectives.all_to_all_rows(counts, equal, equal, self.group)
            # The host waits for the device here, and only here.
            sent, received, *pairs = torch.stack([counts[:, 0], *arriving.t()]).tolist()
            by_expert = [sum(each) for each in pairs]
            if choices.is_meta:
                sent = received = [self._tokens_per_rank(*choices.shape)] * size
                by_expert = self._balanced(choices.numel() * size)
            sending = group_rows(ranks, size, rows=sum(sent))
        else:
            most = min(len(tokens), local * padded.sent)
            sent = received = [most] * size
            sending = group_rows(ranks, size, capacity=most)
            by_expert = None
        # Small whole numbers are exact in fp32, so a token's choices and their weights travel as one row.
        with_numbers = torch.cat([(choices + 1).to(weights.dtype), weights], dim=1)
        arriving_choices = exchange_rows_async(permute(with_numbers, sending), sent, received, self.group, "choices")
        arriving_tokens = exchange_rows_async(permute(tokens, sending), sent, received, self.group, "tokens")

        def back(rows: Tensor) -> Tensor:
            return unpermute(exchange_rows_async(rows, received, sent, self.group, "sums")(), sending)

        def arrived() -> Dispatched:
            numbers, of_choices = arriving_choices().tensor_split(2, dim=1)
            local_choices = self._local_choices(numbers.detach().long() - 1)
            return self._arrange(arriving_tokens(), of_choices, back, *self._sort(local_choices, padded, by_expert))

        return arrived

    def _exchange_by_deep_ep(
        self, tokens: Tensor, choices: Tensor, weights: Tensor, padded: PaddedRows | None
    ) -> Callable[[], Dispatched]:
        """Do what `_exchange` does by DeepEP's kernels. See `dispatch`."""
        local = self.local_experts
        # DeepEP knows experts of ranks, but no parts of experts: for it, each part is an expert of its rank.
        ranks = (choices // local * self.parts)[..., None] + torch.arange(self.parts, device=choices.device)
        of_parts = torch.where(choices[..., None] < 0, -1, ranks * local + choices[..., None] % local).flatten(1)
        exchange = DeepEPExchange(of_parts, local * self.group.size, self.group)
        weights = weights.float().repeat_interleave(self.parts, dim=1)
        arriving = transfer(exchange.send, exchange.send_gradients, tokens, weights)

        def back(rows: Tensor) -> Tensor:
            return transfer(exchange.add_up, exchange.add_up_gradients, rows)()[0]

        def arrived() -> Dispatched:
            rows, of_choices = arriving()
            return self._arrange(rows, of_choices, back, *self._sort(exchange.numbers, padded, exchange.counts))

        return arrived

    def _arrange(
        self,
        rows: Tensor,
        weights: Tensor,
        back: Callable[[Tensor], Tensor],
        permutation: Permutation,
        offsets: tuple[int, ...],
    ) -> Dispatched:
        """Bring the received rows into the order of `_sort`, once per expert of this rank."""
        of_rows = permute(weights.reshape(-1, 1), permutation.of_choices).squeeze(1)

        def combine(outputs: Tensor) -> Tensor:
            return back(unpermute(outputs, permutation))

        return Dispatched(permute(rows, permutation), of_rows, ExpertRows(offsets, permutation.ends), combine)

    def _local_choices(self, choices: Tensor) -> Tensor:
        """Return choices with this rank's experts counted from its first; -1 for experts of other ranks."""
        if self.group.size > 1 and not self.group.is_connected:  # what arrives is this rank's own, for all experts
            return torch.where(choices < 0, -1, choices % self.local_experts)
        local = choices - self.group.rank // self.parts * self.local_experts
        return torch.where((local < 0) | (local >= self.local_experts) | (choices < 0), -1, local)

    def _sort(
        self, local_choices: Tensor, padded: PaddedRows | None, by_expert: list[int] | None = None
    ) -> tuple[Permutation, tuple[int, ...]]:
        """Sort choices by this rank's experts, and return the offsets of the experts' rows.

        Args:
            local_choices: see `_local_choices`.
            by_expert: number of rows of each expert. If it is not known, and rows are not padded, the host waits for
                the device.
        """
        count = self.local_experts
        if padded is not None:
            offsets = tuple(padded.received * number for number in range(count + 1))
            return group_rows(local_choices, count, capacity=padded.received), offsets
        if by_expert is not None:
            offsets = (0, *accumulate(by_expert))
            return group_rows(local_choices, count, rows=offsets[-1]), offsets
        permutation = group_rows(local_choices, count, rows=local_choices.numel())
        offsets = (0, *permutation.ends.tolist())
        if local_choices.is_meta:
            offsets = (0, *accumulate(self._balanced(local_choices.numel())))
        return permutation.first(offsets[-1]), offsets

    def _balanced(self, choices: int) -> list[int]:
        """Return the number of rows of each expert of this rank, if all experts have the same part of the choices.

        All experts together have no more rows than there are choices.
        """
        ends = [choices * number // self.num_experts for number in range(self.local_experts + 1)]
        return [end - begin for begin, end in pairwise(ends)]

    def _tokens_per_rank(self, tokens: int, topk: int) -> int:
        """Return the expected number of tokens that choose an expert of one rank, if each chooses `topk` at random."""
        others = self.num_experts - self.local_experts
        return round(tokens * (1 - math.comb(others, topk) / math.comb(self.num_experts, topk)))

    def _ranks_of(self, choices: Tensor) -> Tensor:
        """Return the ranks that each token is sent to, ascending and each once: [tokens, choices * parts]; -1: none."""
        owners = torch.where(choices < 0, -1, choices // self.local_experts).sort(dim=1).values
        again = torch.zeros_like(owners, dtype=torch.bool)
        again[:, 1:] = owners[:, 1:] == owners[:, :-1]
        owners = torch.where(again, -1, owners)[:, :, None]
        parts = torch.arange(self.parts, device=owners.device)
        return torch.where(owners < 0, -1, owners * self.parts + parts).flatten(1)

    def _pairs_by_rank(self, choices: Tensor) -> Tensor:
        """Return the number of this rank's tokens that choose each expert of each rank: [ranks, local experts]."""
        counts = occurrences(choices.flatten(), self.num_experts).view(-1, self.local_experts)
        return counts.repeat_interleave(self.parts, dim=0)
