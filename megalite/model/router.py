"""The router of a layer with experts: each token's experts and weights, and the losses that balance the loads.

The balancing loss of a group of tokens is E * sum_i f_i * P_i over the E experts (arXiv:2101.03961, 2412.19437). f_i is
the share of expert i in the tokens' unbiased choices: by score alone, without bias, groups, capacity and recorded
choices. P_i is the mean share of expert i in the tokens' scores. f has no gradient. The group is a micro-batch, a
sequence, or the global batch, for which f is taken from the previous step. Instead of a loss, choices may be evened out
(`sinkhorn.py`, `quantile.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import LoadBalancing, ModelConfig
from megalite.model.batch import LayerContext, MicroBatch, tokens_of
from megalite.model.quantile import excess_over_bars, next_offset, sum_of_quantiles
from megalite.model.sinkhorn import expert_factors
from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums
from megalite.parallel.stage_module import Inside
from megalite.parallel.state import State, Tally
from megalite_kernels.permutation import occurrences
from megalite_kernels.routing import choose_experts, routing_probabilities, routing_weights
from megalite_kernels.routing_rule import RoutingRule

Z_LOSS, ENTROPY = "moe_z_loss", "router_entropy"
"""Names of loss terms; those of the balancing losses are in `BALANCING_LOSSES`."""
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Routing(NamedTuple):
    """Choices of the tokens between layers, in the order of the hidden states.

    Attributes:
        experts: [tokens, topk], int64, best first; -1 if a choice is dropped or the token is padding.
        weights: [tokens, topk], in fp32 or wider.
        counts: int64, the numbers that `Router.tally` counts; None in evaluation.
        terms: sums of the loss terms.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor | None
    terms: TermSums


class Router(nn.Module):
    """Router of one layer.

    Attributes:
        number: number of this router among those of the network.
        expert_bias: [experts], in fp32 or wider: the bias of the choice; None without.
        previous_load: [experts], in fp32 or wider: the share of each expert in the choices of the previous step; None
            without global_aux_loss.
        quantile_offset: [experts], in fp32 or wider: what the choice takes from the logits; None without
            quantile_balancing.
        tally: tokens per expert, then unbiased choices per expert, then dropped choices; then what `sum_of_quantiles`
            returns, if there are offsets.
        load: the tally's sums over the last step that updated the weights; None before the first one.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        name, self.num_experts = f"{config.names[layer][1]}.moe", config.num_experts
        self.number = sum(each.feed_forward == "moe" for each in config.all_layers[:layer])
        self.config, self.rule = config, routing_rule(config)
        self.sinkhorn = config.moe_router_load_balancing_type == ("sinkhorn",)
        self.sample_group = context.mesh.group(*context.sample_axes)
        self.context_parallel = context.mesh.size("cp") > 1
        weight = LogicalTensor(
            f"{name}.router",
            (self.num_experts, config.hidden_size),
            Normal(config.init_method_std),
            True,
            "experts hidden -> 1 experts hidden",
        )
        self.weight = context.parameter(context.replicated(weight))
        self.bias: Tensor | None = None
        if config.moe_router_bias:
            bias = LogicalTensor(f"{name}.router_bias", (self.num_experts,), Normal(config.init_method_std), False)
            self.bias = context.parameter(context.replicated(bias))
        self.balancing = {
            kind: weight
            for kind, weight in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
            if weight
        }

        def state(what: str, begin: float) -> State:
            tensor = LogicalTensor(f"{name}.{what}", (self.num_experts,), Constant(begin), False)
            dtype = torch.promote_types(context.dtype, torch.float32)
            return State(context.replicated(tensor), dtype, context.mesh.device)

        self.expert_bias = state("expert_bias", 0.0) if config.moe_router_enable_expert_bias else None
        self.previous_load: State | None = None
        if "global_aux_loss" in self.balancing:
            self.previous_load = state("previous_load", 1 / self.num_experts)
        self.quantile_offset = state("quantile_offset", 0.0) if config.balances_by_quantiles else None
        token_group = context.mesh.group(*context.token_axes)
        counters = 2 * self.num_experts + 1 + (self.num_experts + 1) * config.balances_by_quantiles
        self.tally = Tally(counters, token_group, context.mesh.device, self._on_step)
        self.load: Tensor | None = None

    @property
    def collectives(self) -> list[Inside]:
        """The collectives of forward with other ranks of the same samples than the tensor-parallel ones."""
        needed = {
            "shares of experts": self.sinkhorn,
            "logits above bars": self.quantile_offset is not None,
            "choices and weights": self.config.moe_expert_capacity_factor is not None,
            "counts of choices": bool({"aux_loss", "seq_aux_loss"} & self.balancing.keys()),
        }
        return [Inside(name, "cp x tp", backward=0) for name, runs in needed.items() if runs and self.context_parallel]

    @staticmethod
    def loss_terms(config: ModelConfig) -> tuple[LossTerm, ...]:
        """Declare the terms that routers return, except for the axes of their sums."""
        losses = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
        terms = [
            LossTerm(BALANCING_LOSSES[kind].name, BALANCING_LOSSES[kind].count, weight)
            for kind, weight in losses
            if weight
        ]
        if config.moe_z_loss_coeff:
            terms.append(LossTerm(Z_LOSS, tokens_of, config.moe_z_loss_coeff))
        layers = sum(layer.feed_forward == "moe" for layer in config.passed_layers)
        return (*terms, LossTerm(ENTROPY, lambda micro_batch: tokens_of(micro_batch) * layers, 0.0))

    def forward(self, hidden: Tensor, context: LayerContext) -> Routing:
        """Route the tokens of hidden states [sequence (/ size under sequence parallelism), batch, hidden]."""
        logits = self._logits(hidden)
        chosen, unbiased_choice = self._choose(logits, context)
        weights = routing_weights(logits.flatten(0, 1), chosen.flatten(0, 1), self.rule)
        weights = weights.to(torch.promote_types(hidden.dtype, torch.float32))
        if context.padding is not None:
            padding = context.padding[:, :, None]
            same = unbiased_choice is chosen
            chosen = chosen.masked_fill(padding, -1)
            unbiased_choice = chosen if same else unbiased_choice.masked_fill(padding, -1)
        if context.choices is not None:
            context.choices[self.number] = chosen.int()
        if not self.training:
            return Routing(chosen.flatten(0, 1), weights, None, NO_SUMS)
        kept = self._keep(chosen, weights.detach(), context.layout)
        of_sequences = None
        if {"aux_loss", "seq_aux_loss"} & self.balancing.keys():
            of_sequences = occurrences(unbiased_choice.transpose(0, 1).flatten(1), self.num_experts)
        counts = self._count(kept, unbiased_choice, chosen, of_sequences)
        if self.quantile_offset is not None:
            counts = torch.cat([counts, self._quantiles(logits.detach(), self.quantile_offset.values, context.padding)])
        return Routing(kept.flatten(0, 1), weights, counts, self._terms(logits, of_sequences, context.padding))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, in fp32 or wider: [sequence, batch, hidden] to [sequence, batch, experts]."""
        dtype = hidden.dtype if self.config.moe_router_dtype is None else _DTYPES[self.config.moe_router_dtype]
        dtype = torch.promote_types(dtype, hidden.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(hidden.to(dtype), self.weight.to(dtype), bias)
        return logits.to(torch.promote_types(dtype, torch.float32))

    def _choose(self, logits: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the choice of each token, of padding too, and in training the unbiased one: [sequence, batch, topk].

        They are one tensor where nothing makes them differ.

        `logits`: [sequence, batch, experts].
        """
        shape = (*logits.shape[:2], self.rule.topk)
        logits = (self._balanced(logits, context) if self.sinkhorn and self.training else logits).flatten(0, 1)
        if self.quantile_offset is not None:
            logits = logits - self.quantile_offset.values.to(logits.dtype)
        bias = None if self.expert_bias is None else self.expert_bias.values.to(logits.dtype)
        chosen = unbiased_choice = choose_experts(logits, bias, self.rule).view(shape)
        if self.training and (bias is not None or self.rule.groups > 1):
            unbiased_choice = choose_experts(logits, None, self.rule.unrestricted).view(shape)
        if context.replayed is not None:
            replayed = context.replayed[:, :, self.number]
            chosen = torch.where(replayed < 0, chosen, replayed)
        return chosen, unbiased_choice

    @torch.no_grad()
    def _balanced(self, logits: Tensor, context: LayerContext) -> Tensor:
        """Return logits by which the tokens of the micro-batch choose evenly: [sequence, batch, experts].

        Each rank has the shares of all these tokens, in the order of the samples, so every layout chooses the same.
        """
        shares = F.softmax(logits, dim=-1)
        if context.padding is not None:
            shares = shares.masked_fill(context.padding[:, :, None], 0.0)
        of_samples, _ = _of_samples(shares, self.sample_group, context.layout)
        return logits + expert_factors(of_samples.flatten(0, 1)).log()

    def _quantiles(self, logits: Tensor, offset: Tensor, padding: Tensor | None) -> Tensor:
        """Return the `sum_of_quantiles` of whole samples, on the first of the ranks sharing them; zeros on others."""
        excess = excess_over_bars(logits, offset.to(logits.dtype), self.rule.topk, padding)
        sums = sum_of_quantiles(collectives.all_gather(excess, self.sample_group), self.rule.topk)
        return sums if self.sample_group.rank == 0 else torch.zeros_like(sums)

    def _keep(self, chosen: Tensor, weights: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the choices within the capacity of the experts; -1 for the others."""
        capacity, policy = self.capacity(layout.length), self.config.moe_token_drop_policy
        if capacity is None:
            return chosen
        return _drop_over_capacity(chosen, weights, capacity, policy, self.sample_group, layout)

    def _count(self, kept: Tensor, unbiased_choice: Tensor, chosen: Tensor, of_sequences: Tensor | None) -> Tensor:
        """Count for the tally. All choices are [sequence, batch, topk], with -1 for padding.

        `of_sequences`: [batch, experts], the unbiased choices of each sequence, if they are counted already.
        """
        if of_sequences is None:
            unbiased = occurrences(unbiased_choice.flatten(), self.num_experts)
        else:
            unbiased = of_sequences.sum(0)
        counts = unbiased if kept is unbiased_choice else occurrences(kept.flatten(), self.num_experts)
        dropped = counts.new_zeros(1) if kept is chosen else ((chosen >= 0).sum() - (kept >= 0).sum())[None]
        return torch.cat([counts, unbiased, dropped])

    def capacity(self, sequence: int) -> int | None:
        """Return how many tokens of a sequence an expert takes in training; None without a limit."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return None
        return min(math.ceil(sequence * self.rule.topk / self.num_experts * factor), sequence)

    def _terms(self, logits: Tensor, of_sequences: Tensor | None, padding: Tensor | None) -> TermSums:
        """Return the sums of the loss terms over this rank's tokens.

        Args:
            logits: [sequence, batch, experts].
            of_sequences: [batch, experts]: the unbiased choices of each sequence, if a loss compares them.
            padding: [sequence, batch]; None without padding.
        """
        shares = routing_probabilities(logits, self.rule.score_function)
        if padding is not None:
            shares = shares * ~padding[:, :, None]
        terms: dict[str, Tensor] = {}
        if of_sequences is not None:
            tokens = of_sequences.new_full((len(of_sequences), 1), len(logits))
            if padding is not None:
                tokens = (~padding).sum(0)[:, None]
            counts = torch.cat([of_sequences, tokens], dim=1)
            counts = collectives.all_reduce_(counts, self.sample_group).to(logits.dtype)
            if "aux_loss" in self.balancing:
                terms[BALANCING_LOSSES["aux_loss"].name] = self._balance(counts.sum(0), shares.sum((0, 1)))
            if "seq_aux_loss" in self.balancing:
                terms[BALANCING_LOSSES["seq_aux_loss"].name] = self._balance(counts, shares.sum(0))
        if self.previous_load is not None:
            load = self.previous_load.values.to(logits.dtype)
            of_batch = self.num_experts * (load * shares.sum((0, 1))).sum()
            terms[BALANCING_LOSSES["global_aux_loss"].name] = of_batch
        if self.config.moe_z_loss_coeff:
            squares = logits.logsumexp(-1).square()
            terms[Z_LOSS] = (squares if padding is None else squares * ~padding).sum()
        return {**terms, ENTROPY: torch.special.entr(shares.detach()).sum()}

    def _balance(self, counts: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the balancing losses of groups of tokens.

        Args:
            counts: [..., experts + 1]: a group's choices per expert, and its number of tokens.
            shares: [..., experts]: the sum of each expert's shares over this rank's tokens of the group.
        """
        tokens = counts[..., -1:].clamp(min=1)
        factors = counts[..., :-1] * (self.num_experts / self.rule.topk) / tokens.square()  # none has a gradient
        return (factors * shares).sum()

    @torch.no_grad()
    def _on_step(self, totals: Tensor) -> None:
        """Update the states by what the tallies of a step add up to. A frozen router keeps what decides its choices."""
        trained = self.weight.requires_grad
        if self.quantile_offset is not None:
            totals, sums = totals.split([2 * self.num_experts + 1, self.num_experts + 1])
        if self.quantile_offset is not None and trained:
            offset = self.quantile_offset.values
            offset.copy_(next_offset(offset, sums, self.config.moe_router_quantile_balancing_ema))
        self.load = totals
        counts, unbiased, _ = totals.split([self.num_experts, self.num_experts, 1])
        if self.expert_bias is not None and trained:
            # Compared in whole numbers: the sign is exact for any number of tokens.
            missing = (counts.sum() - self.num_experts * counts).sign()
            bias = self.expert_bias.values
            bias += self.config.moe_router_bias_update_rate * missing.to(bias.dtype)
        if self.previous_load is not None:
            # There are no tallies where indexers alone are trained: experts have no backward then.
            load, chosen = self.previous_load.values, unbiased.sum()
            load.copy_(torch.where(chosen > 0, unbiased.double() / chosen.clamp(min=1), load))


def routing_rule(config: ModelConfig) -> RoutingRule:
    return RoutingRule(
        topk=config.moe_router_topk,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.topk_scaling_factor,
        groups=config.moe_router_num_groups or 1,
        group_topk=config.moe_router_group_topk or 1,
        group_scores=config.routing_group_scores or 1,
    )


def _drop_over_capacity(
    experts: Tensor, weights: Tensor, capacity: int, policy: str, group: Group, layout: SequenceLayout
) -> Tensor:
    """Set the choices of each sequence beyond the capacity of an expert to -1.

    Args:
        experts: [sequence, batch, topk]: this rank's part of the sequences.
        weights: [tokens, topk].
        group: the ranks that share the sequences.
    """
    # Small whole numbers are exact in fp32, so choices and weights are gathered together.
    both = torch.cat([experts.to(weights.dtype), weights.view_as(experts)], dim=-1)
    both, own = _of_samples(both, group, layout)
    sequence, batch, _ = both.shape
    numbers, weights = (part.transpose(0, 1).reshape(batch, -1) for part in both.tensor_split(2, dim=-1))
    order = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    if policy == "probs":
        order = weights.sort(dim=1, descending=True, stable=True).indices
    sorted_numbers, by_expert = numbers.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, by_expert)
    ranks = torch.arange(numbers.shape[1], device=numbers.device) - torch.searchsorted(sorted_numbers, sorted_numbers)
    dropped = torch.zeros_like(numbers, dtype=torch.bool).scatter_(1, order, ranks >= capacity)
    dropped = dropped.view(batch, sequence, -1).transpose(0, 1)
    return experts.masked_fill(dropped[own], -1)


def _of_samples(part: Tensor, group: Group, layout: SequenceLayout) -> tuple[Tensor, Tensor | slice]:
    """Gather the ranks' parts of samples, [sequence, ...], in the order of the samples.

    Returns:
        The samples, and the indices of this rank's part in them.
    """
    own = slice(group.rank * len(part), (group.rank + 1) * len(part))
    gathered = collectives.all_gather(part, group)
    if len(layout.of_ranks) == 1:
        return gathered, own
    places = layout.gathered_places(part.device)  # chunks of context-parallel ranks come in another order
    return torch.empty_like(gathered).index_copy_(0, places, gathered), places[own]


def _real_samples(micro_batch: MicroBatch) -> Tensor:
    """Return which samples have tokens besides padding, [batch] bool, on the rank with their first tokens.

    Padding is at the end of a sample, so its first token tells. The other context-parallel ranks return false, because
    counts are summed over them.
    """
    tokens, padding = micro_batch.tokens, micro_batch.padding
    if micro_batch.layout.runs[0].start > 0:
        return torch.zeros(len(tokens), dtype=torch.bool)
    return torch.ones(len(tokens), dtype=torch.bool) if padding is None else ~padding[:, 0]


def _micro_batches(micro_batch: MicroBatch) -> Tensor:
    """Return 1, or 0 if the micro-batch consists of padding."""
    return _real_samples(micro_batch).any()


def _sequences(micro_batch: MicroBatch) -> Tensor:
    """Return the number of samples that are not padding alone."""
    return _real_samples(micro_batch).sum()


@dataclass(frozen=True)
class BalancingLoss:
    """Balancing loss of groups of tokens.

    Attributes:
        name: name of the loss term.
        count: returns the number of groups in a micro-batch, over which the mean is taken; for the loss of the global
            batch, the number of tokens.
    """

    name: str
    count: Callable[[MicroBatch], Tensor]


BALANCING_LOSSES: Mapping[LoadBalancing, BalancingLoss] = {
    "aux_loss": BalancingLoss("load_balancing_loss", _micro_batches),
    "seq_aux_loss": BalancingLoss("seq_load_balancing_loss", _sequences),
    "global_aux_loss": BalancingLoss("global_load_balancing_loss", tokens_of),
}
