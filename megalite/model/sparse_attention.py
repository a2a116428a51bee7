"""Sparse attention (DeepSeek-V3.2): latent attention to the keys that an indexer chooses for each query.

All tensor-parallel ranks attend to the same keys: the indexer chooses for the tokens that a rank has between layers,
and under sequence parallelism the ranks gather what they have chosen. Context-parallel ranks gather latents, rotated
keys and the indexer's keys of the whole sample, in one collective.

The indexer's loss compares its scores with attention's probabilities, summed over the heads of all ranks. Forward
computes it by blocks of queries, together with its gradient, so that backward needs no scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.model.attention_core import LocalCore
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.context_parallel import attend_in_blocks
from megalite.model.indexer import Indexer, IndexerSizes, Tables
from megalite.model.latent_attention import LatentAttention, LatentCache, LatentSizes
from megalite.model.sample_mask import MaskedRound, SampleMask
from megalite.parallel import collectives
from megalite.parallel.attention_plan import Part
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.largest_logits import Measure
from megalite.parallel.linear import gathered
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage import NO_SUMS, TermSums
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import sigmoid_gated
from megalite_kernels.attention import Mask, same_width
from megalite_kernels.indexer import (
    Indices,
    VisibleKeys,
    choose_keys,
    divergence,
    index_gradients,
    index_products,
    mask_of,
    rows_in_blocks,
    summed_probabilities,
    weighed_products,
)

INDEXER_LOSS = "indexer_loss"


class SparseAttention(LatentAttention):
    """Latent attention to the keys that an indexer chooses. It also returns the sum of the indexer's loss.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        sizes: LatentSizes,
        *,
        indexer: IndexerSizes,
        source: int | None = None,
        layer: int = 0,
        **options: Any,
    ) -> None:
        """Make the layer.

        Args:
            source: number of the layer whose indexer chooses; None, or `layer`: its own.
            options: those of `LatentAttention`, like `layer`.
        """
        super().__init__(context, name, sizes, layer=layer, **options)
        self.over_samples = context.mesh.group("cp")
        self.shard, self.shards = context.shard, context.shards
        self.choice, self.layer, self.source = indexer, layer, layer if source is None else source
        self.indexer = None
        if self.source == layer:
            rank = sizes.query_rank or sizes.hidden
            self.indexer = Indexer(context, f"{name}.indexer", indexer, hidden=sizes.hidden, rank=rank, std=sizes.std)
            self.indexer.requires_grad_(indexer.trained)

    def make_core(self, local: LocalCore, context: ParallelContext, way: AttentionWay) -> Callable[..., Tensor]:
        return SparseCore(local)

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        return [] if self.over_samples.size == 1 else [Inside("latents and keys of the indexer", "cp")]

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        """Apply attention. With a cache, tokens also choose among the cached ones."""
        of_queries, latents = self.latents(hidden)
        query, gate, latent, rotated_key = self.project(hidden, of_queries, latents, context)
        indices = None if self.indexer is None else self.indexer(hidden, of_queries, self._own(context.rotary))
        mixed, terms = self.attend_to_chosen(query, torch.cat([latent, rotated_key], dim=-1), indices, context)
        return self.output(mixed if gate is None else sigmoid_gated(mixed, gate)), terms

    def _own(self, tables: Tables | None) -> Tables | None:
        """Return the rotary tables of the tokens that this rank has between layers."""
        if tables is None:
            return None
        cosine, sine = (table.chunk(self.shards)[self.shard] for table in tables)
        return cosine, sine

    def attend_to_chosen(
        self, query: Tensor, latents: Tensor, indices: Indices | None, context: LayerContext
    ) -> tuple[Tensor, TermSums]:
        """Return the weighted values, [sequence, batch, heads * value width], and the sum of the indexer's loss.

        Args:
            latents: latents and rotated keys, [sequence, batch, rank + rotated].
            indices: what the layer's own indexer makes of the tokens between layers; None if it has none.
        """
        if indices is not None:  # keys travel and are kept beside latents
            key = indices.key.transpose(0, 1)
            key = gathered(key, self.group) if self.sequence_parallel else key
            latents = torch.cat([latents, key], dim=-1)
        if context.cache is not None:
            return self._attend_cached(query, latents, indices, context, context.cache), NO_SUMS
        return self._attend_sample(query, latents, indices, context)

    def _choose(self, indices: Indices | None, visible: VisibleKeys, context: LayerContext) -> Tensor | None:
        """Return the chosen keys of all queries, [batch, queries, topk]; None if they attend to all that they see.

        Args:
            indices: those with which to choose; None to take what another layer has chosen.
            visible: the keys that all queries see.
        """
        if indices is None:
            return context.chosen[self.source]
        options, chosen = self.choice, None
        if not options.dense and options.topk < indices.key.shape[1]:
            own = VisibleKeys(*(each.chunk(self.shards, dim=1)[self.shard] for each in visible))
            chosen = choose_keys(indices, own, options.topk, relu=options.relu)
            if self.sequence_parallel:
                chosen = collectives.all_gather(chosen.transpose(0, 1), self.group).transpose(0, 1)
        context.chosen[self.layer] = chosen
        return chosen

    # ------------------------------------------------------------------------------------------------ whole samples

    def _attend_sample(
        self, query: Tensor, latents: Tensor, indices: Indices | None, context: LayerContext
    ) -> tuple[Tensor, TermSums]:
        """Attend to the tokens of whole samples. Returns weighted values and the sum of the indexer's loss, if any."""
        sizes, layout = self.sizes, context.layout
        if (ranks := self.over_samples.size) > 1:
            latents = layout.in_order(gathered(latents, self.over_samples).chunk(ranks), 0)
        latent, rotated_key, of_indexer = latents.tensor_split([sizes.rank, sizes.rank + sizes.rotated], dim=-1)
        if indices is not None:
            indices = indices._replace(key=of_indexer.transpose(0, 1))
        places = layout.places(latents.device)
        first = torch.zeros_like(places)[None] if context.first_keys is None else context.first_keys[:, places]
        visible = VisibleKeys(first, places[None])
        chosen = self._choose(indices, visible, context)
        key, value = self.keys_and_values(latent, rotated_key)
        blocks = Blocks(layout.places(torch.device("cpu")), visible, chosen)
        mask = context.masks[None] if chosen is None and ranks == 1 else blocks
        mixed = self.attend_to(query, key, value, mask, context)
        if indices is None or not self.choice.trained:
            return mixed, NO_SUMS
        of_loss = blocks if self.choice.sparse_loss else Blocks(blocks.places, visible, None)
        return mixed, {INDEXER_LOSS: self._loss(indices, query.detach(), key.detach(), of_loss, context)}

    def _loss(self, indices: Indices, query: Tensor, key: Tensor, blocks: Blocks, context: LayerContext) -> Tensor:
        """Return the sum of the indexer's loss over the tokens that this rank has between layers.

        Args:
            query: queries of attention of this rank's heads, [sequence, batch, heads, width].
            key: keys of attention of the whole sample, likewise.
        """
        counted = None if context.padding is None else ~context.padding.t()
        targets = self._targets(indices, query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), blocks)
        found: Tensor = _Divergence.apply(*indices, targets, counted, self.choice.relu)
        return found

    def _targets(self, indices: Indices, query: Tensor, key: Tensor, blocks: Blocks) -> Iterator[_Target]:
        """Yield attention's probabilities over the heads of all ranks, for blocks of this rank's tokens between layers.

        Under sequence parallelism each rank sums its heads' probabilities for a block of every rank's tokens.
        """
        batch, own, heads, _ = indices.query.shape
        largest = max(heads, query.shape[1] * self.shards)
        for rows in rows_in_blocks(own, batch * largest * key.shape[2], key.device):
            of_all: slice | Tensor = rows
            if self.shards > 1:
                starts = range(0, self.shards * own, own)
                of_all = torch.cat([torch.arange(at + rows.start, at + rows.stop) for at in starts])
            mask = blocks.mask(of_all)
            keys = mask.shape[-1]
            queries, scale, cap = query[:, :, of_all], self.sizes.scale, self.sizes.cap
            summed = summed_probabilities(queries, key[:, :, :keys], mask, scale=scale, cap=cap)
            if self.sequence_parallel:
                by_rank = summed.unflatten(1, (self.shards, -1)).transpose(0, 1)
                summed = collectives.reduce_scatter(by_rank, self.group)[0]
            else:
                summed = collectives.all_reduce_(summed, self.group)
            yield _Target(rows, summed, mask.unflatten(1, (self.shards, -1))[:, self.shard])

    # ------------------------------------------------------------------------------------------------ generation

    def _attend_cached(
        self, query: Tensor, latents: Tensor, indices: Indices | None, context: LayerContext, cache: StageCache
    ) -> Tensor:
        """Attend to chosen ones of the tokens so far, whose latents and keys are kept."""
        kept = cache.of(self, LatentCache).extend(latents, cache)
        kept, of_indexer = kept.tensor_split([self.sizes.rank + self.sizes.rotated], dim=-1)
        if indices is not None:
            indices = indices._replace(key=of_indexer.transpose(0, 1))
        visible = VisibleKeys(torch.zeros_like(cache.positions), cache.positions)
        chosen = self._choose(indices, visible, context)
        mask = context.masks[None]
        if chosen is not None and len(query) == 1:  # so that no product is with what is not chosen
            places = chosen[:, 0].clamp_min(0).t().long()
            kept = kept.gather(0, places[..., None].expand(-1, -1, kept.shape[-1]))
            mask = (chosen >= 0).unsqueeze(1)
        elif chosen is not None:
            mask = mask_of(chosen, len(kept)).unsqueeze(1)
        assert mask is None or isinstance(mask, Tensor)
        return self.attend_kept(query, kept, mask, context)


@dataclass(frozen=True)
class SparseCore:
    """Attention on one rank, as `local`, with the keys that an indexer has chosen if the mask is `Blocks`."""

    local: LocalCore

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | SampleMask | Blocks,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None = None,
        measure: Measure | None = None,
    ) -> Tensor:
        """Compute attention, as `LocalCore.__call__` does; with `Blocks`, to all keys of the sample."""
        local, dropout, width = self.local, None, value.shape[-1]
        if not isinstance(mask, Blocks):
            return local(query, key, value, mask, layout, random, sink, measure)
        if random is not None and local.dropout > 0.0:
            dropout = random.dropout_mask(local.dropout, local.site, layout.rows_of(local.heads))
        query, key, value = (each.permute(1, 2, 0, 3) for each in same_width(query, key, value))
        batch, heads, queries, _ = query.shape
        rows, whole = rows_in_blocks(queries, batch * heads * key.shape[2], key.device), range(key.shape[2])
        assert local.scale is not None
        seen, chosen = replace(mask, chosen=None), mask.chosen
        mixed = attend_in_blocks(
            query,
            torch.stack([key, value]),
            chosen,
            lambda chosen: MaskedRound((whole,), _Parts(replace(seen, chosen=chosen), rows)),
            scale=local.scale,
            cap=local.cap,
            dropout=dropout,
            measure=None if measure is None else functools.partial(measure, local.heads, layout),
        )
        return mixed[..., :width].permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Keys that a rank's queries attend to, of which a mask is made for a block of queries.

    Attributes:
        places: index of each query in the sample, on the host.
        chosen: the chosen keys, [batch, queries, topk]; None for all visible ones.
    """

    places: Tensor
    visible: VisibleKeys
    chosen: Tensor | None

    def mask(self, rows: Tensor | slice) -> Tensor:
        """Return the mask [batch or 1, rows, keys] of the keys up to the last query of these."""
        keys = int(self.places[rows].max()) + 1
        if self.chosen is None:
            return VisibleKeys(*(each[:, rows] for each in self.visible)).mask(slice(None), keys)
        return mask_of(self.chosen[:, rows], keys)


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of attention, one a block of queries. Their masks are made when they are asked for."""

    blocks: Blocks
    rows: list[slice]

    def __iter__(self) -> Iterator[tuple[Part, Tensor]]:
        for rows in self.rows:
            mask = self.blocks.mask(rows)
            yield Part(rows, slice(0, mask.shape[-1]), "masked"), mask.unsqueeze(1)


class _Target(NamedTuple):
    """Sums of attention's probabilities for a block of queries, [batch, rows, keys], and the mask of their keys."""

    rows: slice
    summed: Tensor
    mask: Tensor


class _Divergence(torch.autograd.Function):
    """Sum of the indexer's loss. Its gradient is a number times what forward has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        weights: Tensor,
        key: Tensor,
        targets: Iterator[_Target],
        counted: Tensor | None,
        relu: bool,
    ) -> Tensor:
        """Add up the blocks of queries, for each of which the ranks have summed attention's probabilities."""
        wide = torch.promote_types(query.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=query.device)
        indices, trained = Indices(query, weights, key), any(ctx.needs_input_grad[:3])
        gradients = [torch.zeros_like(each, dtype=wide) for each in indices] if trained else []
        for rows, target, mask in targets:
            block = indices.of_rows(rows, mask.shape[-1])
            of_rows = None if counted is None else counted[:, rows]
            products = index_products(block)
            products = products.relu_() if relu else products
            sum_of_rows, of_scores = divergence(weighed_products(block, products), target, mask, of_rows)
            total += sum_of_rows
            if trained:
                places = Indices(*gradients).of_rows(rows, mask.shape[-1])
                for place, found in zip(places, index_gradients(block, products, of_scores, relu=relu), strict=True):
                    place += found
        ctx.dtypes = [each.dtype for each in indices]
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [(each * upstream[0]).to(dtype) for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *found, None, None, None
