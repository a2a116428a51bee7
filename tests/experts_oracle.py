"""The oracle of layers with experts: every expert is applied to every token, and nothing is permuted or sent.

It imports nothing of megalite, and takes weights by global logical name:

    layers.{i}.moe.router [experts, hidden]             ...router_bias [experts]
    layers.{i}.moe.gate_up [experts, 2, ffn, hidden] (gated) or moe.up [experts, ffn, hidden]    ...gate_up_bias|up_bias
    layers.{i}.moe.down [experts, hidden, ffn]                                                   ...down_bias
    layers.{i}.moe.latent_down [latent, hidden], moe.latent_up [hidden, latent]: if there, experts have this width
    layers.{i}.moe.shared.gate_up|up|down, as of a dense feed-forward layer       layers.{i}.moe.shared_gate [1, hidden]

Choices are made token by token in Python: sorted by descending score, then by ascending number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_GAP = 1e-9
"""The choices of all layouts agree if the scores on both sides of each decision differ by more than rounding."""
SEPARATE_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.log1p(logits.exp()).sqrt(),
}
"""Scores that do not depend on the logits of the other experts."""


@dataclass
class Record:
    """Decisions of a router on a batch, each [batch, sequence, experts]; `logits` have no masks."""

    logits: Tensor
    shares: Tensor  # of the scores
    by_score: Tensor  # 1 for the best experts by score alone
    routed: Tensor  # 1 for the chosen experts
    kept: Tensor  # 1 for the chosen experts within capacity
    real: Tensor  # [batch, sequence]: 1 for tokens that are not padding


@dataclass(frozen=True)
class Inputs:
    """Inputs of a router besides the hidden states."""

    bias: Tensor | None = None  # [experts]
    padding: Tensor | None = None  # [batch, sequence], true for tokens that fill up a sample
    replayed: Tensor | None = None  # [batch, sequence, topk], -1 for the router's choice
    offset: Tensor | None = None  # [experts], of quantile balancing


@dataclass(frozen=True)
class Experts:
    """Options of the layers with experts; names and meaning are Megatron-LM's."""

    topk: int
    score: str = "softmax"  # of the chosen; "pre_softmax": of all; "sigmoid"; or "sqrtsoftplus"
    scaling: float = 1.0
    groups: tuple[int, int, int] | None = None  # their number, how many are chosen, how many scores make a group's
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    losses: Mapping[str, float] = field(default_factory=dict)  # coefficients by kind
    z_loss: float = 0.0
    bias_rate: float = 0.0
    quantile_ema: float | None = None  # share of the old offset; None: no quantile balancing
    evened_samples: int | None = None  # of a micro-batch, among whose tokens Sinkhorn's iteration evens choices out

    def layer(
        self,
        weights: Mapping[str, Tensor],
        name: str,
        hidden: Tensor,
        activate: Callable[[Tensor], Tensor],
        inputs: Inputs,
        records: dict[str, Record],
    ) -> Tensor:
        """Apply the routed experts to [batch, sequence, hidden], and note under the layer's name what the router did.

        `activate`: maps [..., 2, ffn] (gated) or [..., ffn] to [..., ffn].
        """
        logits = F.linear(hidden, weights[name + "router"], weights.get(name + "router_bias"))
        batch, sequence, experts = logits.shape
        bias, replayed = inputs.bias, inputs.replayed
        real = torch.ones(batch, sequence, dtype=torch.bool) if inputs.padding is None else ~inputs.padding
        scores, shares = logits.softmax(-1), logits.softmax(-1)
        if self.score == "softmax":
            scores = logits
        elif self.score in SEPARATE_SCORES:
            scores = SEPARATE_SCORES[self.score](logits)
            shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        choices = logits if inputs.offset is None else logits - inputs.offset.to(logits.dtype)
        choices = scores if self.quantile_ema is None else choices
        if self.evened_samples is not None:
            choices = logits.detach().clone()
            for micro_batch in torch.arange(batch).split(self.evened_samples):
                counted = [(b, s) for b in micro_batch.tolist() for s in range(sequence) if real[b, s]]
                for (b, s), evened in zip(counted, even_choices([logits[at].tolist() for at in counted]), strict=True):
                    choices[b, s] = torch.tensor(evened)
        by_score, routed = torch.zeros_like(logits), torch.zeros_like(logits)
        weight = torch.zeros_like(logits)
        for b in range(batch):
            for s in range(sequence):
                by_score[b, s, best(choices[b, s].tolist(), self.topk)] = 1.0
                biased = choices[b, s] if bias is None else choices[b, s] + bias.to(scores.dtype)
                chosen = self.choose(biased.tolist())
                if replayed is not None and replayed[b, s].min() >= 0:
                    chosen = replayed[b, s].tolist()
                routed[b, s, chosen] = 1.0
                of_chosen = logits[b, s, chosen]
                if self.score == "softmax":
                    of_chosen = of_chosen.softmax(-1)
                elif self.score == "pre_softmax":
                    of_chosen = scores[b, s, chosen]
                else:
                    of_chosen = SEPARATE_SCORES[self.score](of_chosen)
                    if self.topk > 1:
                        of_chosen = of_chosen / (of_chosen.sum() + 1e-20)
                weight[b, s] = weight[b, s].index_add(0, torch.tensor(chosen), of_chosen * self.scaling)
        by_score, routed = by_score * real[..., None], routed * real[..., None]
        kept = routed.clone()
        if self.capacity_factor is not None:
            capacity = math.ceil(sequence * self.topk / experts * self.capacity_factor)
            for b in range(batch):
                for e in range(experts):
                    takers = [s for s in range(sequence) if routed[b, s, e]]
                    if self.drop_policy == "probs":
                        takers.sort(key=lambda s: (-weight[b, s, e].item(), s))
                    kept[b, takers[capacity:], e] = 0.0
        records[name] = Record(logits, shares * real[..., None], by_score, routed, kept, real.to(logits.dtype))
        latent = name + "latent_down" in weights
        if latent:
            hidden = F.linear(hidden, weights[name + "latent_down"], weights.get(name + "latent_down_bias"))
        output = torch.zeros_like(hidden)
        gated = name + "gate_up" in weights
        up_name = name + ("gate_up" if gated else "up")
        for e in range(experts):
            up = weights[up_name][e]
            inner = F.linear(hidden, up.flatten(0, -2)).unflatten(-1, up.shape[:-1])
            if up_name + "_bias" in weights:
                inner = inner + weights[up_name + "_bias"][e]
            share = (weight * kept)[..., e : e + 1]
            output = output + F.linear(share * activate(inner), weights[name + "down"][e])
            if name + "down_bias" in weights:
                output = output + share * weights[name + "down_bias"][e]
        if latent:
            output = F.linear(output, weights[name + "latent_up"], weights.get(name + "latent_up_bias"))
        return output

    def choose(self, scores: Sequence[float]) -> list[int]:
        """Return the numbers of the chosen experts."""
        if self.groups is None:
            return best(scores, self.topk)
        count, chosen, summed = self.groups
        size = len(scores) // count
        groups = [scores[g * size : (g + 1) * size] for g in range(count)]
        open_groups = best([sum(sorted(group)[-summed:]) for group in groups], chosen)
        numbers = [e for e in range(len(scores)) if e // size in open_groups]
        return [numbers[place] for place in best([scores[e] for e in numbers], self.topk)]

    def loss(self, records: Iterable[Record], micro_batch_size: int, loads: Sequence[Tensor] | None) -> Tensor:
        """Return the weighted balancing and z-losses of a batch, summed over layers.

        `loads`: the share of each expert in the previous step's choices by score alone, for each record.
        """
        total = torch.zeros((), dtype=torch.float64)
        for number, record in enumerate(records):
            experts = record.logits.shape[-1]
            for kind, coefficient in self.losses.items():
                if kind == "global_aux_loss":
                    assert loads is not None
                    shares = record.shares.sum((0, 1)) / record.real.sum()
                    total = total + coefficient * experts * (loads[number] * shares).sum()
                    continue
                size = 1 if kind == "seq_aux_loss" else micro_batch_size
                of_groups = []
                for start in range(0, len(record.logits), size):
                    tokens = record.real[start : start + size].sum()
                    if not tokens:
                        continue
                    fractions = record.by_score[start : start + size].sum((0, 1)) / (self.topk * tokens)
                    shares = record.shares[start : start + size].sum((0, 1)) / tokens
                    of_groups.append(experts * (fractions * shares).sum())
                total = total + coefficient * torch.stack(of_groups).mean()
            if self.z_loss:
                squares = record.logits.logsumexp(-1).square() * record.real
                total = total + self.z_loss * squares.sum() / record.real.sum()
        return total

    def next_bias(self, bias: Tensor, record: Record) -> Tensor:
        """Return the bias after a step, in its dtype: higher for experts with fewer tokens than the mean."""
        counts = record.kept.sum((0, 1))
        return bias + self.bias_rate * (counts.mean() - counts).sign().to(bias.dtype)

    def next_offset(self, offset: Tensor, record: Record) -> Tensor:
        """Return the offset of quantile balancing after a step, in its dtype.

        Numbers of samples are rounded to multiples of 2^-32, as megalite does, so that their sum has one value.
        """
        assert self.quantile_ema is not None
        experts, of_samples = len(offset), []
        for logits, real in zip(record.logits.detach().tolist(), record.real.tolist(), strict=True):
            tokens = [row for row, counts in zip(logits, real, strict=True) if counts]
            if not tokens:
                continue
            less = [[z - off for z, off in zip(row, offset.tolist(), strict=True)] for row in tokens]
            bars = [sorted(row)[-1 - self.topk] for row in less]
            share = len(tokens) * self.topk // experts
            excess = [[row[e] - bar for row, bar in zip(tokens, bars, strict=True)] for e in range(experts)]
            of_samples.append([round(sorted(of_expert)[-1 - share] * 2**32) / 2**32 for of_expert in excess])
        if not of_samples:
            return offset
        sums = [math.fsum(column) for column in zip(*of_samples, strict=True)]
        means = torch.tensor(sums, dtype=torch.float64) / len(of_samples)
        moved = self.quantile_ema * offset.double() + (1 - self.quantile_ema) * means
        return (moved - moved.mean()).to(offset.dtype)


def even_choices(logits: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return scores [tokens, experts] by which tokens choose, in Megatron-LM's words: the logarithms of d1 * cost.

    A single token, for which these would all be equal, chooses by its logits.
    """
    cost = [[math.exp(z) for z in token] for token in logits]
    rows, columns = len(cost), len(cost[0]) if cost else 0
    d1, error = [1.0] * columns, 1.0
    while rows > 1 and error > 1e-4:
        d0 = [1 / rows / (math.fsum(c * d for c, d in zip(row, d1, strict=True)) + 1e-8) for row in cost]
        new = [
            1 / columns / (math.fsum(c * d for c, d in zip(column, d0, strict=True)) + 1e-8)
            for column in zip(*cost, strict=True)
        ]
        error = math.fsum(abs(a - b) for a, b in zip(new, d1, strict=True)) / columns
        d1 = new
    return [[math.log(c * d) for c, d in zip(row, d1, strict=True)] for row in cost]


def best(scores: Sequence[float], count: int) -> list[int]:
    """Return the places of the largest scores, largest first; of equal ones the first. Near ties are an error."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    if count < len(scores):
        gap = scores[order[count - 1]] - scores[order[count]]
        assert gap == 0 or gap > SMALLEST_GAP, "choose another seed: rounding could decide this choice"
    return order[:count]
