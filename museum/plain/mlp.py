"""Gated MLPs: one for all tokens, or experts that a router chooses, and that are divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from museum.plain.ranks import Group, Ranks, all_sum, both
from museum.plain.tensor_parallel import (
    ColumnLinear,
    Linear,
    Part,
    RowLinear,
    block,
    enter_tensor_parallel,
    gather_sequence,
    leave_tensor_parallel,
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        settings = ranks.settings
        own, shape = block(settings.ffn, ranks.tp), (settings.ffn, settings.hidden)
        self.gate_proj = ColumnLinear(Part(shape, (0, *own)), ranks)
        self.up_proj = ColumnLinear(Part(shape, (0, *own)), ranks)
        self.down_proj = RowLinear(Part(shape[::-1], (1, *own)), ranks)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


class Expert(nn.Module):
    """Gated MLP of some tokens [t, h]; the sum over tensor-parallel ranks comes after the experts."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        settings = ranks.settings
        own, shape = block(settings.ffn, ranks.tp), (settings.ffn, settings.hidden)
        self.w1 = Linear(Part(shape, (0, *own), is_expert=True), ranks)
        self.w3 = Linear(Part(shape, (0, *own), is_expert=True), ranks)
        self.w2 = Linear(Part(shape[::-1], (1, *own), is_expert=True), ranks)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(hidden), self.w3(hidden)))


class Experts(nn.Module):
    """Router, and the experts of this rank under their numbers in the whole model."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, settings = ranks, ranks.settings
        start, count = block(settings.experts, ranks.ep)
        self.gate = Linear(Part((settings.experts, settings.hidden)), ranks)
        self.experts = nn.ModuleDict({str(number): Expert(ranks) for number in range(start, start + count)})
        self.auxiliary: Tensor | None = None
        """Balancing loss of this rank's tokens of the last micro-batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        settings, ranks = self.ranks.settings, self.ranks
        probabilities, chosen, weights = router_probabilities(self.gate(hidden), settings.top_k)
        self.auxiliary = auxiliary_loss(probabilities, chosen, ranks) if settings.auxiliary else None
        entered, weights = enter_experts(hidden, ranks), enter_experts(weights, ranks)
        chosen = gather_sequence(chosen, ranks.tp) if settings.sp else chosen
        tokens, chosen = entered.flatten(0, 1), chosen.flatten(0, 1)
        sent = expert_dispatch(tokens, chosen, ranks)
        results = torch.empty_like(sent.tokens)
        for number, expert in self.experts.items():
            mine = (sent.experts == int(number)).nonzero().flatten()
            results = results.index_copy(0, mine, expert(sent.tokens[mine]))
        combined = expert_combine(results, sent, weights.flatten(0, 1), ranks)
        return leave_tensor_parallel(combined.view_as(entered), ranks)


def enter_experts(hidden: Tensor, ranks: Ranks) -> Tensor:
    """Return the tokens, or the weights of their experts, of all tensor-parallel ranks."""
    return enter_tensor_parallel(hidden, ranks)


def router_probabilities(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities of all experts, and the chosen experts [b, s, top_k] with weights whose sum is 1."""
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    weights, chosen = probabilities.topk(top_k, -1)
    return probabilities, chosen, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)


def auxiliary_loss(probabilities: Tensor, chosen: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's term in the loss of a micro-batch that balances the loads of experts (Switch Transformer)."""
    experts = probabilities.shape[-1]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    counts = all_sum(counts, ranks.cp)
    if ranks.settings.sp:
        counts = all_sum(counts, ranks.tp)
    tokens = counts.sum() / ranks.settings.top_k
    shares = probabilities.sum((0, 1)) / tokens
    return experts * (counts / (tokens * ranks.settings.top_k) * shares).sum()


@dataclass(frozen=True)
class Sent:
    """Tokens that experts of this rank get, and how they came here.

    Attributes:
        tokens: [t, h], and for each, its expert.
        order: order in which this rank sent its pairs of token and choice.
        counts: number of pairs to each rank, and from each.
    """

    tokens: Tensor
    experts: Tensor
    order: Tensor
    counts: tuple[list[int], list[int]]


def expert_dispatch(tokens: Tensor, chosen: Tensor, ranks: Ranks) -> Sent:
    """Send tokens [t, h] to the ranks of their experts [t, top_k]."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    owners = flat // (ranks.settings.experts // ranks.ep.size)
    out = torch.bincount(owners, minlength=ranks.ep.size)
    back = exchange(out, [1] * ranks.ep.size, [1] * ranks.ep.size, ranks.ep)
    counts = out.tolist(), back.tolist()
    experts = exchange(flat[order], *counts, ranks.ep)
    return Sent(all_to_all(tokens[order // chosen.shape[1]], *counts, ranks.ep), experts, order, counts)


def expert_combine(results: Tensor, sent: Sent, weights: Tensor, ranks: Ranks) -> Tensor:
    """Return the weighted sums [t, h] of what the experts of each token gave; weights: [t, top_k]."""
    out, back = sent.counts
    returned = all_to_all(results, back, out, ranks.ep)
    in_order = returned[sent.order.argsort()].unflatten(0, weights.shape)
    return (in_order * weights[..., None]).sum(1)


def exchange(rows: Tensor, out: list[int], back: list[int], group: Group) -> Tensor:
    """Send so many rows to each rank, and receive as many as the ranks send."""
    if group.size == 1:
        return rows
    received = torch.empty(sum(back), *rows.shape[1:], dtype=rows.dtype)
    dist.all_to_all_single(received, rows.detach().contiguous(), back, out, group.handle)
    return received


def all_to_all(rows: Tensor, out: list[int], back: list[int], group: Group) -> Tensor:
    return both(rows, lambda x: exchange(x, out, back, group), lambda x: exchange(x, back, out, group))
