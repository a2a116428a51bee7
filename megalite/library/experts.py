"""Mixture of experts for models of one's own (docs/parallel_layers.md), made of the GPT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.errors import MegaliteError
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import make_moe
from megalite.model.router import BALANCING_LOSSES, Z_LOSS
from megalite.modules.stage import mean_over_samples
from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.grouped import ExpertRows
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Sharding
from megalite.parallel.stage import LossTerm

BALANCE = "load_balancing_loss"


class Experts(nn.Module):
    """Mixture of experts: two-layer networks, of which each token uses the `topk` best; divided over `ep` ranks."""

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        hidden: int,
        ffn: int,
        experts: int,
        topk: int = 2,
        *,
        swiglu: bool = False,
        bias: bool = False,
        std: float = 0.02,
    ) -> None:
        """Make the layer. `swiglu`: the inner activation is SwiGLU, with an own gate, in place of GELU (tanh).

        Raises:
            MegaliteError: the experts cannot be divided over the ranks.
        """
        super().__init__()
        mesh = context.mesh
        if experts % mesh.size("ep"):
            raise MegaliteError(f"{name}: {experts} experts cannot be divided over ep={mesh.size('ep')} ranks")
        if mesh.size("tp") > 1 and not context.sequence_parallel:
            raise MegaliteError(f"{name}: experts on several tensor-parallel ranks need Layout(sequence_parallel=True)")
        config = ModelConfig(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=1,
            num_experts=experts,
            moe_ffn_hidden_size=ffn,
            moe_router_topk=topk,
            moe_router_load_balancing_type=("seq_aux_loss",),
            moe_aux_loss_coeff=(1.0,),
            moe_z_loss_coeff=1.0,
            moe_token_dispatcher_type="alltoall",
            swiglu=swiglu,
            add_bias_linear=bias,
            init_method_std=std,
        )
        self.moe, self.context = make_moe(config, context, 0), context
        for parameter in self.moe.parameters():
            assert isinstance(parameter, Parameter)
            parameter.sharding = _renamed(parameter.sharding, "layers.0.moe", name)

    @staticmethod
    def terms(balance: float = 0.0, z: float = 0.0) -> tuple[LossTerm, ...]:
        """Return the terms of the loss of all layers of experts, with their weights, for `Trainer(terms=...)`.

        `load_balancing_loss` is experts * sum over experts of share of choices * mean probability, in each sample
        (arXiv:2412.19437); `moe_z_loss` is the mean square of logsumexp of the router's logits (arXiv:2202.08906). Both
        are means over samples.
        """
        return mean_over_samples(BALANCE, balance), mean_over_samples(Z_LOSS, z)

    def train(self, mode: bool = True) -> Experts:
        super().train(mode)
        self.moe.router.train()  # evaluations have the terms of the loss, too
        return self

    def forward(self, hidden: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Apply the layer to [sequence (/ size under sequence parallelism), batch, hidden], keeping this shape.

        Returns:
            The output, and the sums of the terms of the loss over this rank's tokens, and those of its tensor-parallel
            peers, for a `StageOutput`.
        """
        if hidden.is_meta:  # where tokens go is not known: all are one expert's
            return self._as_if_sent(hidden), {}
        mesh = self.context.mesh
        length = len(hidden) * self.context.shards * mesh.size("cp")
        whole = SequenceLayout.whole(length)
        output, sums = self.moe(hidden, LayerContext(None, None, {}, RandomKey(0, ()), whole, whole.runs))
        group = mesh.group("tp") if self.context.sequence_parallel else Group((mesh.rank,), 0)
        of_sequences = BALANCING_LOSSES["seq_aux_loss"].name
        balance, z = (_SumOverRanks.apply(sums[each], group) for each in (of_sequences, Z_LOSS))
        return output, {BALANCE: balance, Z_LOSS: z / length}

    def _as_if_sent(self, hidden: Tensor) -> Tensor:
        experts, topk = self.moe.experts, self.moe.router.rule.topk
        rows = hidden.flatten(0, 1).repeat_interleave(topk, dim=0)
        ends = torch.full((self.moe.dispatcher.local_experts,), len(rows), dtype=torch.int32, device=hidden.device)
        found: Tensor = experts(rows, rows[:, 0], ExpertRows((0, *[len(rows)] * len(ends)), ends))
        return found.unflatten(0, (-1, topk)).sum(1).view_as(hidden)


class _SumOverRanks(torch.autograd.Function):
    """Sum of the ranks' parts of a term, which each rank has a gradient of only by its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return collectives.all_reduce_(part.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _renamed(sharding: Sharding, old: str, new: str) -> Sharding:
    pieces = tuple(
        replace(piece, tensor=replace(piece.tensor, name=new + piece.tensor.name.removeprefix(old)))
        for piece in sharding.pieces
    )
    return replace(sharding, pieces=pieces)
