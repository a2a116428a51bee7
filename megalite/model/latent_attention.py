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
from torch import Tensor, nn

from megalite.model.attention_core import LocalCore
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.context_parallel import ContextParallelCore, Expansion
from megalite.model.norm import LayerNorm
from megalite.model.sample_mask import SampleMask
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, shared_by_heads
from megalite.parallel.placement import stacked
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import sigmoid_gated, soft_cap
from megalite_kernels.attention import Mask
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


class LatentAttention(nn.Module):
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
    ) -> None:
        """Make the layer.

        Args:
            norm: makes the norms of the latents, of a context, a name and a width; None for none.
            layer: number among the network's layers of this kind: that of its dropout.
            way: see `ParallelContext`; None: the default.
            recompute: recompute the core (scores, softmax, weighted values) in backward instead of saving it.
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
        local = LocalCore(
            heads=range(group.rank * self.heads, (group.rank + 1) * self.heads),
            groups=range(self.heads),
            scale=sizes.scale,
            cap=sizes.cap,
            dropout=sizes.dropout,
            site=Site(layer, "attention"),
            recompute=recompute,
        )
        self.core: Callable[..., Tensor] = local
        self.travelling: ContextParallelCore | None = None
        """The core to whose other ranks latents travel, and not the keys and values that they would make of them."""
        if context.mesh.size("cp") > 1:
            self.core = core = ContextParallelCore(local, context, way or AttentionWay())
            width = max(sizes.query_width, sizes.value_width)
            if core.head_exchange.size == 1 and sizes.rank + sizes.rotated < 2 * self.heads * width:
                self.travelling = core

    def _make_projections(self, context: ParallelContext, name: str, sizes: LatentSizes) -> None:
        """Make the matrices: downs together, those of the layer's input to the heads together, ups and output apart."""
        heads, hidden, draw = sizes.heads, sizes.hidden, Normal(sizes.std)

        def down(part: str, width: int) -> LogicalTensor:
            return LogicalTensor(f"{name}.{part}", (width, hidden), draw, True, "width hidden -> 1 width hidden")

        def of_heads(part: str, width: int, input: int) -> LogicalTensor:
            matrix = "heads width input -> 1 (heads width) input"
            return LogicalTensor(f"{name}.{part}", (heads, width, input), draw, True, matrix)

        def projection(*parts: LogicalTensor, shared: bool) -> ColumnParallelLinear:
            places = [context.split(part, {0: "heads"}) for part in parts]
            return ColumnParallelLinear(context, "heads", [stacked(places)], input_is_shared=shared)

        downs = [down("key_value_down", sizes.rank + sizes.rotated)]
        of_input = [of_heads("gate", sizes.value_width, hidden)] if sizes.output_gate else []
        self.query_up = None
        if sizes.query_rank is None:
            of_input.insert(0, of_heads("query", sizes.query_width, hidden))
        else:
            downs.insert(0, down("query_down", sizes.query_rank))
            self.query_up = projection(of_heads("query_up", sizes.query_width, sizes.query_rank), shared=True)
        self.down = ReplicatedLinear(context, stacked([context.replicated(each) for each in downs]), None)
        self.of_input = projection(*of_input, shared=False) if of_input else None
        up = of_heads("key_value_up", sizes.key_width + sizes.value_width, sizes.rank)
        self.key_value_up = projection(up, shared=True)
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

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Apply attention. With a cache, tokens also attend to the cached ones."""
        query, gate, latent, rotated_key = self._project(hidden, context)
        mask = context.masks[None]
        kept = None
        if (cache := context.cache) is not None:
            kept = cache.of(self, LatentCache).extend(torch.cat([latent, rotated_key], dim=-1), cache)
            latent, rotated_key = kept.split([self.sizes.rank, self.sizes.rotated], dim=-1)
        if kept is not None and self._absorbing_is_less(len(query), len(kept)):
            assert mask is None or isinstance(mask, Tensor)
            mixed = self._absorbed(query, kept, mask)
        else:
            arguments = mask, context.layout, context.key if self.training else None
            if self.travelling is None:
                mixed = self.core(query, *self._of_heads(latent, rotated_key), *arguments)
            else:
                mixed = self._travelled(query, torch.cat([latent, rotated_key], dim=-1), *arguments)
        return self.output(mixed if gate is None else sigmoid_gated(mixed, gate))

    def _project(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return queries, gates if there are any, latents of keys and values, and rotated keys.

        Queries are [sequence, batch, heads, query width], gates [sequence, batch, heads * value width], latents
        [sequence, batch, rank], and rotated keys [sequence, batch, rotated].
        """
        sizes = self.sizes
        widths = [] if self.query_up is None else [self.query_up.weights[0].shape[1]]
        *of_query, latent, rotated_key = self.down(hidden).split([*widths, sizes.rank, sizes.rotated], dim=-1)
        if self.query_norm is not None:
            of_query = [self.query_norm(each) for each in of_query]
        if self.key_value_norm is not None:
            latent = self.key_value_norm(latent)
        # Together: one collective, whose backward sums the gradients of what the heads of all ranks share.
        shared = torch.cat([*of_query, latent, rotated_key], dim=-1)
        shared = shared_by_heads(shared, self.group, sequence_parallel=self.sequence_parallel)
        *of_query, latent, rotated_key = shared.split([*widths, sizes.rank, sizes.rotated], dim=-1)
        queries = self.heads * sizes.query_width
        projected = None if self.of_input is None else self.of_input(hidden)
        gate = projected
        if self.query_up is not None:
            query = self.query_up(of_query[0])
        else:
            assert projected is not None
            query, gate = projected.split([queries, projected.shape[-1] - queries], dim=-1)
        query = query.unflatten(-1, (self.heads, sizes.query_width))
        if context.rotary is not None:
            plain, rotated = query.split([sizes.key_width, sizes.rotated], dim=-1)
            rotated, key = rotary_embedding(rotated, rotated_key.unsqueeze(2), *context.rotary, interleaved=True)
            query, rotated_key = torch.cat([plain, rotated], dim=-1), key.squeeze(2)
        return query, gate if sizes.output_gate else None, latent, rotated_key

    def _of_heads(self, latent: Tensor, rotated_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [tokens, batch, heads, query width] and values [tokens, batch, heads, value width]."""
        sizes = self.sizes
        of_heads = self.key_value_up(latent).unflatten(-1, (self.heads, sizes.key_width + sizes.value_width))
        key, value = of_heads.split([sizes.key_width, sizes.value_width], dim=-1)
        return torch.cat([key, rotated_key.unsqueeze(2).expand(-1, -1, self.heads, -1)], dim=-1), value

    def _travelled(
        self, query: Tensor, latents: Tensor, mask: Mask | SampleMask, layout: SequenceLayout, random: RandomKey | None
    ) -> Tensor:
        """Attend to the tokens of all context-parallel ranks, whose latents and rotated keys travel."""
        sizes = self.sizes
        width = max(sizes.query_width, sizes.value_width)

        def expand(block: Tensor, weight: Tensor) -> Tensor:
            latent, rotated_key = block[0, :, 0].split([sizes.rank, sizes.rotated], dim=-1)
            of_heads = F.linear(latent, weight).unflatten(-1, (self.heads, sizes.key_width + sizes.value_width))
            key, value = of_heads.split([sizes.key_width, sizes.value_width], dim=-1)
            rest = rotated_key.unsqueeze(2).expand(-1, -1, self.heads, -1)
            key = F.pad(torch.cat([key, rest], dim=-1), (0, width - sizes.query_width))
            return torch.stack([key, F.pad(value, (0, width - sizes.value_width))]).transpose(2, 3)

        assert self.travelling is not None
        query = F.pad(query, (0, width - sizes.query_width))
        expansion = Expansion(expand, self.key_value_up.weights[0])
        output = self.travelling.attend_to_latents(query, latents, expansion, mask, layout, random)
        return output.unflatten(-1, (self.heads, width))[..., : sizes.value_width].flatten(2)

    def _absorbing_is_less(self, queries: int, keys: int) -> bool:
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
        up = self.key_value_up.weights[0].unflatten(0, (self.heads, sizes.key_width + sizes.value_width))
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
