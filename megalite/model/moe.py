"""Mixture of experts: a feed-forward layer of E experts, of which each token uses k (arXiv:1701.06538).

Experts are split over the ranks ("ep", "etp"), and tokens travel to them (`parallel/dispatch.py`). The token's weight
for an expert is applied between activation and down-projection, so that neither outputs nor activations need to be
saved. Shared experts are one dense layer that processes every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.adapters import AdaptersConfig
from megalite.model.batch import LayerContext
from megalite.model.mlp import MLP, FeedForwardSizes
from megalite.model.router import Router
from megalite.parallel import collectives
from megalite.parallel.adapter import Adaptable
from megalite.parallel.context import ParallelContext
from megalite.parallel.dispatch import Dispatcher, PaddedRows
from megalite.parallel.grouped import ExpertRows, activated_grouped_linear, grouped_bias, grouped_linear
from megalite.parallel.linear import ReplicatedLinear
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Constant, LogicalTensor, Normal
from megalite.parallel.stage import TermSums
from megalite.parallel.stage_module import Inside


class Experts(Adaptable):
    """This rank's experts: down(weight * activation(up(x))), or down(weight * activation(gate(x)) * up(x))."""

    lacks = ("lora_dropout", "use_dora")

    def __init__(self, context: ParallelContext, name: str, experts: int, sizes: FeedForwardSizes) -> None:
        super().__init__()
        hidden, ffn, draw = sizes.hidden, sizes.ffn, Normal(sizes.std)
        self.activation = partial(sizes.function, bias=None)
        if sizes.activation.gated:
            pattern = "experts two ffn hidden -> (experts two) ffn hidden"
            up = LogicalTensor(f"{name}.gate_up", (experts, 2, ffn, hidden), draw, True, pattern)
            up_bias = LogicalTensor(f"{name}.gate_up_bias", (experts, 2, ffn), Constant(0.0), False)
        else:
            up = LogicalTensor(
                f"{name}.up", (experts, ffn, hidden), draw, True, "experts ffn hidden -> experts ffn hidden"
            )
            up_bias = LogicalTensor(f"{name}.up_bias", (experts, ffn), Constant(0.0), False)
        dimension = len(up.shape) - 2
        pattern = "experts hidden ffn -> experts hidden ffn"
        down = LogicalTensor(f"{name}.down", (experts, hidden, ffn), Normal(sizes.output_std), True, pattern)
        down_bias = LogicalTensor(f"{name}.down_bias", (experts, hidden), Constant(0.0), False)
        self.up = context.parameter(context.split(up, {0: "experts", dimension: "expert ffn"}))
        self.down = context.parameter(context.split(down, {0: "experts", 2: "expert ffn"}))
        self.up_bias = self.down_bias = None
        if sizes.bias:
            self.up_bias = context.parameter(context.split(up_bias, {0: "experts", dimension: "expert ffn"}))
            # Only the first rank of an expert adds it, so the ranks' gradients are summed.
            added_once = replace(context.split(down_bias, {0: "experts"}), grad_is_partial=True)
            self.down_bias = context.parameter(added_once)
        self.over = context.group("expert ffn")
        self.adds_bias = self.over.rank == 0
        # One scale for all rows of an expert would follow from which micro-batches the ranks have.
        if context.rounding is not None and not context.rounding.recipe.block:
            context = replace(context, rounding=None)
        self.products = context.products(rows=self.over)
        """Products with the first matrix."""
        self.count = self.up.sharding.pieces[0].box.size[0]
        """Number of experts on this rank."""
        self.up_product: Callable[..., Tensor] = partial(grouped_linear, products=self.products)
        of_down = context.products(columns=self.over)
        self.products.take(self.up, self.count)
        of_down.take(self.down, self.count)
        self.down_product: Callable[..., Tensor] = partial(activated_grouped_linear, products=of_down)
        shares_rows = context.rounding is not None and context.rounding.recipe.name == "nvfp4" and self.over.size > 1
        self.inside = [Inside("largest values of rows", "etp")] if shares_rows else []
        self.gated, self._down_adapter = sizes.activation.gated, cast(int | None, None)
        self._up_adapters: dict[int, int] = {}
        """Numbers of the adapters of the first matrix, or of its gate and of the rest."""

    def forward(self, rows: Tensor, weights: Tensor, groups: ExpertRows) -> Tensor:
        """Apply each row's expert, times its weight: [rows, hidden] and [rows] to [rows, hidden], sorted by expert.

        With expert tensor parallelism, the result is this rank's part of the sum over the inner width.
        """
        inner = self.up_product(rows, self.up, groups)
        if self._up_adapters:
            inner = inner + self._up_update(rows, groups)
        if self.up_bias is not None:
            inner = inner + grouped_bias(self.up_bias, groups, inner.shape[1])
        number = self._down_adapter
        outputs = self.down_product(inner, weights, self.activation, self.down, groups, keeps_values=number is not None)
        if number is not None:
            small = activated_grouped_linear(inner, weights, self.activation, self.a_of_experts[number], groups)
            outputs = outputs + self._scale * grouped_linear(small, self.b_of_experts[number], groups)
        if self.down_bias is not None:
            bias = grouped_bias(self.down_bias, groups, outputs.shape[1])
            outputs = outputs + (bias * (weights * self.adds_bias)[:, None]).to(outputs.dtype)
        return outputs

    def weights_to_adapt(self) -> list[Parameter]:
        return [self.up, self.down]

    def adapt(self, config: AdaptersConfig) -> list[str]:
        """See `Adaptable`. Each matrix has factors of its own, since rows are multiplied by expert."""
        assert config.lora_rank is not None
        rank, chosen = config.lora_rank, self.chosen(config)
        self.a_of_experts, self.b_of_experts = nn.ParameterList(), nn.ParameterList()
        for number, matrix in enumerate(chosen):
            is_down = matrix.tensor == self.down.sharding.pieces[0].tensor
            weight, with_a, with_b = (self.down, None, self.over) if is_down else (self.up, self.over, None)
            self.a_of_experts.append(matrix.a(rank).beside(weight, with_a))
            self.b_of_experts.append(matrix.b(rank).beside(weight, with_b))
            if is_down:
                self._down_adapter = number
            else:
                self._up_adapters[0 if matrix.part is None else matrix.part[1]] = number
        self._scale = config.lora_scale
        return [matrix.name for matrix in chosen]

    def _up_update(self, rows: Tensor, groups: ExpertRows) -> Tensor:
        """Return what adapters add to the inner states: [rows, ffn], or [rows, 2 * ffn] with a gate."""
        parts: list[Tensor | None] = [None] * (2 if self.gated else 1)
        for part, number in self._up_adapters.items():
            small = grouped_linear(rows, self.a_of_experts[number], groups)
            parts[part] = self._scale * grouped_linear(small, self.b_of_experts[number], groups)
        some = next(part for part in parts if part is not None)
        return torch.cat([torch.zeros_like(some) if part is None else part for part in parts], dim=1)


def _latent_linears(
    context: ParallelContext, name: str, latent: int, sizes: FeedForwardSizes
) -> tuple[ReplicatedLinear, ReplicatedLinear]:
    """Make the layer that narrows tokens before they travel, and the one that widens the sum of their experts."""
    hidden = sizes.hidden
    down = LogicalTensor(
        f"{name}.latent_down", (latent, hidden), Normal(sizes.std), True, "latent hidden -> 1 latent hidden"
    )
    up = LogicalTensor(
        f"{name}.latent_up", (hidden, latent), Normal(sizes.output_std), True, "hidden latent -> 1 hidden latent"
    )
    made = []
    for weight in (down, up):
        bias = LogicalTensor(f"{weight.name}_bias", weight.shape[:1], Constant(0.0), False)
        placed = context.replicated(bias) if sizes.bias else None
        made.append(ReplicatedLinear(context, context.replicated(weight), placed))
    return made[0], made[1]


class MoE(nn.Module):
    """Feed-forward layer of routed experts, and of shared experts if there are any.

    Attributes:
        recompute: save only the layer's input for backward, which then runs forward again.
    """

    recompute = False

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        router: Router,
        sizes: FeedForwardSizes,
        *,
        shared: FeedForwardSizes | None = None,
        shared_gate: bool = False,
        latent: int | None = None,
        overlaps_shared_experts: bool = False,
        dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall",
        padded: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            sizes: those of each expert; `hidden` is the width of the layer's input.
            shared: those of the shared experts together; None for none.
            shared_gate: multiply the output of the shared experts with a sigmoid gate.
            latent: width of tokens on their way to the experts and back; None for that of the input.
            overlaps_shared_experts: compute them while tokens are on their way.
            dispatcher: see `--moe-token-dispatcher-type`.
            padded: pad the rows of each expert to its capacity.
        """
        super().__init__()
        self.router = router
        self.latent_down = self.latent_up = None
        if latent is not None:
            self.latent_down, self.latent_up = _latent_linears(context, name, latent, sizes)
        self.experts = Experts(context, name, router.num_experts, replace(sizes, hidden=latent or sizes.hidden))
        self.shared_experts = None if shared is None else MLP(context, f"{name}.shared", shared)
        self.shared_gate = None
        if shared_gate:
            gate = LogicalTensor(f"{name}.shared_gate", (1, sizes.hidden), Normal(sizes.std), True)
            self.shared_gate = context.parameter(context.replicated(gate))
        mesh = context.mesh
        # Without sequence parallelism, all tensor-parallel ranks have the same tokens, and nothing travels.
        self.replicas = mesh.group("tp") if mesh.size("tp") > 1 and not context.sequence_parallel else None
        if self.replicas is not None and (mesh.size("ep"), mesh.size("etp")) != (1, mesh.size("tp")):
            raise ValueError("without sequence parallelism, experts can only be split over the tensor-parallel ranks")
        group = Group((mesh.rank,), 0) if self.replicas is not None else context.group("experts", "expert ffn")
        self.dispatcher = Dispatcher(
            group,
            router.num_experts,
            parts=1 if self.replicas is not None else mesh.size("etp"),
            kind=dispatcher,
        )
        self.overlaps_shared_experts = overlaps_shared_experts
        self.padded = padded
        self.ranks_per_sample = context.ranks_per_sample(group.ranks)

    @property
    def inside(self) -> list[Inside]:
        """The collectives of forward with the ranks that share samples, and with those that share the experts."""
        called = self.dispatcher.collectives(self.padded)
        sent = [Inside(name, "ep x etp", int(has_gradient)) for name, has_gradient in called]
        return [*self.router.collectives, *sent]

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        """Apply the layer to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape."""
        if self.recompute and torch.is_grad_enabled():
            output, terms = checkpoint(
                self._apply_experts, hidden, context, use_reentrant=False, preserve_rng_state=False
            )
            return output, terms
        return self._apply_experts(hidden, context)

    def _apply_experts(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        """Send tokens to their experts and bring the outputs back, with the sums of the loss terms."""
        if self.replicas is not None and torch.is_grad_enabled():
            raise ValueError(
                "a layer with experts on several tensor-parallel ranks trains only with sequence parallelism"
            )
        chosen, weights, counts, terms = self.router(hidden, context)
        padded = self._padded_rows(hidden, context.layout.length)
        tokens = hidden if self.latent_down is None else self.latent_down(hidden, context)
        arrive = self.dispatcher.dispatch(tokens.flatten(0, 1), chosen, weights, padded)
        shared = self._shared(hidden, context) if self.overlaps_shared_experts else None
        arrived = arrive()
        output = arrived.combine(self.experts(arrived.rows, arrived.weights, arrived.groups)).view_as(tokens)
        if self.replicas is not None:
            output = collectives.all_reduce_(output, self.replicas)
        if self.latent_up is not None:
            output = self.latent_up(output, context)
        if not self.overlaps_shared_experts:
            shared = self._shared(hidden, context)
        if shared is not None:
            output = output + shared
        if counts is not None:
            output = self.router.tally.count(counts, output)
        return output, terms

    def _padded_rows(self, hidden: Tensor, sequence: int) -> PaddedRows | None:
        """Return the rows that experts are padded to; None if they are not. `sequence`: length of a whole sequence."""
        capacity = self.router.capacity(sequence) if self.padded and self.training else None
        if capacity is None:
            return None
        length, batch, _ = hidden.shape
        received = sum(min(capacity, length * ranks) for ranks in self.ranks_per_sample)
        return PaddedRows(batch * min(capacity, length), batch * received)

    def _shared(self, hidden: Tensor, context: LayerContext) -> Tensor | None:
        """Return the output of the shared experts; None if there are none."""
        if self.shared_experts is None:
            return None
        shared, _ = self.shared_experts(hidden, context)
        return shared if self.shared_gate is None else shared * torch.sigmoid(F.linear(hidden, self.shared_gate))
