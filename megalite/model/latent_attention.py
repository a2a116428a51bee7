"""Latent attention (DeepSeek-V2, arXiv:2405.04434), with its heads split over the tensor-parallel ranks.

Keys and values of all heads are made of one latent of a token, and queries of another one, or of the layer's input:

    [q | c | k_rope] = downs(x);    q_h = query_up_h(norm(q));    [k_h | v_h] = key_value_up_h(norm(c))
    scores of head h: ([q_h of k_h's width] . k_h + rotated([rest of q_h]) . rotated(k_rope)) * scale

Every rank has the matrices to the latents, the downs, and the norms, and those of its own heads from there, the ups.
All heads share the latents and the rotated key: their gradient is summed over the ranks where they enter the heads.

With a cache of earlier tokens, only latents and rotated keys are kept. Where it takes fewer products, a head's matrix
of keys is applied to its queries, and that of values to its output, so that the latents themselves are the keys and
values of all heads (`_absorbed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.attention_core import LocalCore
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.latent_expansion import LatentExpansion, keys_and_values
from megalite.model.norm import LayerNorm
from megalite.parallel.adapter import Adaptable, Places
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.largest_logits import LargestLogits, LogitClip, ScaledRows
from megalite.parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    shared_by_heads,
    updated_product,
)
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import stacked
from megalite.parallel.randomness import Site
from megalite.parallel.sequence import Runs
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import TermSums
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import sigmoid_gated, soft_cap
from megalite_kernels.rotary import rotary_embedding


@dataclass(frozen=True)
class LatentSizes:
    """Sizes and options of latent attention.

    Attributes:
        query_rank: width of the latent of queries; None: queries are made of the layer's input.
        rank: width of the latent of keys and values.
        key_width: width of a head's queries and keys without the rotated part.
        rotated: width of the rotated part.
        value_width: width of a head's values.
        std: standard deviation of the initial weights.
        output_std: the same of the output layer.
        output_bias: bias of the output layer.
        scale: factor of the scores.
        cap: soft cap of the scores; None for no cap.
        dropout: dropout probability of attention probabilities.
        output_gate: multiply the output with the sigmoid of a gate, which the layer's input gives.
    """

    hidden: int
    heads: int
    query_rank: int | None
    rank: int
    key_width: int
    rotated: int
    value_width: int
    scale: float
    std: float = 0.02
    output_std: float = 0.02
    output_bias: bool = False
    cap: float | None = None
    dropout: float = 0.0
    output_gate: bool = False

    @property
    def query_width(self) -> int:
        """Width of a head's queries."""
        return self.key_width + self.rotated


class LatentAttention(Adaptable):
    """Causal attention over latents, with neighbouring channels of the rotated part as a pair.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        sizes: LatentSizes,
        *,
        norm: Callable[..., LayerNorm] | None = None,
        layer: int = 0,
        way: AttentionWay | None = None,
        recompute: bool = False,
        clip: LogitClip | None = None,
    ) -> None:
        """Make the layer.

        Args:
            norm: makes the norms of the latents, of a context, a name and a width; None for none.
            layer: number among the network's layers of this kind: that of its dropout.
            way: see `ParallelContext`; None: the default.
            recompute: recompute the core (scores, softmax, weighted values) in backward instead of saving it.
            clip: measure logits for this clip; None: do not.
        """
        super().__init__()
        group = context.group("heads")
        self.sizes, self.heads = sizes, sizes.heads // group.size
        self.group, self.sequence_parallel = group, context.sequence_parallel
        self._make_projections(context, name, sizes)
        self.query_norm = self.key_value_norm = None
        if norm is not None:
            self.key_value_norm = norm(context, f"{name}.key_value_norm", sizes.rank)
            if sizes.query_rank is not None:
                self.query_norm = norm(context, f"{name}.query_norm", sizes.query_rank)
        self.largest_logits = None
        if clip is not None:
            self.largest_logits = LargestLogits(context, clip, sizes.heads, sizes.heads, _scaled(name, sizes, clip))
        local = LocalCore(
            heads=range(group.rank * self.heads, (group.rank + 1) * self.heads),
            groups=range(self.heads),
            scale=sizes.scale,
            cap=sizes.cap,
            dropout=sizes.dropout,
            site=Site(layer, "attention"),
            recompute=recompute,
        )
        self.latents_travel = False
        """True if context-parallel ranks send latents, and not the keys and values that are made of them."""
        self.core = self.make_core(local, context, way or AttentionWay())

    def make_core(self, local: LocalCore, context: ParallelContext, way: AttentionWay) -> Callable[..., Tensor]:
        """Return what attends to the keys and values of all ranks, given what does so on one rank."""
        if context.mesh.size("cp") == 1:
            return local
        core, sizes = ContextParallelCore(local, context, way), self.sizes
        of_heads = 2 * self.heads * max(sizes.query_width, sizes.value_width)
        self.latents_travel = core.head_exchange.size == 1 and sizes.rank + sizes.rotated < of_heads
        return core

    def _make_projections(self, context: ParallelContext, name: str, sizes: LatentSizes) -> None:
        """Make the matrices: downs together, those of the layer's input to the heads together, ups and output apart."""
        heads, hidden, draw = sizes.heads, sizes.hidden, Normal(sizes.std)

        def down(part: str, width: int) -> LogicalTensor:
            return LogicalTensor(f"{name}.{part}", (width, hidden), draw, True, "width hidden -> 1 width hidden")

        def of_heads(part: str, width: int, input: int) -> LogicalTensor:
            matrix = "heads width input -> 1 (heads width) input"
            return LogicalTensor(f"{name}.{part}", (heads, width, input), draw, True, matrix)

        def projection(*parts: LogicalTensor) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                context, "heads", [stacked([context.split(each, {0: "heads"}) for each in parts])]
            )

        downs = [down("key_value_down", sizes.rank + sizes.rotated)]
        of_input = [of_heads("gate", sizes.value_width, hidden)] if sizes.output_gate else []
        self.query_up = None
        if sizes.query_rank is None:
            of_input.insert(0, of_heads("query", sizes.query_width, hidden))
        else:
            downs.insert(0, down("query_down", sizes.query_rank))
            self.query_up = projection(of_heads("query_up", sizes.query_width, sizes.query_rank))
        self.down_widths = [*(each.shape[0] for each in downs[:-1]), sizes.rank, sizes.rotated]
        self.down = ReplicatedLinear(context, stacked([context.replicated(each) for each in downs]), None)
        self.of_input = projection(*of_input) if of_input else None
        up = of_heads("key_value_up", sizes.key_width + sizes.value_width, sizes.rank)
        # Its own, not that of a layer within: what waits for weights before they are read waits before `forward`.
        self.key_value_up = context.parameter(context.split(up, {0: "heads"}))
        matrix = "hidden heads width -> 1 hidden (heads width)"
        shape = (hidden, heads, sizes.value_width)
        output = LogicalTensor(f"{name}.output", shape, Normal(sizes.output_std), True, matrix)
        bias = LogicalTensor(f"{name}.output_bias", (hidden,), Constant(0.0), False)
        self.output = RowParallelLinear(
            context,
            "heads",
            context.split(output, {1: "heads"}, columns=2),
            context.replicated(bias) if sizes.output_bias else None,
        )

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        return list(getattr(self.core, "inside", ()))

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor | tuple[Tensor, TermSums]:
        """Apply attention. With a cache, tokens also attend to the cached ones."""
        of_query, latents = self.latents(hidden, context)
        query, gate, latent, rotated_key = self.project(hidden, of_query, latents, context)
        mixed = self.attend(query, latent, rotated_key, context)
        return self.output(mixed if gate is None else sigmoid_gated(mixed, gate), context)

    def latents(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the latents of this rank's tokens between layers, behind their norms, [sequence, batch, ...].

        They are that of queries, or the layer's input without one, and that of keys and values with the rotated key.
        """
        *of_query, latent, rotated_key = self.down(hidden, context).split(self.down_widths, dim=-1)
        if self.key_value_norm is not None:
            latent = self.key_value_norm(latent)
        of_queries = of_query[0] if of_query else hidden
        if self.query_norm is not None:
            of_queries = self.query_norm(of_queries)
        return of_queries, torch.cat([latent, rotated_key], dim=-1)

    def project(
        self, hidden: Tensor, of_queries: Tensor, latents: Tensor, context: LayerContext
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return queries, gates if there are any, latents of keys and values, and rotated keys, of all heads' tokens.

        Queries are [sequence, batch, heads, query width], gates [sequence, batch, heads * value width], latents
        [sequence, batch, rank], and rotated keys [sequence, batch, rotated].

        `of_queries`, `latents`: what `latents` returns.
        """
        sizes = self.sizes
        latent, rotated_key = self.share(latents)
        projected = gate = None if self.of_input is None else self.of_input(hidden, context)
        if self.query_up is not None:
            query = self.query_up(of_queries, context)
        else:
            assert projected is not None
            query, gate = projected.tensor_split([self.heads * sizes.query_width], dim=-1)
        query = query.unflatten(-1, (self.heads, sizes.query_width))
        if context.rotary is not None:
            plain, rotated = query.split([sizes.key_width, sizes.rotated], dim=-1)
            rotated, key = rotary_embedding(rotated, rotated_key.unsqueeze(2), *context.rotary, interleaved=True)
            query, rotated_key = torch.cat([plain, rotated], dim=-1), key.squeeze(2)
        return query, gate if sizes.output_gate else None, latent, rotated_key

    def share(self, latents: Tensor) -> tuple[Tensor, ...]:
        """Return latents and rotated keys of all tokens, from those of this rank's part of the sequence.

        Together they are one collective, whose backward sums the gradients of what the heads of all ranks share.
        """
        shared = shared_by_heads(latents, self.group, sequence_parallel=self.sequence_parallel)
        return shared.split(self.down_widths[-2:], dim=-1)

    def attend(self, query: Tensor, latent: Tensor, rotated_key: Tensor, context: LayerContext) -> Tensor:
        """Return the weighted values, [sequence, batch, heads * value width]."""
        mask = context.masks[None]
        if (cache := context.cache) is not None:
            assert mask is None or isinstance(mask, Tensor)
            kept = cache.of(self, LatentCache).extend(torch.cat([latent, rotated_key], dim=-1), cache)
            return self.attend_kept(query, kept, mask, context)
        if self.latents_travel:
            travelling = torch.cat([latent, rotated_key], dim=-1)
            return self._travelled(query, travelling, mask, *self._options(context))
        return self.attend_to(query, *self.keys_and_values(latent, rotated_key, context), mask, context)

    def attend_kept(self, query: Tensor, kept: Tensor, mask: Tensor | None, context: LayerContext) -> Tensor:
        """Attend to kept latents and rotated keys [tokens, batch, rank + rotated]. `mask`: see `_absorbed`."""
        if self.absorbing_is_less(len(query), len(kept)):
            return self._absorbed(query, kept, mask)
        latent, rotated_key = kept.split(self.down_widths[-2:], dim=-1)
        return self.attend_to(query, *self.keys_and_values(latent, rotated_key, context), mask, context)

    def attend_to(self, query: Tensor, key: Tensor, value: Tensor, mask: object, context: LayerContext) -> Tensor:
        """Attend to keys and values [tokens, batch, heads, width]. `mask`: that of the core."""
        return self.core(query, key, value, mask, *self._options(context))

    def _options(self, context: LayerContext) -> tuple[object, ...]:
        """Return the arguments of the core besides tensors: layout, key of the dropout, sink and measure of logits."""
        measure = None if self.largest_logits is None else self.largest_logits.of_samples(context.lengths)
        return context.layout, context.key if self.training else None, None, measure

    def keys_and_values(self, latent: Tensor, rotated_key: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Return keys and values of this rank's heads, [tokens, batch, heads, width] each."""
        of_heads = self.adapted(updated_product, latent, [self.key_value_up], context).unflatten(-1, (self.heads, -1))
        return keys_and_values(of_heads, rotated_key, self.sizes.key_width)

    def _travelled(self, query: Tensor, latents: Tensor, *arguments: object) -> Tensor:
        """Attend to the tokens of all context-parallel ranks, whose latents and rotated keys travel."""
        sizes = self.sizes
        width = max(sizes.query_width, sizes.value_width)
        expansion = LatentExpansion(self.merged_weight(self.key_value_up), self.heads, sizes.rank, sizes.key_width)
        output = self.core(F.pad(query, (0, width - sizes.query_width)), latents, expansion, *arguments)
        return output.unflatten(-1, (self.heads, width))[..., : sizes.value_width].flatten(2)

    def weights_to_adapt(self) -> list[Parameter]:
        return [self.key_value_up]

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        return self.group, None

    def rows_of_input(self, places: Places) -> Runs:
        return places.layout.part(0, 1)

    def absorbing_is_less(self, queries: int, keys: int) -> bool:
        """Tell if so many queries over so many keys take fewer products with the latents as keys and values."""
        sizes = self.sizes
        widths = sizes.key_width + sizes.value_width
        made = keys * sizes.rank * widths + queries * keys * (widths + sizes.rotated)
        return queries * sizes.rank * widths + queries * keys * (2 * sizes.rank + sizes.rotated) < made

    def _absorbed(self, query: Tensor, kept: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to kept latents and rotated keys [tokens, batch, rank + rotated] as keys and values of all heads.

        `mask`: [batch or 1, 1, queries, tokens] bool; None if queries are the last tokens, and see all before them.
        """
        sizes, queries = self.sizes, len(query)
        up = self.merged_weight(self.key_value_up).unflatten(0, (self.heads, -1))
        of_keys, of_values = up.split([sizes.key_width, sizes.value_width], dim=1)
        plain, rotated = query.split([sizes.key_width, sizes.rotated], dim=-1)
        query = torch.cat([torch.einsum("sbhk,hkr->bhsr", plain, of_keys), rotated.permute(1, 2, 0, 3)], dim=-1)
        kept = kept.transpose(0, 1)
        scores = (query.flatten(1, 2) @ kept.transpose(1, 2)).unflatten(1, (self.heads, queries))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * sizes.scale
        if sizes.cap is not None:
            scores = soft_cap(scores, sizes.cap)
        if mask is None:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(kept.shape[1] - queries)
        shares = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1).to(kept.dtype)
        mixed = (shares.flatten(1, 2) @ kept[..., : sizes.rank]).unflatten(1, (self.heads, queries))
        return torch.einsum("bhsr,hvr->sbhv", mixed, of_values).flatten(2)


def _scaled(name: str, sizes: LatentSizes, clip: LogitClip) -> list[ScaledRows]:
    """Return the rows that a clip scales.

    All heads share the rotated key, so the rotated part of a head's queries is scaled by the whole factor.
    """
    queries = f"{name}.query" if sizes.query_rank is None else f"{name}.query_up"
    plain = range(sizes.key_width)
    return [
        ScaledRows(queries, plain, clip.alpha),
        ScaledRows(queries, range(sizes.key_width, sizes.query_width), 1.0),
        ScaledRows(f"{name}.key_value_up", plain, 1 - clip.alpha),
    ]


class LatentCache:
    """Latents and rotated keys of a batch of sequences in one layer, as `KeyValueCache` keeps keys and values.

    It stores batch x slots x (rank + rotated) numbers on every rank, which the first pass allocates.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def extend(self, latents: Tensor, stage: StageCache) -> Tensor:
        """Write [sequence, batch, width] into the slots of this pass's tokens.

        Returns:
            What all slots so far have, [slots so far, batch, width].
        """
        if self._kept is None:
            _, batch, width = latents.shape
            self._kept = latents.new_zeros(batch, stage.slots, width)  # zeros: see `KeyValueCache`
        rows = torch.arange(len(self._kept), device=self._kept.device).unsqueeze(1)
        self._kept[rows, stage.positions] = stage.first_copies(latents).transpose(0, 1)
        return self._kept[:, : stage.end].transpose(0, 1)

    def keep(self, rows: list[int]) -> None:
        if self._kept is not None:
            self._kept = self._kept[rows]
