"""Parallel layers for models of one's own (docs/parallel_layers.md), made of those of the GPT.

Activations are [sequence, batch, features], as `nn.MultiheadAttention` has them by default. With sequence parallelism,
those between the layers' matrix products are this rank's part of the sequence, `[sequence / tp, batch, features]`.

`name` is the tensor's name in checkpoints, and the key of its random initial values: unique in the model, on all ranks
the same. Weights are drawn from a normal distribution, so they are equal under every layout; biases are zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.parallel import collectives, cross_entropy, embedding, linear
from megalite.parallel.context import ParallelContext
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import stacked
from megalite.parallel.sharding import Constant, LogicalTensor, Normal, Sharding
from megalite_kernels.cross_entropy import LossOptions
from megalite_kernels.norm import norm

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


class LayerNorm(nn.Module):
    """`nn.LayerNorm` over the last dimension. With sequence parallelism, ranks add up their parts of its gradient."""

    has_bias = True

    def __init__(self, context: ParallelContext, name: str, width: int, eps: float = 1e-5) -> None:
        super().__init__()

        def vector(part: str, value: float) -> Parameter:
            tensor = LogicalTensor(f"{name}.{part}", (width,), Constant(value), weight_decay=False)
            return context.parameter(context.replicated(tensor))

        self.eps, self.weight = eps, vector("weight", 1.0)
        self.bias = vector("bias", 0.0) if self.has_bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., width]."""
        return norm(input, self.weight, self.bias, self.eps)


class RMSNorm(LayerNorm):
    """`nn.RMSNorm` over the last dimension, as `LayerNorm`."""

    has_bias = False


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query attention whose heads are divided over the tensor-parallel ranks."""

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
    ) -> None:
        """Make the layer.

        Args:
            kv_heads: number of heads of keys and values, each for equally many heads of queries; None for `heads`.
            causal: a token sees none of the tokens after it.
            cross: keys and values are made of another sequence, the second argument of `forward`.
            head_dim: width of a head; None for hidden / heads.

        Raises:
            MegaliteError: the heads cannot be divided.
        """
        super().__init__()
        groups, self.width = kv_heads or heads, head_dim or hidden // heads
        _check_division(context, name, "heads", heads)
        _check_division(context, name, "kv_heads", groups)
        if heads % groups or (head_dim is None and hidden % heads):
            raise MegaliteError(f"{name}: {heads} heads of hidden={hidden}, and kv_heads={groups}: give divisors")
        if cross and causal:
            raise MegaliteError(f"{name}: attention to another sequence is not causal")
        self.causal, self.shared = causal, groups < heads

        def weight(part: str, count: int) -> Sharding:
            pattern = "heads width hidden -> 1 (heads width) hidden"
            tensor = LogicalTensor(f"{name}.{part}", (count, self.width, hidden), Normal(std), True, pattern)
            return context.split(tensor, {0: "heads"})

        def vector(part: str, count: int) -> Sharding:
            tensor = LogicalTensor(f"{name}.{part}_bias", (count, self.width), Constant(0.0), False)
            return context.split(tensor, {0: "heads"}, columns=0)

        def projection(**parts: int) -> linear.ColumnParallelLinear:
            weights, vectors = ([make(*part) for part in parts.items()] for make in (weight, vector))
            return linear.ColumnParallelLinear(context, "heads", [stacked(weights)], [stacked(vectors)] * bias)

        self.key_value = projection(key=groups, value=groups) if cross else None
        self.query = projection(query=heads) if cross else projection(query=heads, key=groups, value=groups)
        pattern = "hidden heads width -> 1 hidden (heads width)"
        output = LogicalTensor(f"{name}.output", (hidden, heads, self.width), Normal(std), True, pattern)
        output_bias = LogicalTensor(f"{name}.output_bias", (hidden,), Constant(0.0), False)
        self.output = linear.RowParallelLinear(
            context,
            "heads",
            context.split(output, {1: "heads"}, columns=2),
            context.replicated(output_bias) if bias else None,
        )
        size = context.group("heads").size
        self.columns = [count * self.width // size for count in (heads, groups, groups)]

    def forward(self, hidden: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Apply attention to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape.

        Args:
            memory: the other sequence, with `cross=True`.
            mask: bool, true where a query sees a key: [batch, 1, queries, keys], of whole sequences.
        """
        if self.key_value is None:
            parts = self.query(hidden).split(self.columns, dim=-1)
        else:
            assert memory is not None, "attention with cross=True takes two sequences"
            parts = (self.query(hidden), *self.key_value(memory).split(self.columns[1:], dim=-1))
        query, key, value = (part.unflatten(-1, (-1, self.width)).permute(1, 2, 0, 3) for part in parts)
        if self.causal and mask is not None:
            mask = mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=mask.device).tril()
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.causal and mask is None, enable_gqa=self.shared
        )
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))


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


def split_sequence(context: ParallelContext, whole: Tensor) -> Tensor:
    """Return this rank's part of [sequence, ...] under sequence parallelism, and otherwise all of it."""
    found: Tensor = _Split.apply(whole, context) if context.shards > 1 else whole
    return found


def gather_sequence(context: ParallelContext, part: Tensor) -> Tensor:
    """Return the whole [sequence, ...], the same on all tensor-parallel ranks, which must use it alike."""
    found: Tensor = _Gather.apply(part, context) if context.shards > 1 else part
    return found


def _own_part(whole: Tensor, context: ParallelContext) -> Tensor:
    return whole.tensor_split(context.shards)[context.shard].contiguous()


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


def _check_division(context: ParallelContext, name: str, what: str, size: int) -> None:
    if size % (ranks := context.mesh.size("tp")):
        raise MegaliteError(f"{name}: {what}={size} cannot be divided over {ranks} tensor-parallel ranks")
