"""Sparse attention (DeepSeek-V3.2): latent attention to the keys that an indexer chooses for each query.

All tensor-parallel ranks attend to the same keys: the indexer chooses for the tokens that a rank has between layers,
and under sequence parallelism the ranks gather what they have chosen. Context-parallel ranks gather latents, rotated
keys and the indexer's keys of the whole sample, in one collective.

The indexer's loss compares its scores with attention's probabilities, summed over the heads of all ranks. Forward
computes it by blocks of queries, together with its gradient, so that backward needs no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.model.attention_core import LocalCore
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.indexer import Indexer, IndexerSizes, Tables
from megalite.model.latent_attention import LatentAttention, LatentCache, LatentSizes
from megalite.model.sample_mask import SampleMask
from megalite.parallel import collectives
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.largest_logits import Measure
from megalite.parallel.linear import gathered
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, between
from megalite.parallel.stage import NO_SUMS, TermSums
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import sigmoid_gated
from megalite_kernels.attention import Kept, Mask, draw_kept
from megalite_kernels.attention_parts import attend, part_gradients
from megalite_kernels.indexer import (
    Indices,
    VisibleKeys,
    add_index_gradients_,
    choose_keys,
    cut,
    divergence,
    index_scores,
    mask_of,
    summed_probabilities,
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
        shared: bool = False,
        layer: int = 0,
        **options: Any,
    ) -> None:
        """Make the layer.

        Args:
            source: number of the layer whose indexer chooses; None, or `layer`: its own.
            shared: another layer attends to what this one has chosen.
            options: those of `LatentAttention`, like `layer`.
        """
        super().__init__(context, name, sizes, layer=layer, **options)
        self.over_samples = context.mesh.group("cp")
        self.shard, self.shards = context.shard, context.shards
        self.choice, self.layer, self.source = indexer, layer, layer if source is None else source
        self.shared = shared
        self.core_is_fused = sizes.dropout == 0.0 and sizes.cap is None
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
        of_queries, latents = self.latents(hidden, context)
        query, gate, latent, rotated_key = self.project(hidden, of_queries, latents, context)
        indices = None if self.indexer is None else self.indexer(hidden, of_queries, self._own(context.rotary))
        mixed, terms = self.attend_to_chosen(query, torch.cat([latent, rotated_key], dim=-1), indices, context)
        return self.output(mixed if gate is None else sigmoid_gated(mixed, gate), context), terms

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
        if indices is not None and self.sequence_parallel:
            key = gathered(indices.key.transpose(0, 1), self.group)
            indices = indices._replace(key=key.transpose(0, 1))
        if context.cache is not None:
            return self._attend_cached(query, latents, indices, context, context.cache), NO_SUMS
        return self._attend_sample(query, latents, indices, context)

    def _with_keys(self, latents: Tensor, indices: Indices | None, all_of: Callable[[Tensor], Tensor]) -> _Joined:
        """Return latents and the indexer's keys of more tokens, which `all_of` gives for both in one tensor."""
        if indices is None:
            return _Joined(all_of(latents), None)
        joined = all_of(torch.cat([latents, indices.key.transpose(0, 1)], dim=-1))
        found, key = joined.tensor_split([latents.shape[-1]], dim=-1)
        # The indexer may be all that is trained: then its loss must not differentiate what travels beside its keys.
        found = found if latents.requires_grad else found.detach()
        return _Joined(found, indices._replace(key=key.transpose(0, 1)))

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
        if self.shared:
            context.chosen[self.layer] = chosen
        return chosen

    # ------------------------------------------------------------------------------------------------ whole samples

    def _attend_sample(
        self, query: Tensor, latents: Tensor, indices: Indices | None, context: LayerContext
    ) -> tuple[Tensor, TermSums]:
        """Attend to the tokens of whole samples. Returns weighted values and the sum of the indexer's loss, if any."""
        layout, ranks = context.layout, self.over_samples.size
        if ranks > 1:
            group = self.over_samples
            latents, indices = self._with_keys(
                latents, indices, lambda own: layout.in_order(gathered(own, group).chunk(ranks), 0)
            )
        places = layout.places(latents.device)
        first = torch.zeros_like(places)[None] if context.first_keys is None else context.first_keys[:, places]
        visible = VisibleKeys(first, places[None])
        chosen = self._choose(indices, visible, context)
        latent, rotated_key = latents.split(self.down_widths[-2:], dim=-1)
        key, value = self.keys_and_values(latent, rotated_key, context)
        blocks = Blocks(layout.places(torch.device("cpu")), visible, chosen)
        # Without blocks, dropout and a cap would make whole arrays of queries times keys.
        is_plain = chosen is None and ranks == 1 and context.first_keys is None and self.core_is_fused
        mixed = self.attend_to(query, key, value, None if is_plain else blocks, context)
        if indices is None or not self.choice.trained or not self.training:
            return mixed, NO_SUMS
        of_loss = blocks if self.choice.sparse_loss else replace(blocks, chosen=None)
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
        numbers = batch * key.shape[2]
        of_indexer = cut(own, heads, numbers, key.device)
        of_attention = cut(own, query.shape[1], numbers * self.shards, key.device)
        rows = min(of_indexer.rows, of_attention.rows, key=lambda each: each[0].stop)
        for some in rows:
            mask = blocks.mask(some, self.shards)
            keys, queries = mask.shape[-1], part_of(query, 2, some, self.shards)
            summed = summed_probabilities(
                queries,
                key[:, :, :keys],
                mask,
                scale=self.sizes.scale,
                cap=self.sizes.cap,
                heads=of_attention.heads,
            )
            if self.sequence_parallel:
                by_rank = summed.unflatten(1, (self.shards, -1)).transpose(0, 1)
                summed = collectives.reduce_scatter(by_rank, self.group)[0]
            else:
                summed = collectives.all_reduce_(summed, self.group)
            own_mask = mask.unflatten(1, (self.shards, -1))[:, self.shard]
            yield _Target(some, of_indexer.heads, summed, own_mask)

    # ------------------------------------------------------------------------------------------------ generation

    def _attend_cached(
        self, query: Tensor, latents: Tensor, indices: Indices | None, context: LayerContext, cache: StageCache
    ) -> Tensor:
        """Attend to chosen ones of the tokens so far, whose latents and keys are kept."""
        store = cache.of(self, LatentCache)
        kept, indices = self._with_keys(latents, indices, lambda own: store.extend(own, cache))
        visible = VisibleKeys(torch.zeros_like(cache.positions), cache.positions)
        chosen = self._choose(indices, visible, context)
        if chosen is None:
            return self.attend_kept(query, kept, cache.mask(), context)
        if len(query) == 1:  # so that no product is with what is not chosen
            places = chosen[:, 0].clamp_min(0).t().long()
            kept = kept.gather(0, places[..., None].expand(-1, -1, kept.shape[-1]))
            return self.attend_kept(query, kept, (chosen >= 0).unsqueeze(1), context)
        if self.absorbing_is_less(len(query), len(kept)):
            return self.attend_kept(query, kept, mask_of(chosen, len(kept)).unsqueeze(1), context)
        blocks = Blocks(torch.full((len(query),), len(kept) - 1), visible, chosen)
        latent, rotated_key = kept.split(self.down_widths[-2:], dim=-1)
        key, value = self.keys_and_values(latent, rotated_key, context)
        return self.attend_to(query, key, value, blocks, context)


class _Joined(NamedTuple):
    latents: Tensor
    indices: Indices | None


def part_of(values: Tensor, dimension: int, rows: slice, shards: int) -> Tensor:
    """Return rows of each of `shards` equal parts of a dimension, one part after another."""
    parts = values.unflatten(dimension, (shards, -1)).narrow(dimension + 1, rows.start, rows.stop - rows.start)
    return parts.flatten(dimension, dimension + 1)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Keys that a rank's queries attend to, of which a mask is made for a block of queries.

    Attributes:
        last: the last key that each query may attend to, on the host.
        visible: the keys that each query sees.
        chosen: the chosen keys, [batch, queries, topk]; None for all visible ones.
    """

    last: Tensor
    visible: VisibleKeys
    chosen: Tensor | None

    def mask(self, rows: slice, shards: int = 1) -> Tensor:
        """Return the mask [batch or 1, rows, keys] of the keys up to the last one of these queries.

        `rows`: queries of each of `shards` equal parts of all.
        """
        keys = int(part_of(self.last, 0, rows, shards).max()) + 1
        if self.chosen is not None:
            return mask_of(part_of(self.chosen, 1, rows, shards), keys)
        return VisibleKeys(*(part_of(each, 1, rows, shards) for each in self.visible)).mask(slice(None), keys)


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
        """Compute attention, as `LocalCore.__call__` does; with `Blocks`, to all keys of the sample, without sinks."""
        if not isinstance(mask, Blocks):
            return self.local(query, key, value, mask, layout, random, sink, measure)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        options = _Options(self.local, layout, random if self.local.dropout > 0.0 else None, measure)
        mixed: Tensor = _InBlocks.apply(query, key, value, mask.chosen, replace(mask, chosen=None), options)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _Options(NamedTuple):
    """Arguments of attention in blocks, other than tensors of the graph."""

    local: LocalCore
    layout: SequenceLayout
    random: RandomKey | None
    measure: Measure | None

    def of_block(self, query: Tensor, rows: slice, heads: slice, mask: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of a block of queries, with the probabilities that dropout keeps."""
        local, kept = self.local, None
        if self.random is not None:
            runs = between(self.layout.runs, rows.start, rows.stop)
            of_heads = replace(self.layout, of_ranks=(runs,), rank=0).rows_of(local.heads[heads])
            drop = self.random.dropout_mask(local.dropout, local.site, of_heads)
            drawn = draw_kept(drop, query, self.layout.length)[..., : mask.shape[-1]]
            kept = Kept(drawn.to(query.device), drop.scale)
        assert local.scale is not None
        return {"mask": mask.unsqueeze(1), "scale": local.scale, "cap": local.cap, "kept": kept}


class _InBlocks(torch.autograd.Function):
    """Attention by blocks of queries and heads. Backward keeps what enters, the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor | None, blocks: Blocks, options: _Options
    ) -> Tensor:
        """Attend with a block of heads and queries at a time to the keys up to the block's last one."""
        batch, heads, queries, _ = query.shape
        # Tokens come first in memory, so that the caller's output is a view of the one that backward keeps.
        output = query.new_empty(queries, batch, heads, value.shape[-1]).permute(1, 2, 0, 3)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(query.shape[:-1], dtype=wide, device=query.device)
        parts = cut(queries, heads, batch * key.shape[2], query.device)
        for rows in parts.rows:
            mask = replace(blocks, chosen=chosen).mask(rows)
            for some in parts.heads:
                own, of_keys = query[:, some, rows], key[:, some, : mask.shape[-1]]
                of_values = value[:, some, : mask.shape[-1]]
                block = options.of_block(own, rows, some, mask)
                output[:, some, rows], lse[:, some, rows] = attend(own, of_keys, of_values, **block)
                if options.measure is not None:
                    of_heads = options.local.heads[some]
                    options.measure(of_heads, options.layout, own, of_keys, block["mask"], block["scale"], rows)
        # Each query sees its own token, so one without keys has scores that are NaN, of which none is the best.
        output.masked_fill_(lse.isneginf().unsqueeze(-1), torch.nan)
        ctx.parts, ctx.blocks, ctx.options = parts, blocks, options
        ctx.save_for_backward(query, key, value, chosen, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the blocks' probabilities again; gradients of keys and values add up in fp32 or wider."""
        query, key, value, chosen, output, lse = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros(each.shape, dtype=lse.dtype, device=lse.device) for each in (key, value))
        for rows in ctx.parts.rows:
            mask = replace(ctx.blocks, chosen=chosen).mask(rows)
            seen = slice(0, mask.shape[-1])
            for some in ctx.parts.heads:
                own = query[:, some, rows]
                found = part_gradients(
                    gradients[0][:, some, rows],
                    own,
                    key[:, some, seen],
                    value[:, some, seen],
                    output[:, some, rows],
                    lse[:, some, rows],
                    **ctx.options.of_block(own, rows, some, mask),
                )
                of_query[:, some, rows] = found[0]
                of_key[:, some, seen] += found[1]
                of_value[:, some, seen] += found[2]
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


class _Target(NamedTuple):
    """Sums of attention's probabilities for a block of queries, [batch, rows, keys], and the mask of their keys.

    `heads`: blocks of the indexer's heads.
    """

    rows: slice
    heads: list[slice]
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
        for rows, heads, target, mask in targets:
            block = indices.of_rows(rows, mask.shape[-1])
            of_rows = None if counted is None else counted[:, rows]
            scores = index_scores(block, relu=relu, heads=heads)
            sum_of_rows, of_scores = divergence(scores, target, mask, of_rows)
            total += sum_of_rows
            if trained:
                sums = Indices(*gradients).of_rows(rows, mask.shape[-1])
                add_index_gradients_(sums, block, of_scores, relu=relu, heads=heads)
        ctx.dtypes = [each.dtype for each in indices]
        # Half the memory, at a rounding more. In fp16 numbers could be too small before the scale of the loss.
        narrow = torch.bfloat16 in ctx.dtypes
        kept = [each.to(dtype) if narrow else each for each, dtype in zip(gradients, ctx.dtypes, strict=False)]
        ctx.save_for_backward(*kept)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [(each * upstream[0]).to(dtype) for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *found, None, None, None
