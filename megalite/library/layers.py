"""Parallel layers for models of one's own (docs/parallel_layers.md), made of those of the GPT.

Activations are [sequence, batch, features], as `nn.MultiheadAttention` has them by default. With sequence parallelism,
those between the layers' matrix products are this rank's part of the sequence, `[sequence / tp, batch, features]`.
With context parallelism, the sequence is the part that the context-parallel rank has, and a sample is whole.

`name` is the tensor's name in checkpoints, and the key of its random initial values: unique in the model, on all ranks
the same. Weights are drawn from a normal distribution, so they are equal under every layout; biases are zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.model.attention import Attention, AttentionSizes
from megalite.model.rotary import plain_frequencies, tables_of
from megalite.model.sample_mask import SampleMask
from megalite.modules.sequences import layout_of
from megalite.parallel import collectives, cross_entropy, embedding, linear
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.placement import stacked
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Constant, LogicalTensor, Normal, Sharding
from megalite_kernels.attention import Mask, dense_mask
from megalite_kernels.loss_options import LossOptions
from megalite_kernels.rotary import rotary_embedding

MATRIX = "rows columns -> 1 rows columns"


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """`nn.Linear` whose output features are divided over the tensor-parallel ranks: for queries, or the first of two
    layers. `RowParallelLinear` takes its output.

    >>> from megalite.parallel.mesh import ParallelMesh
    >>> layer = ColumnParallelLinear(ParallelContext(ParallelMesh()), "up", 4, 8)
    >>> tuple(layer(torch.zeros(3, 2, 4)).shape)
    (3, 2, 8)
    """

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        std: float = 0.02,
        vocabulary: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            std: standard deviation of the initial weights.
            vocabulary: the outputs are logits of a vocabulary, for `vocab_parallel_cross_entropy`. Its size need not be
                a multiple of the ranks: the last outputs are padding.
        """
        size = context.group("vocabulary").size
        padded = -(-out_features // size) * size if vocabulary else out_features
        _check_division(context, name, "out_features", padded)
        pattern = None if vocabulary else MATRIX
        weight = LogicalTensor(f"{name}.weight", (out_features, in_features), Normal(std), True, pattern, vocabulary)
        vector = LogicalTensor(f"{name}.bias", (out_features,), Constant(0.0), False)
        super().__init__(
            context,
            "ffn",
            [context.split(weight, {0: "ffn"}, padded=padded)],
            [context.split(vector, {0: "ffn"}, columns=0, padded=padded)] if bias else [],
        )


class RowParallelLinear(linear.RowParallelLinear):
    """`nn.Linear` whose input features are divided over the tensor-parallel ranks, as `ColumnParallelLinear` and
    `ParallelAttention` leave them. Its output is the sum over the ranks, the same on each.
    """

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        std: float = 0.02,
    ) -> None:
        _check_division(context, name, "in_features", in_features)
        weight = LogicalTensor(f"{name}.weight", (out_features, in_features), Normal(std), True, MATRIX)
        vector = LogicalTensor(f"{name}.bias", (out_features,), Constant(0.0), False)
        super().__init__(
            context, "ffn", context.split(weight, {1: "ffn"}), context.replicated(vector) if bias else None
        )


class VocabParallelEmbedding(embedding.VocabParallelEmbedding):
    """`nn.Embedding` whose rows are divided over the tensor-parallel ranks: ids [sequence, batch] to [sequence (/ size
    under sequence parallelism), batch, embedding_dim].
    """

    def __init__(
        self, context: ParallelContext, name: str, num_embeddings: int, embedding_dim: int, *, std: float = 0.02
    ) -> None:
        table = LogicalTensor(
            f"{name}.weight", (num_embeddings, embedding_dim), Normal(std), True, is_embedding_or_output=True
        )
        size = context.group("vocabulary").size
        super().__init__(context, context.split(table, {0: "vocabulary"}, padded=-(-num_embeddings // size) * size))


class ParallelAttention(Attention):
    """Multi-head or grouped-query attention whose heads are divided over the tensor-parallel ranks.

    Tokens of context-parallel ranks see those of the whole sample: a ring passes keys and values on, or all are
    gathered (`Trainer(cp_comm_type=...)`).
    """

    context_parallel = True

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        cross: bool = False,
        bias: bool = True,
        head_dim: int | None = None,
        std: float = 0.02,
        rotary_base: float | None = None,
        window: int | None = None,
    ) -> None:
        """Make the layer.

        Args:
            kv_heads: number of heads of keys and values, each for equally many heads of queries; None for `heads`.
            causal: a token sees none of the tokens after it.
            cross: keys and values are made of another sequence, the second argument of `forward`.
            head_dim: width of a head; None for hidden / heads.
            rotary_base: rotate queries and keys by their positions in the sample, with this base; None: do not.
            window: number of tokens before its own that a token sees, with `causal`; None for all.

        Raises:
            MegaliteError: the heads cannot be divided, or options do not fit together.
        """
        groups, width = kv_heads or heads, head_dim or hidden // heads
        _check_division(context, name, "heads", heads)
        _check_division(context, name, "kv_heads", groups)
        if heads % groups or (head_dim is None and hidden % heads):
            raise MegaliteError(f"{name}: {heads} heads of hidden={hidden}, and kv_heads={groups}: give divisors")
        if cross and (causal or rotary_base is not None):
            raise MegaliteError(f"{name}: attention to another sequence is not causal, and has no rotary_base")
        if window is not None and (window < 0 or not causal):
            raise MegaliteError(f"{name}: window={window} needs causal=True and a number of tokens from 0 on")
        if rotary_base is not None and (rotary_base <= 0 or width % 2):
            raise MegaliteError(f"{name}: rotary_base={rotary_base} needs a number above 0 and heads of even width")
        if causal and heads // context.group("heads").size % (ranks := context.attention_ways[0].head_ranks):
            raise MegaliteError(
                f"{name}: cp_comm_type divides the {heads} heads, after tp, over {ranks} context-parallel ranks, and "
                "that leaves a rest: choose p2p or all_gather"
            )
        self.cross, self.causal = cross, causal
        gather = AttentionWay(gathers=True)  # all that attention which is not causal does
        way = context.attention_ways[0] if causal else gather
        sizes = AttentionSizes(hidden, heads, groups, width, std, std, bias, bias, window)
        super().__init__(context, name, sizes, way=way)
        self.name, self.context, self.rotary_base, self.gathers = name, context, rotary_base, way == gather
        size = context.group("heads").size
        self.columns = [count * width // size for count in (heads, groups, groups)]
        self.shared = groups < heads

    def _make_projections(self, context: ParallelContext, name: str, sizes: AttentionSizes) -> None:
        """Make those of tensors of their own for keys and values: one placement stands for all ranks."""

        def weight(part: str, count: int) -> Sharding:
            pattern = "heads width hidden -> 1 (heads width) hidden"
            shape = (count, sizes.width, sizes.hidden)
            tensor = LogicalTensor(f"{name}.{part}", shape, Normal(sizes.std), True, pattern)
            return context.split(tensor, {0: "heads"})

        def vector(part: str, count: int) -> Sharding:
            tensor = LogicalTensor(f"{name}.{part}_bias", (count, sizes.width), Constant(0.0), False)
            return context.split(tensor, {0: "heads"}, columns=0)

        def projection(**parts: int) -> linear.ColumnParallelLinear:
            weights, vectors = ([make(*part) for part in parts.items()] for make in (weight, vector))
            return linear.ColumnParallelLinear(context, "heads", [stacked(weights)], [stacked(vectors)] * sizes.bias)

        heads, groups = sizes.heads, sizes.groups
        self.key_value = projection(key=groups, value=groups) if self.cross else None
        self.query = projection(query=heads) if self.cross else projection(query=heads, key=groups, value=groups)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Apply attention to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape.

        Args:
            memory: the other sequence, with `cross=True`.
            mask: bool, true where a query sees a key: [batch, 1, queries of the sequence, keys of the sample].
        """
        if self.key_value is None:
            parts = self.query(hidden).split(self.columns, dim=-1)
        else:
            assert memory is not None, "attention with cross=True takes two sequences"
            parts = (self.query(hidden), *self.key_value(memory).split(self.columns[1:], dim=-1))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        layout, device = _cut(self.context, len(query)), query.device
        if self.rotary_base is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            frequencies = plain_frequencies(self.head_dim, self.rotary_base, wide, device)
            tables = tables_of(frequencies, layout.places(device)[None])
            query, key = rotary_embedding(query, key, *tables, interleaved=False)
        if self.causal and mask is None:
            return self.output(self.core(query, key, value, self._seen(layout, device), layout, None))
        if self.context.mesh.size("cp") > 1:
            key, value = self._of_sample(key, value, mask, len(query))
        if self.causal and mask is not None:
            back = layout.places(device)[:, None] - torch.arange(len(key), device=device)
            mask = mask & (back >= 0 if self.window is None else (back >= 0) & (back <= self.window))
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=self.shared)
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))

    def _seen(self, layout: SequenceLayout, device: torch.device) -> Mask | SampleMask:
        """Return the mask of causal attention, within the window if there is one."""
        if self.window is None and self.context.mesh.size("cp") == 1:
            return None
        places = torch.arange(layout.length, device=device)
        first = (torch.zeros_like(places) if self.window is None else (places - self.window).clamp(min=0))[None]

        def whole() -> Mask:
            return None if self.window is None else dense_mask(first)

        if self.context.mesh.size("cp") == 1:
            return whole()
        return SampleMask(layout, first, FirstKeys(window=self.window), whole, in_blocks=False)

    def _of_sample(self, key: Tensor, value: Tensor, mask: Tensor | None, queries: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens of the samples."""
        if not self.gathers:
            raise MegaliteError(f"{self.name}: a mask needs the keys of the sample: choose cp_comm_type all_gather")
        key, value = _of_samples(self.context, torch.stack([key, value], 1)).unbind(1)
        if mask is not None and (mask.shape[-2] not in (1, queries) or mask.shape[-1] != len(key)):
            raise MegaliteError(
                f"{self.name}: mask {tuple(mask.shape)} does not fit {queries} queries of this rank and "
                f"{len(key)} keys of the sample: of a mask, sequence_dims names the queries alone"
            )
        return key, value


def vocab_parallel_cross_entropy(
    context: ParallelContext, logits: Tensor, labels: Tensor, vocab_size: int, *, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the cross entropy of each token, of the shape of `labels`, in fp32 or wider.

    Args:
        logits: the output of a `ColumnParallelLinear(vocabulary=True)`. Backward overwrites them.
        labels: ids, [sequence, batch], of whole sequences.
    """
    options = LossOptions(label_smoothing=label_smoothing)
    return cross_entropy.vocab_parallel_cross_entropy(logits, labels, context.group("vocabulary"), vocab_size, options)


def token_positions(context: ParallelContext, length: int) -> Tensor:
    """Return the positions in the sample of a sequence's tokens, [length] int64: 0, 1, 2, ... unless samples are cut.

    `length`: the number of tokens that this context-parallel rank has.
    """
    places = _cut(context, length).places()
    return places if places.is_meta else places.to(context.mesh.device)


def split_sequence(context: ParallelContext, whole: Tensor) -> Tensor:
    """Return this rank's part of [tokens of a sample, ...] under sequence and context parallelism, otherwise all."""
    try:
        of_rank = layout_of(context.mesh, len(whole)).own(whole, 0)
    except ValueError as error:
        raise MegaliteError(f"{error}, two for each of cp={context.mesh.size('cp')} ranks: pad it") from error
    found: Tensor = _Split.apply(of_rank, context) if context.shards > 1 else of_rank
    return found


def gather_sequence(context: ParallelContext, part: Tensor) -> Tensor:
    """Return the whole [tokens of a sample, ...], the same on all ranks that have parts of it.

    Tensor-parallel ranks must use it alike. Context-parallel ranks may use it differently.
    """
    found: Tensor = _Gather.apply(part, context) if context.shards > 1 else part
    return _of_samples(context, found)


def _of_samples(context: ParallelContext, part: Tensor) -> Tensor:
    """Return all tokens of samples, [tokens, ...], of which each context-parallel rank has a part."""
    group = context.mesh.group("cp")
    found: Tensor = _OfSamples.apply(part, group, _cut(context, len(part))) if group.size > 1 else part
    return found


def _cut(context: ParallelContext, tokens: int) -> SequenceLayout:
    """Return the layout of samples of which each context-parallel rank has this number of tokens."""
    ranks = context.mesh.size("cp")
    if ranks > 1 and tokens % 2:
        raise MegaliteError(
            f"each of cp={ranks} ranks has {tokens} tokens of a sample, which are not two equal chunks: name the field "
            "that they come from in sequence_dims, and let the model add none to them"
        )
    return layout_of(context.mesh, tokens * ranks)


def _own_part(whole: Tensor, context: ParallelContext) -> Tensor:
    part = whole.tensor_split(context.shards)[context.shard]
    return part if part.is_contiguous() else part.contiguous()  # see megalite_kernels/products.py


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, context: ParallelContext) -> Tensor:
        if len(whole) % context.shards:
            raise MegaliteError(f"a sequence of {len(whole)} cannot be split over {context.shards} ranks: pad it")
        ctx.context = context
        return _own_part(whole, context)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.all_gather(gradients[0], ctx.context.mesh.group("tp")), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return collectives.all_gather(part, context.mesh.group("tp"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _own_part(gradients[0], ctx.context), None


class _OfSamples(torch.autograd.Function):
    """Tokens of all context-parallel ranks, in the order of the sample. A part's gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, layout: SequenceLayout) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return layout.in_order(collectives.all_gather(part[None], group).unbind(0), 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wide = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        by_rank = torch.stack(ctx.layout.by_rank(wide, 0))
        return collectives.reduce_scatter(by_rank, ctx.group)[0].to(gradients[0].dtype), None, None


def _check_division(context: ParallelContext, name: str, what: str, size: int) -> None:
    if size % (ranks := context.mesh.size("tp")):
        raise MegaliteError(f"{name}: {what}={size} cannot be divided over {ranks} tensor-parallel ranks")
