"""The router of a layer with experts: each token's experts and weights, and the losses that balance the loads.

The balancing loss of a group of tokens is E * sum_i f_i * P_i over the E experts (arXiv:2101.03961, 2412.19437). f_i is
the share of the tokens' choices that are expert i, by score alone: without bias, groups and capacity. P_i is the mean
share of expert i in the tokens' scores. f has no gradient. The group is a micro-batch, a sequence, or the global batch,
for which f is taken from the previous step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import LoadBalancing, ModelConfig
from megalite.model.batch import LayerContext, MicroBatch
from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums
from megalite.parallel.state import State
from megalite.parallel.tally import Tally
from megalite_kernels.permutation import occurrences
from megalite_kernels.routing import RoutingRule, choose_experts, routing_probabilities, routing_weights

BALANCING_LOSSES: Mapping[LoadBalancing, str] = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
Z_LOSS, ENTROPY = "moe_z_loss", "router_entropy"
"""Names of the loss terms."""
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
        expert_bias: [experts], fp32: the bias of the choice; None without.
        previous_load: [experts], fp32: the share of each expert in the choices of the previous step; None without
            global_aux_loss.
        tally: tokens per expert, then choices per expert by score alone, then dropped choices.
        load: the tally's sums over the last step that updated the weights; None before the first one.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        name, self.num_experts = f"layers.{layer}.moe", config.num_experts
        self.number = sum(each.feed_forward == "moe" for each in config.layers[:layer])
        self.config, self.rule, self.sample_group = (
            config,
            routing_rule(config),
            context.mesh.group(*context.sample_axes),
        )
        weight = LogicalTensor(
            f"{name}.router",
            (self.num_experts, config.hidden_size),
            Normal(config.init_method_std),
            True,
            "experts hidden -> 1 experts hidden",
        )
        self.weight = context.parameter(context.replicated(weight))
        self.balancing = {
            kind: weight
            for kind, weight in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
            if weight
        }

        def state(what: str, begin: float) -> State:
            tensor = LogicalTensor(f"{name}.{what}", (self.num_experts,), Constant(begin), False)
            return State(context.replicated(tensor), torch.float32, context.mesh.device)

        self.expert_bias = state("expert_bias", 0.0) if config.moe_router_enable_expert_bias else None
        self.previous_load: State | None = None
        if "global_aux_loss" in self.balancing:
            self.previous_load = state("previous_load", 1 / self.num_experts)
        self.tally = Tally(
            2 * self.num_experts + 1, context.mesh.group(*context.token_axes), context.mesh.device, self._take
        )
        self.load: Tensor | None = None

    @staticmethod
    def loss_terms(config: ModelConfig) -> tuple[LossTerm, ...]:
        """Declare the terms that routers return, except for the axes of their sums."""
        counts = {"aux_loss": (_micro_batches, ("dp",)), "seq_aux_loss": (_sequences, ("dp",))}
        terms = []
        for kind, weight in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True):
            if weight:
                count, axes = counts.get(kind, (_tokens, ("dp", "cp")))
                terms.append(LossTerm(BALANCING_LOSSES[kind], count, weight, count_axes=axes))
        if config.moe_z_loss_coeff:
            terms.append(LossTerm(Z_LOSS, _tokens, config.moe_z_loss_coeff))
        layers = sum(layer.feed_forward == "moe" for layer in config.layers)
        return (*terms, LossTerm(ENTROPY, lambda micro_batch: _tokens(micro_batch) * layers, 0.0))

    def forward(self, hidden: Tensor, context: LayerContext) -> Routing:
        """Route the tokens of hidden states [sequence (/ size under sequence parallelism), batch, hidden]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        dtype = hidden.dtype if self.config.moe_router_dtype is None else _DTYPES[self.config.moe_router_dtype]
        dtype = torch.promote_types(dtype, hidden.dtype)
        logits = F.linear(hidden.to(dtype), self.weight.to(dtype)).to(torch.promote_types(dtype, wide))
        shape, padding = logits.shape[:2], context.padding
        logits = logits.flatten(0, 1)
        bias = None if self.expert_bias is None else self.expert_bias.values.to(logits.dtype)
        chosen = by_score = choose_experts(logits, bias, self.rule)
        if self.training and (bias is not None or self.rule.groups > 1):
            by_score = choose_experts(logits, None, RoutingRule(self.rule.topk))
        if context.replayed is not None:
            replayed = context.replayed[:, :, self.number].flatten(0, 1)
            chosen = torch.where(replayed < 0, chosen, replayed)
        weights = routing_weights(logits, chosen, self.rule).to(wide)
        chosen, by_score = chosen.view(*shape, -1), by_score.view(*shape, -1)
        if padding is not None:
            by_score, chosen = (each.masked_fill(padding[:, :, None], -1) for each in (by_score, chosen))
        if context.choices is not None:
            context.choices[self.number] = chosen.int()
        if not self.training:
            return Routing(chosen.flatten(0, 1), weights, None, NO_SUMS)
        routed = (chosen >= 0).sum()
        if (capacity := self.capacity(context.layout.length)) is not None:
            chosen = _within(chosen, weights.detach(), capacity, self.config.moe_token_drop_policy, self.sample_group)
        counts = torch.cat(
            [
                occurrences(chosen.flatten(), self.num_experts),
                occurrences(by_score.flatten(), self.num_experts),
                (routed - (chosen >= 0).sum())[None],
            ]
        )
        return Routing(chosen.flatten(0, 1), weights, counts, self._terms(logits.view(*shape, -1), by_score, padding))

    def capacity(self, sequence: int) -> int | None:
        """Return how many tokens of a sequence an expert takes in training; None without a limit."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return None
        return min(math.ceil(sequence * self.rule.topk / self.num_experts * factor), sequence)

    def _terms(self, logits: Tensor, by_score: Tensor, padding: Tensor | None) -> TermSums:
        """Return the sums of the loss terms over this rank's tokens.

        Args:
            logits: [sequence, batch, experts].
            by_score: [sequence, batch, topk]; -1 for padding.
            padding: [sequence, batch]; None without padding.
        """
        real = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if padding is None else ~padding
        shares = routing_probabilities(logits, self.rule.score_function) * real[:, :, None]
        terms: dict[str, Tensor] = {}
        if {"aux_loss", "seq_aux_loss"} & self.balancing.keys():
            counts = torch.cat(
                [occurrences(by_score.transpose(0, 1).flatten(1), self.num_experts), real.sum(0)[:, None]], dim=1
            )
            counts = collectives.all_reduce_(counts, self.sample_group).to(logits.dtype)
            if "aux_loss" in self.balancing:
                terms[BALANCING_LOSSES["aux_loss"]] = self._balance(counts.sum(0), shares.sum((0, 1)))
            if "seq_aux_loss" in self.balancing:
                terms[BALANCING_LOSSES["seq_aux_loss"]] = self._balance(counts, shares.sum(0))
        if self.previous_load is not None:
            load = self.previous_load.values.to(logits.dtype)
            terms[BALANCING_LOSSES["global_aux_loss"]] = self.num_experts * (load * shares.sum((0, 1))).sum()
        if self.config.moe_z_loss_coeff:
            terms[Z_LOSS] = (logits.logsumexp(-1).square() * real).sum()
        return {**terms, ENTROPY: torch.special.entr(shares.detach()).sum()}

    def _balance(self, counts: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the balancing losses of groups of tokens.

        Args:
            counts: [..., experts + 1]: a group's choices per expert, and its number of tokens.
            shares: [..., experts]: the sum of each expert's shares over this rank's tokens of the group.
        """
        tokens = counts[..., -1:].clamp(min=1)
        fractions = counts[..., :-1] / (self.rule.topk * tokens)
        return (fractions * shares / tokens).sum() * self.num_experts

    @torch.no_grad()
    def _take(self, totals: Tensor) -> None:
        self.load = totals
        counts, by_score = totals[: self.num_experts], totals[self.num_experts : 2 * self.num_experts]
        if self.expert_bias is not None:
            # Compared in whole numbers: the sign is exact for any number of tokens.
            missing = (counts.sum() - self.num_experts * counts).sign()
            self.expert_bias.values += self.config.moe_router_bias_update_rate * missing
        if self.previous_load is not None:
            self.previous_load.values.copy_(by_score.double() / by_score.sum().clamp(min=1))


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


def _within(experts: Tensor, weights: Tensor, capacity: int, policy: str, group: Group) -> Tensor:
    """Set the choices of each sequence beyond the capacity of an expert to -1.

    Args:
        experts: [sequence, batch, topk]: this rank's part of the sequences.
        weights: [tokens, topk].
        group: the ranks that share the sequences.
    """
    own = slice(group.rank * len(experts), (group.rank + 1) * len(experts))
    # Small whole numbers are exact in fp32, so choices and weights are gathered together.
    both = collectives.all_gather(torch.cat([experts.to(weights.dtype), weights.view_as(experts)], dim=-1), group)
    sequence, batch, _ = both.shape
    numbers, weights = (part.transpose(0, 1).reshape(batch, -1) for part in both.tensor_split(2, dim=-1))
    order = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    if policy == "probs":
        order = weights.sort(dim=1, descending=True, stable=True).indices
    sorted_numbers, by_expert = numbers.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, by_expert)
    places = torch.arange(numbers.shape[1], device=numbers.device) - torch.searchsorted(sorted_numbers, sorted_numbers)
    dropped = torch.zeros_like(numbers, dtype=torch.bool).scatter_(1, order, places >= capacity)
    dropped = dropped.view(batch, sequence, -1).transpose(0, 1)[own]
    return experts.masked_fill(dropped, -1)


def _micro_batches(micro_batch: MicroBatch) -> Tensor:
    """Return 1, or 0 if the micro-batch consists of padding."""
    return torch.ones(()) if micro_batch.padding is None else (~micro_batch.padding).any()


def _sequences(micro_batch: MicroBatch) -> Tensor:
    """Return the number of samples that are not padding alone."""
    if micro_batch.padding is None:
        return torch.tensor(len(micro_batch.tokens))
    return (~micro_batch.padding).any(dim=1).sum()


def _tokens(micro_batch: MicroBatch) -> Tensor:
    if micro_batch.padding is None:
        return torch.tensor(micro_batch.tokens.numel())
    return (~micro_batch.padding).sum()
