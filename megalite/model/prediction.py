"""Depths of multi-token prediction (arXiv:2412.19437): each predicts one token more than the depth before it.

Depth d, from 1 on, joins for each token the norms of two vectors by a projection: the embedding of the token d places
behind it, and the hidden state of depth d - 1, as it enters the output layer. Depth 0 is the network. The depth's
layers and its final norm follow, and the network's output layer gives the logits of the token d + 1 places behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.config.layer_specs import numbers_in_names
from megalite.config.model import ModelConfig
from megalite.model.batch import FurtherTokens, LayerContext, MicroBatch
from megalite.model.block import Block, run_layers
from megalite.model.embedding import embedding_scale
from megalite.model.head import LM_LOSS, Head
from megalite.model.layer_kinds import make_norm
from megalite.model.recompute import Recompute
from megalite.parallel.context import ParallelContext
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.linear import ReplicatedLinear
from megalite.parallel.parameter import Parameter
from megalite.parallel.randomness import RandomKey, Site, dropout
from megalite.parallel.sequence import Runs
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums, add_sums


def further_terms(config: ModelConfig) -> tuple[LossTerm, ...]:
    """Declare the loss of each depth: a mean over the tokens that have such a label, whatever the others have."""
    weight = config.mtp_loss_scaling_factor / max(config.depths, 1)
    return tuple(LossTerm(term_name(depth), _Labels(depth), weight) for depth in range(1, config.depths + 1))


def term_name(depth: int) -> str:
    return f"mtp_{depth}_loss"


class _Labels:
    """Count of the labels of a depth in a micro-batch: the sum of their weights, in fp64."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __call__(self, micro_batch: MicroBatch) -> Tensor:
        assert micro_batch.further is not None
        return micro_batch.further.loss_mask[self.depth - 1].sum(dtype=torch.float64)


class Prediction(nn.Module):
    """Depths of a network, on its last stage.

    Attributes:
        embedding: embeddings of the depths' inputs.
        depths: modules of the depths; only one if all depths share its weights.
    """

    def __init__(
        self, config: ModelConfig, context: ParallelContext, word: Parameter | Sharding, use: int, recompute: Recompute
    ) -> None:
        """Make the depths.

        Args:
            word: the weight of the network's embedding if this rank has it, or the placement of a copy.
            use: the number of its use here.
        """
        super().__init__()
        self.count, self.detached, self.shards = config.depths, config.mtp_detach_heads, context.shards
        self.recomputed = recompute.method is not None
        halves = (number for pair in numbers_in_names(config.depth_layers) for number in pair)
        self.later = 1 + max(number for number in halves if number is not None)
        """Number added to those that key the layers' dropout, in each further pass through the same weights."""
        self.embedding = FurtherEmbedding(config, context, word, use)
        self.depths = nn.ModuleList(Depth(config, context, depth, recompute) for depth in range(config.own_depths))
        if (passes := self.count // len(self.depths)) > 1:
            for parameter in self.depths.parameters():
                assert isinstance(parameter, Parameter)
                (use_here,) = parameter.sharding.uses
                uses = (replace(use_here, times=use_here.times * passes),)
                parameter.sharding = replace(parameter.sharding, uses=uses)

    def passes(self) -> list[Depth]:
        """Return the module of each depth, in the order of forward."""
        modules = cast(Sequence[Depth], self.depths)
        return [modules[number % len(modules)] for number in range(self.count)]

    def terms(
        self,
        head: Head,
        hidden: Tensor,
        every: FurtherTokens,
        context: LayerContext,
        recomputed: Callable[..., Any],
    ) -> tuple[Tensor, TermSums]:
        """Return the network's losses times their weights, [sequence, batch], and the sums of all losses, and of the
        terms of the depths' layers.

        Args:
            hidden: the hidden states that leave the last layer of the network.
            every: also has the labels of the network, as those of depth 0.
            recomputed: runs a depth and saves only its input.
        """
        normed = head.norm(hidden)
        states, terms = self.states(normed, every.tokens, context, recomputed)
        losses = self.losses(head, [normed, *states], every.labels.transpose(1, 2))
        weighted = losses * every.loss_mask.transpose(1, 2)
        names = [LM_LOSS.name, *map(term_name, range(1, self.count + 1))]
        return weighted[0], add_sums(terms, dict(zip(names, weighted.sum((1, 2)).unbind(), strict=True)))

    def states(
        self, hidden: Tensor, tokens: Tensor, context: LayerContext, recomputed: Callable[..., Any]
    ) -> tuple[list[Tensor], TermSums]:
        """Return the hidden states of each depth, as they enter the output layer, and the terms of its layers.

        Args:
            hidden: those of the network, [sequence (/ size under sequence parallelism), batch, hidden], as the results.
            tokens: inputs of the depths, [depths, batch, sequence].
            recomputed: runs a depth and saves only its input.
        """
        embedded = self.embedding(tokens, context.key, context.rows)
        hidden = hidden.detach() if self.detached else hidden
        context = replace(context, replayed=None, choices=None)  # those of the network's routers alone
        found, terms = list[Tensor](), NO_SUMS
        for number, (depth, each) in enumerate(zip(self.passes(), embedded, strict=True)):
            later = number // len(self.depths) * self.later
            arguments = each, hidden, replace(context, key=replace(context.key, later=later))
            if self.recomputed and torch.is_grad_enabled():
                hidden, own = recomputed(depth, *arguments)
            else:
                hidden, own = depth(*arguments)
            found.append(hidden)
            terms = add_sums(terms, own)
        return found, terms

    def losses(self, head: Head, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the loss of each token at each depth, [depths + 1, sequence, batch], as `labels`.

        One product gives the logits of all depths, or two if those of the depths leave the output layer as it is.

        `states`: the input of the output layer at each depth, from 0 on.
        """
        parts = [(0, 1), (1, len(states))] if self.detached else [(0, len(states))]
        found = []
        for start, stop in parts:
            joined, of_part = torch.cat(list(states[start:stop])), side_by_side(labels[start:stop], self.shards)
            losses = head.of_normed(joined, of_part, frozen=start > 0)
            found.append(apart(losses, stop - start, self.shards))
        return torch.cat(found)


class FurtherEmbedding(nn.Module):
    """Embeddings of the depths' inputs, by the weight of the network's embedding, with a dropout of their own."""

    def __init__(self, config: ModelConfig, context: ParallelContext, word: Parameter | Sharding, use: int) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(context, word, use=use)
        self.word.can_have_adapters = False
        self.scale, self.dropout = embedding_scale(config, context.dtype), config.hidden_dropout
        self.detached, self.shards = config.mtp_detach_heads, context.shards

    def forward(self, tokens: Tensor, key: RandomKey, rows: Runs) -> tuple[Tensor, ...]:
        """Embed tokens [depths, batch, sequence] in one lookup.

        Returns:
            For each depth [sequence (/ size under sequence parallelism), batch, hidden].
        """
        found: Tensor = self.word(side_by_side(tokens.transpose(1, 2), self.shards))
        if self.detached:
            found = _WithoutGradient.apply(found)
        if self.scale != 1.0:
            found = found * self.scale
        probability = self.dropout if self.training else 0.0
        return tuple(
            dropout(each, probability, key, Site(depth, "embedding"), rows)
            for depth, each in enumerate(found.chunk(len(tokens)), start=1)
        )


class _WithoutGradient(torch.autograd.Function):
    """Passes values on and zeros back, so that a weight still receives one gradient for each of its uses."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


class Depth(nn.Module):
    """Projection of an embedding and a hidden state, the layers behind it, and their final norm."""

    def __init__(self, config: ModelConfig, context: ParallelContext, depth: int, recompute: Recompute) -> None:
        """`depth`: number among those with weights of their own, from 0."""
        super().__init__()
        norm, name, hidden = make_norm(config), f"mtp.{depth}", config.hidden_size
        self.embedding_norm = norm(context, f"{name}.embedding_norm", hidden)
        self.hidden_norm = norm(context, f"{name}.hidden_norm", hidden)
        projection = LogicalTensor(
            f"{name}.projection",
            (hidden, 2, hidden),
            Normal(config.init_method_std),
            True,
            "out two in -> 1 out (two in)",
        )
        self.projection = ReplicatedLinear(context, context.replicated(projection), None)
        first, layers = config.num_layers + depth * len(config.depth_layers), len(config.depth_layers)
        self.layers = nn.ModuleList(Block(config, context, layer, recompute) for layer in range(first, first + layers))
        self.final_norm = norm(context, f"{name}.final_norm", hidden)

    def forward(self, embedded: Tensor, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        """Run the depth on embeddings and hidden states [sequence (/ size under sequence parallelism), batch, hidden].

        Returns hidden states of the same shape, and the terms of the layers.
        """
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden, terms = run_layers(self.layers, self.projection(joined, context), context)
        return self.final_norm(hidden), terms


def side_by_side(parts: Tensor, shards: int) -> Tensor:
    """Join [parts, sequence, batch] to [parts * sequence, batch] such that each of `shards` equal runs has the same of
    each part: what a rank has of the joined sequence are then its tokens of each part."""
    return parts.unflatten(1, (shards, -1)).transpose(0, 1).flatten(0, 2)


def apart(joined: Tensor, parts: int, shards: int) -> Tensor:
    """Invert `side_by_side`, returning [parts, sequence, batch]."""
    return joined.unflatten(0, (shards, parts, -1)).transpose(0, 1).flatten(1, 2)
