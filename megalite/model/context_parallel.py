"""Attention under context parallelism, over ranks that each have a part of the tokens of a sample.

Some neighbouring ranks may exchange heads (arXiv:2309.14509): each then has all of their tokens, for some of the heads.
Keys and values of further ranks arrive by a ring or a gather (`parallel/key_value_exchange.py`). A rank computes the
parts that `parallel/attention_plan.py` lists, and merges them by their log-sum-exp. For backward it keeps queries, its
own keys and values, the output and the log-sum-exp, and no scores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megalite.model.attention_core import LocalCore
from megalite.model.sample_mask import MaskedRound, SampleMask
from megalite.parallel.attention_plan import Part
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.key_value_exchange import Gather, KeyValueExchange, Ring
from megalite.parallel.largest_logits import Measure
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite.parallel.stage_module import Inside
from megalite.parallel.transfer import exchange_rows_async
from megalite_kernels.attention import Kept, Mask, draw_kept, same_width
from megalite_kernels.attention_parts import attend, part_gradients
from megalite_kernels.attention_sink import sink_gradient, with_sink
from megalite_kernels.dropout_mask import DropoutMask
from megalite_kernels.products import rounded


class Expansion(Protocol):
    """Maker of keys and values of latents, which travel in their place."""

    weight: Tensor
    """The weight by which it does so."""

    def keys_and_values(self, block: Tensor) -> Tensor:
        """Return [2, batch, heads, tokens, width] from a block of latents [1, batch, 1, tokens, latent width]."""

    def gradient(self, block: Tensor, of_keys_and_values: Tensor) -> Tensor:
        """Return the gradient of a block, in fp32 or wider, and keep that of the weight."""

    def of_weight(self) -> Tensor | None:
        """Hand the gradient of the weight over, of all blocks, or return it if the weight has no buffer."""


class _Calls(NamedTuple):
    """Arguments of attention by parts, other than tensors of the graph.

    Attributes:
        exchange: the way in which keys and values arrive.
        groups: the key-value group of each head, [heads]; None if each serves equally many consecutive heads.
        dropout: the rows of the probabilities' mask of this rank's queries; None without dropout.
        length: number of tokens of the sample.
        expansion: makes keys and values of what travels in their place; None: they travel themselves.
        measure: takes in the logits of a part; None: nobody asks for them.
    """

    rounds: Sequence[MaskedRound]
    exchange: KeyValueExchange
    groups: Tensor | None
    scale: float
    cap: float | None
    dropout: DropoutMask | None
    length: int
    expansion: Expansion | None = None
    measure: Callable[..., None] | None = None

    def draw(self, query: Tensor) -> Tensor | None:
        """Draw the probabilities that dropout keeps, [batch, heads, queries, tokens of the sample]."""
        return None if self.dropout is None else draw_kept(self.dropout, query, self.length)

    def options(self, keys: Runs, part: Part, drawn: Tensor | None, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of a call. `keys`: the tokens that are present in its round."""
        kept = None
        if drawn is not None and self.dropout is not None:
            places = torch.cat([torch.arange(run.start, run.stop) for run in keys])[part.keys]
            kept = Kept(drawn[:, :, part.queries][..., places].to(device), self.dropout.scale)
        return {"scale": self.scale, "cap": self.cap, "kept": kept}

    def made(self, block: Tensor) -> Tensor:
        """Return the keys and values of a block that has arrived."""
        return block if self.expansion is None else self.expansion.keys_and_values(block)

    def keys_of(self, block: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Return keys and values of a part, [batch, groups or heads, keys, width] each."""
        found = block[:, :, :, part.keys]
        key, value = (found if self.groups is None else found[:, :, self.groups]).unbind(0)
        return key, value


class _AttentionByParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, travelling: Tensor, weight: Tensor | None, sink: Tensor | None, calls: _Calls
    ) -> Tensor:
        """Attend to the blocks of keys as they arrive, and merge the parts by their log-sum-exp, in fp32 or wider."""
        batch, heads, tokens, width = query.shape
        # Tokens come first in memory, so that the caller's output is a view of the one that backward keeps.
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(tokens, batch, heads, width, dtype=wide, device=query.device).permute(1, 2, 0, 3)
        lse = torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device)
        begun = np.zeros(query.shape[2], dtype=np.bool_)
        prepared, drawn = calls.exchange.prepare(travelling), calls.draw(query)
        for block, (keys, parts) in zip(calls.exchange.blocks(prepared), calls.rounds, strict=True):
            block = calls.made(block)
            for part, mask in parts:
                rows, (key, value) = part.queries, calls.keys_of(block, part)
                if calls.measure is not None:
                    calls.measure(query[:, :, rows], key, mask, calls.scale, rows)
                options = calls.options(keys, part, drawn, query.device)
                found = attend(query[:, :, rows], key, value, mask, **options)
                if begun[rows].any():
                    _merge_(output[:, :, rows], lse[:, :, rows], *found)
                else:
                    output[:, :, rows], lse[:, :, rows] = found
                begun[rows] = True
        if sink is not None:
            output, lse = with_sink(output, lse, sink)
        output = rounded(output, query.dtype)
        ctx.calls = calls
        ctx.save_for_backward(query, prepared, output, lse, sink)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, and of keys and values as their blocks come by once more."""
        (query, prepared, output, lse, sink), calls, gradient = ctx.saved_tensors, ctx.calls, gradients[0]
        query, prepared = query.detach(), prepared.detach()
        of_query, total = torch.zeros(query.shape, dtype=lse.dtype, device=query.device), calls.exchange.gradient_sum()
        drawn, expansion = calls.draw(query), calls.expansion
        for block, (keys, parts) in zip(calls.exchange.blocks(prepared), calls.rounds, strict=True):
            arrived, block = block, calls.made(block)
            of_block = torch.zeros(block.shape, dtype=lse.dtype, device=block.device)
            for part, mask in parts:
                rows, (key, value) = part.queries, calls.keys_of(block, part)
                own, *others = part_gradients(
                    gradient[:, :, rows],
                    query[:, :, rows],
                    key,
                    value,
                    output[:, :, rows],
                    lse[:, :, rows],
                    mask,
                    **calls.options(keys, part, drawn, query.device),
                )
                of_query[:, :, rows] += own
                for place, of_keys in zip(of_block[:, :, :, part.keys].unbind(0), others, strict=True):
                    if calls.groups is None:
                        place += of_keys
                    else:
                        place.index_add_(1, calls.groups, of_keys.to(place.dtype))
            total.add(of_block if expansion is None else expansion.gradient(arrived, of_block))
        of_sink = None if sink is None else sink_gradient(gradient, output, lse, sink.detach())
        of_weight = None if expansion is None else expansion.of_weight()
        return of_query.to(query.dtype), total.total().to(prepared.dtype), of_weight, of_sink, None


def _merge_(output: Tensor, lse: Tensor, of_part: Tensor, lse_of_part: Tensor) -> None:
    """Merge the output and the log-sum-exp of a part into those of the parts before, in fp32 or wider."""
    merged = torch.logaddexp(lse, lse_of_part)
    base = merged.masked_fill(merged == -math.inf, 0.0)  # a query that sees no key yet
    output.mul_(torch.exp(lse - base)[..., None])
    output.addcmul_(of_part.to(output.dtype), torch.exp(lse_of_part - base)[..., None])
    lse.copy_(merged)


class ContextParallelCore:
    """Attention core of a layer under context parallelism. `__call__` takes the arguments of `LocalCore`.

    Attributes:
        inner: the core of the heads that this rank computes, with all keys and values.
        head_exchange: the ranks that exchange heads for tokens; one rank if none do.
        others: the ranks whose keys and values arrive by a ring or a gather; one rank if there are none.
        gathers: True for a gather instead of a ring.
    """

    def __init__(self, local: LocalCore, context: ParallelContext, way: AttentionWay) -> None:
        mesh = context.mesh
        ranks, at = mesh.ranks("cp"), mesh.coordinate("cp")
        block = at // way.head_ranks * way.head_ranks
        self.gathers = way.gathers
        self.head_exchange = mesh.group_of(ranks[block : block + way.head_ranks])
        self.others = mesh.group_of(ranks[at % way.head_ranks :: way.head_ranks])
        size, heads = way.head_ranks, len(local.heads)
        if heads % size:
            raise ValueError(f"{heads} heads cannot be exchanged between {size} ranks")
        own = [list(range(rank * heads // size, (rank + 1) * heads // size)) for rank in range(size)]
        self._heads_of = own
        self._groups_of = [sorted({local.groups[head] for head in of_rank}) for of_rank in own]
        mine, groups = own[self.head_exchange.rank], self._groups_of[self.head_exchange.rank]
        self.inner = replace(
            local,
            heads=range(local.heads.start + mine[0], local.heads.start + mine[-1] + 1),
            groups=[groups.index(local.groups[head]) for head in mine],
        )
        self._groups = None if self.inner.groups_are_even else torch.tensor(self.inner.groups, device=mesh.device)
        count = max(local.groups) + 1
        self._sent = [
            [*heads_of, *(heads + group for group in needed), *(heads + count + group for group in needed)]
            for heads_of, needed in zip(own, self._groups_of, strict=True)
        ]
        """The rows of queries, keys and values, one after the other, that each rank gets when heads are exchanged."""
        order = [row for rows in self._sent for row in rows] if self.head_exchange.size > 1 else []
        self._order = torch.tensor(order, dtype=torch.int64, device=mesh.device)

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        exchanged = [] if self.head_exchange.size == 1 else [Inside("heads", "cp")]
        between = [] if self.others.size == 1 else (Gather if self.gathers else Ring).inside(self.others)
        back = [] if self.head_exchange.size == 1 else [Inside("outputs of heads", "cp")]
        return [*exchanged, *between, *back]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | Expansion,
        mask: Mask | SampleMask,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None = None,
        measure: Measure | None = None,
    ) -> Tensor:
        """Compute attention, as `LocalCore.__call__` does.

        Args:
            key: keys, or latents [tokens, batch, latent width] of which each rank makes keys and values.
            value: values, or what makes them; the latter only where no heads are exchanged.
            mask: a `SampleMask`.
        """
        assert isinstance(mask, SampleMask), "the samples of this micro-batch are not cut"
        if not isinstance(value, Tensor):
            travelling = key.transpose(0, 1)[None, :, None]
            return self._by_parts(query, travelling, mask, layout, random, None, measure, expansion=value)
        if query.shape[-1] != (width := value.shape[-1]):  # keys and values travel in one tensor
            query, key, value = same_width(query, key, value)
            output = self(query, key, value, mask, layout, random, sink, measure)
            return output.unflatten(-1, (-1, query.shape[-1]))[..., :width].flatten(2)
        size = self.head_exchange.size
        if size == 1:
            return self._attend(query, key, value, mask, layout, random, sink, measure)
        query, key, value = self._exchange_heads(query, key, value, layout)
        layout_of_group, mine = layout.grouped(size), self._heads_of[self.head_exchange.rank]
        sink = None if sink is None else sink[mine[0] : mine[-1] + 1]
        output = self._attend(query, key, value, mask, layout_of_group, random, sink, measure)
        return self._return_heads(output, layout)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: SampleMask,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None,
        measure: Measure | None,
    ) -> Tensor:
        """Compute attention over the other ranks' keys, by parts where the mask and the device allow it."""
        if self.others.size == 1:
            return self.inner(query, key, value, mask.of_whole, layout, random, sink, measure)
        key_value = torch.stack([key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)])
        return self._by_parts(query, key_value, mask, layout, random, sink, measure)

    def _by_parts(
        self,
        query: Tensor,
        travelling: Tensor,
        mask: SampleMask,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None,
        measure: Measure | None,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """Compute attention to what travels [2 or 1, batch, groups or 1, tokens, width] as it arrives."""
        inner, dropout = self.inner, None
        if random is not None and inner.dropout > 0.0:
            dropout = random.dropout_mask(inner.dropout, inner.site, layout.rows_of(inner.heads))
        calls = _Calls(
            mask.rounds(layout, gathers=self.gathers),
            Gather(self.others, layout) if self.gathers else Ring(self.others),
            self._groups,
            1.0 / math.sqrt(query.shape[-1]) if inner.scale is None else inner.scale,
            inner.cap,
            dropout,
            layout.length,
            expansion,
            None if measure is None else functools.partial(measure, inner.heads, layout),
        )
        weight = None if expansion is None else expansion.weight
        output: Tensor = _AttentionByParts.apply(query.permute(1, 2, 0, 3), travelling, weight, sink, calls)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _exchange_heads(
        self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [tokens, batch, heads or groups, width] for all tokens of the group and this rank's heads."""
        rank, size = self.head_exchange.rank, self.head_exchange.size
        rows = torch.cat([query, key, value], dim=2).permute(2, 0, 1, 3)[self._order]
        sent = [len(each) for each in self._sent]
        arrived = exchange_rows_async(rows, sent, [sent[rank]] * size, self.head_exchange, "heads of attention")()
        by_rank = arrived.unflatten(0, (size, -1)).permute(0, 2, 3, 1, 4).unbind(0)
        whole = self._of_group(layout).in_order(by_rank, dimension=0)
        own, needed = len(self._heads_of[rank]), len(self._groups_of[rank])
        query, key, value = whole.split([own, needed, needed], dim=2)
        return query, key, value

    def _return_heads(self, output: Tensor, layout: SequenceLayout) -> Tensor:
        """Return outputs [tokens of the group, batch, heads * width] to the ranks of their tokens, with all heads."""
        size, own = self.head_exchange.size, len(self._heads_of[0])
        by_rank = self._of_group(layout).by_rank(output.unflatten(2, (own, -1)), dimension=0)
        rows = torch.cat([each.permute(2, 0, 1, 3) for each in by_rank])
        arrived = exchange_rows_async(rows, [own] * size, [own] * size, self.head_exchange, "outputs of heads")()
        return arrived.permute(1, 2, 0, 3).flatten(2)

    def _of_group(self, layout: SequenceLayout) -> SequenceLayout:
        """Return the layout of the ranks that exchange heads, with the tokens of the group counted from 0."""
        size = self.head_exchange.size
        first = layout.rank // size * size
        members = layout.of_ranks[first : first + size]
        start_in_group, length = {}, 0
        for run in sorted(sum(members, ()), key=lambda run: run.start):
            start_in_group[run.start] = length
            length += len(run)
        counted = tuple(
            tuple(range(start_in_group[run.start], start_in_group[run.start] + len(run)) for run in runs)
            for runs in members
        )
        return SequenceLayout(length, counted, self.head_exchange.rank)
