"""Self-attention with its heads split over the tensor-parallel ranks, for any ratio of key-value groups to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.config.model import SoftmaxType
from megalite.model.attention_core import LocalCore
from megalite.model.batch import LayerContext
from megalite.model.cache import KeyValueCache
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.heads_norm import HeadsNorm
from megalite.model.norm import LayerNorm
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.largest_logits import LargestLogits, LogitClip, ScaledRows
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import Group
from megalite.parallel.placement import stacked
from megalite.parallel.randomness import Site
from megalite.parallel.sharding import Constant, LogicalTensor, Normal, Sharding
from megalite.parallel.stage_module import Inside
from megalite_kernels.activation import sigmoid_gated
from megalite_kernels.rotary import rotary_embedding


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and options of attention.

    Attributes:
        groups: key-value groups, each for equally many consecutive heads.
        width: width of a head.
        std: standard deviation of the initial weights of queries, keys and values.
        output_std: the same of the output layer.
        bias: biases of queries, keys and values.
        output_bias: bias of the output layer.
        window: number of keys before its own that a token attends to; None for all.
        scale: factor of the scores; None for 1 / sqrt(width).
        cap: soft cap of the scores; None for no cap.
        dropout: dropout probability of attention probabilities.
        rotary_interleaved: rotate channel 2i with 2i + 1, instead of channel i with i + half of the rotated channels.
        rotary: rotate queries and keys by their positions, if the network does.
        output_gate: multiply the output with the sigmoid of a gate, which the input gives like queries.
        softmax_type: softmax over the logits of the keys (vanilla), and for each head a sink, one more logit without a
            value: 0 (off-by-one) or learned (learnable).
    """

    hidden: int
    heads: int
    groups: int
    width: int
    std: float = 0.02
    output_std: float = 0.02
    bias: bool = False
    output_bias: bool = False
    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    dropout: float = 0.0
    rotary_interleaved: bool = False
    rotary: bool = True
    output_gate: bool = False
    softmax_type: SoftmaxType = "vanilla"


def key_value_runs(heads: int, groups: int, ranks: int, rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the key-value groups that `rank` needs for its query heads.

    Each rank has an equal number of consecutive query heads. A group whose heads are on several ranks is replicated on
    all of them.

    Returns:
        Runs of groups with the same ranks: (first group, count, ranks that have these groups).
    """
    local_heads, heads_per_group = heads // ranks, heads // groups
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for group in range(rank * local_heads // heads_per_group, ((rank + 1) * local_heads - 1) // heads_per_group + 1):
        first_head = group * heads_per_group
        sharers = tuple(range(first_head // local_heads, (first_head + heads_per_group - 1) // local_heads + 1))
        if runs and runs[-1][2] == sharers:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, sharers)
        else:
            runs.append((group, 1, sharers))
    return runs


def _key_value(context: ParallelContext, tensor: LogicalTensor, run: tuple[int, int, tuple[int, ...]]) -> Sharding:
    first, count, sharers = run
    ranks = tuple(context.group("heads").ranks[rank] for rank in sharers)
    return context.shared(tensor, range(first, first + count), ranks, columns=max(len(tensor.shape) - 3, 0))


def _query_key_value(
    sizes: AttentionSizes, context: ParallelContext, of_heads: Sequence[LogicalTensor], key_value: LogicalTensor
) -> list[Sharding]:
    """Place queries, perhaps gates of the output, and keys and values.

    The first placement fuses what is `of_heads` with the groups that only this rank has. One more follows for each set
    of ranks that share groups.
    """
    group = context.group("heads")
    runs = key_value_runs(sizes.heads, sizes.groups, group.size, group.rank)
    own = [context.split(tensor, {0: "heads"}, columns=len(tensor.shape) - 2) for tensor in of_heads]
    fused = stacked([*own, *(_key_value(context, key_value, run) for run in runs if len(run[2]) == 1)])
    return [fused, *(_key_value(context, key_value, run) for run in runs if len(run[2]) > 1)]


def _heads_norm(
    context: ParallelContext, name: str, sizes: AttentionSizes, epsilon: float, around_one: bool
) -> HeadsNorm:
    """Make the norm of queries and keys over all heads. Its weights lie where queries and keys do."""
    group, initial = context.group("heads"), Constant(0.0 if around_one else 1.0)
    of_queries, of_keys = (
        LogicalTensor(f"{name}.{part}_norm.weight", (count, sizes.width), initial, False)
        for part, count in (("query", sizes.heads), ("key", sizes.groups))
    )
    runs = key_value_runs(sizes.heads, sizes.groups, group.size, group.rank)
    runs.sort(key=lambda run: len(run[2]) > 1)  # the order of the groups
    return HeadsNorm(
        context,
        context.split(of_queries, {0: "heads"}, columns=0),
        [_key_value(context, of_keys, run) for run in runs],
        [len(sharers) for _, count, sharers in runs for _ in range(count)],
        (sizes.heads * sizes.width, sizes.groups * sizes.width),
        epsilon=epsilon,
        around_one=around_one,
    )


class Attention(nn.Module):
    """Causal multi-head, grouped-query or multi-query attention."""

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        sizes: AttentionSizes,
        *,
        norm: Callable[..., LayerNorm] | None = None,
        norm_over_heads: tuple[float, bool] | None = None,
        layer: int = 0,
        way: AttentionWay | None = None,
        recompute: bool = False,
        clip: LogitClip | None = None,
    ) -> None:
        """Make the layer.

        Args:
            norm: makes the norms of each head's queries and keys, of a context, a name and a width; None for none.
            norm_over_heads: epsilon of an RMSNorm of the queries, and of the keys, of all heads together, and if its
                weights are around one; None for none.
            layer: number among the network's attention layers: that of its dropout.
            way: see `ParallelContext`; None: the default.
            recompute: recompute the core (scores, softmax, weighted values) in backward instead of saving it.
            clip: measure logits for this clip, which has no effect on normalised queries and keys; None: do not.
        """
        super().__init__()
        group = context.group("heads")
        self.head_dim, self.heads = sizes.width, sizes.heads // group.size
        self.window, self.rotary, self.rotary_interleaved = sizes.window, sizes.rotary, sizes.rotary_interleaved
        self.of_heads = [self.heads * self.head_dim] * (2 if sizes.output_gate else 1)
        """Columns of queries, and of gates if there are any."""
        self._make_projections(context, name, sizes)
        pattern, draw = "hidden heads width -> 1 hidden (heads width)", Normal(sizes.output_std)
        output = LogicalTensor(f"{name}.output", (sizes.hidden, sizes.heads, sizes.width), draw, True, pattern)
        output_bias = LogicalTensor(f"{name}.output_bias", (sizes.hidden,), Constant(0.0), False)
        self.output = RowParallelLinear(
            context,
            "heads",
            context.split(output, {1: "heads"}, columns=2),
            context.replicated(output_bias) if sizes.output_bias else None,
        )
        self.query_norm = self.key_norm = None
        if norm is not None:
            # Each rank normalizes its own heads, so these gradients are partial even without sequence parallelism.
            self.query_norm = norm(context, f"{name}.query_norm", sizes.width, of_part=True)
            self.key_norm = norm(context, f"{name}.key_norm", sizes.width, of_part=True)
        self.sink: Tensor | None = None
        if sizes.softmax_type == "learnable":
            sink = LogicalTensor(f"{name}.sink", (sizes.heads,), Normal(sizes.std), False)
            self.sink = context.parameter(context.split(sink, {0: "heads"}, columns=0))
        elif sizes.softmax_type == "off-by-one":
            self.sink = torch.zeros(self.heads, device=context.mesh.device)
        self.heads_norm = None
        if norm_over_heads is not None:
            self.heads_norm = _heads_norm(context, name, sizes, *norm_over_heads)
        self.largest_logits = None
        if clip is not None:
            # A key and its bias are scaled alike, as a query and its bias: logits are products of the two sums.
            scaled = [ScaledRows(f"{name}.query{end}", range(sizes.width), clip.alpha) for end in ("", "_bias")]
            scaled += [ScaledRows(f"{name}.key_value{end}", range(1), 1 - clip.alpha) for end in ("", "_bias")]
            self.largest_logits = LargestLogits(context, clip, sizes.heads, sizes.groups, scaled)
        local = LocalCore(
            heads=range(group.rank * self.heads, (group.rank + 1) * self.heads),
            groups=self._key_value_of_head(sizes, group),
            scale=sizes.scale,
            cap=sizes.cap,
            dropout=sizes.dropout,
            site=Site(layer, "attention"),
            recompute=recompute,
        )
        self.core: Callable[..., Tensor] = local
        if context.mesh.size("cp") > 1:
            self.core = ContextParallelCore(local, context, way or AttentionWay())

    def _make_projections(self, context: ParallelContext, name: str, sizes: AttentionSizes) -> None:
        """Make the projections to queries, keys, values and gates: one layer of `query`, `gate` and `key_value`."""
        heads, groups, width, hidden = sizes.heads, sizes.groups, sizes.width, sizes.hidden
        draw, matrices = Normal(sizes.std), "heads width hidden -> 1 (heads width) hidden"
        parts = ["query", "gate"] if sizes.output_gate else ["query"]
        fused, shape = f"{name}.query_key_value", (heads, width, hidden)
        of_heads = [LogicalTensor(f"{name}.{part}", shape, draw, True, matrices, fused=fused) for part in parts]
        matrices, shape_of_groups = "groups two width hidden -> two (groups width) hidden", (groups, 2, width, hidden)
        key_value = LogicalTensor(f"{name}.key_value", shape_of_groups, draw, True, matrices, fused=fused)
        biases: list[Sharding] = []
        if sizes.bias:
            zero = Constant(0.0)
            vectors = [LogicalTensor(f"{name}.{part}_bias", (heads, width), zero, False) for part in parts]
            key_value_bias = LogicalTensor(f"{name}.key_value_bias", (groups, 2, width), zero, False)
            biases = _query_key_value(sizes, context, vectors, key_value_bias)
        weights = _query_key_value(sizes, context, of_heads, key_value)
        self.query_key_value = ColumnParallelLinear(context, "heads", weights, biases)

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the other context-parallel ranks."""
        return list(getattr(self.core, "inside", ()))

    def _key_value_of_head(self, sizes: AttentionSizes, over: Group) -> list[int]:
        """Return the local key-value group of each local query head. `over`: the ranks over which heads are split."""
        runs = key_value_runs(sizes.heads, sizes.groups, over.size, over.rank)
        runs.sort(key=lambda run: len(run[2]) > 1)  # the order of the fused parameter: own groups first
        local = {group: i for i, group in enumerate(g for first, count, _ in runs for g in range(first, first + count))}
        heads_per_group = sizes.heads // sizes.groups
        return [local[(over.rank * self.heads + head) // heads_per_group] for head in range(self.heads)]

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Apply attention to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape."""
        query, key, value, gate = self._project(hidden, context)
        if (cache := context.cache) is not None:
            key, value = cache.of(self, KeyValueCache).extend(key, value, cache)
        random = context.key if self.training else None
        mask, layout = context.masks[self.window], context.layout
        measure = None if self.largest_logits is None else self.largest_logits.of_samples(context.lengths)
        mixed = self.core(query, key, value, mask, layout, random, self.sink, measure)
        return self.output(mixed if gate is None else sigmoid_gated(mixed, gate), context)

    def _project(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values, and gates if there are any.

        Queries are [sequence, batch, heads, head_dim], keys and values [sequence, batch, groups, head_dim], gates
        [sequence, batch, heads * head_dim].
        """
        projected = self.query_key_value(hidden, context)
        # One split and one unbind: each slice would have a gradient of the full width, and autograd would add them.
        rest = projected.shape[-1] - sum(self.of_heads)
        query, *gates, key_value = projected.split([*self.of_heads, rest], dim=-1)
        query = query.unflatten(-1, (self.heads, self.head_dim))
        key, value = key_value.unflatten(-1, (-1, 2, self.head_dim)).unbind(dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        elif self.heads_norm is not None:
            query, key = self.heads_norm(query, key)
        rotary = context.rotary if self.window is None else context.windowed_rotary
        if rotary is not None and self.rotary:
            query, key = rotary_embedding(query, key, *rotary, interleaved=self.rotary_interleaved)
            if self.query_norm is None and self.heads_norm is None and not gates:
                value = value.contiguous()  # a view would keep queries and keys as they were before, too
        return query, key, value, gates[0] if gates else None
