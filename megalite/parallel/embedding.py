"""Word embeddings with the vocabulary split over the tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.adapter import Adaptable
from megalite.parallel.adapter_matrices import Matrix, row_factors
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Gradient, Parameter, ProductGradient, RowsGradient, accumulate_grad
from megalite.parallel.sharding import Sharding
from megalite_kernels.products import changed


@dataclass(frozen=True)
class _VocabParallelGradient(Gradient):
    """The gradient of a rank's rows. An output gradient that is split along the sequence is gathered when it is added.

    Attributes:
        rows: the local row of each id.
        outside: True for ids whose rows are on other ranks.
        gather_over: the ranks that split the sequence, or None.
    """

    rows: Tensor
    outside: Tensor
    output_gradient: Tensor
    gather_over: Group | None

    @property
    def kept_bytes(self) -> int:
        return self.rows.nbytes + self.outside.nbytes + self.output_gradient.nbytes

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        gradient = self.output_gradient
        if self.gather_over is not None:
            gradient = collectives.all_gather(gradient, self.gather_over)
        values = gradient.masked_fill(self.outside.unsqueeze(-1), 0.0).reshape(-1, gradient.shape[-1])
        RowsGradient(self.rows.flatten(), values).add_to(target, overwrite=overwrite)


class _VocabParallelRows(torch.autograd.Function):
    """Lookup in a table that is split over ranks. This rank has the ids [first, first + rows)."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, first: int, group: Group, sequence_parallel: bool, use: int
    ) -> Tensor:
        local = ids - first
        outside = (local < 0) | (local >= table.shape[0])
        local = local.masked_fill(outside, 0)
        ctx.table, ctx.use, ctx.gather_over = table, use, group if sequence_parallel else None
        ctx.save_for_backward(local, outside)
        rows = changed(F.embedding(local, table), "masked_fill", outside.unsqueeze(-1), 0.0)
        return collectives.reduce_scatter(rows, group) if sequence_parallel else collectives.all_reduce_(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local, outside = ctx.saved_tensors
        gradient = _VocabParallelGradient(local, outside, gradients[0], ctx.gather_over)
        return accumulate_grad(ctx.table, gradient, ctx.use), None, None, None, None, None


class _AdaptedRows(torch.autograd.Function):
    """`_VocabParallelRows` of a frozen table, with an adapter: rows of the table + scale * rows of B, times A.

    Like the rows of the table, those of B are zero for other ranks' ids. So this rank has a part of the gradient of A.
    """

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        a: Parameter,
        b: Parameter,
        scale: float,
        ids: Tensor,
        first: int,
        group: Group,
        sp: bool,
    ) -> Tensor:
        """Look up, and save the rows of B."""
        local = ids - first
        outside = (local < 0) | (local >= table.shape[0])
        local = local.masked_fill(outside, 0)
        inner = F.embedding(local, b).masked_fill(outside.unsqueeze(-1), 0.0) * scale
        rows = changed(F.embedding(local, table), "masked_fill", outside.unsqueeze(-1), 0.0)
        rows = rows + inner @ a
        ctx.a, ctx.b, ctx.scale, ctx.gather_over = a, b, scale, group if sp else None
        ctx.save_for_backward(local, outside, inner)
        return collectives.reduce_scatter(rows, group) if sp else collectives.all_reduce_(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local, outside, inner = (saved.detach() for saved in ctx.saved_tensors)
        gradient = gradients[0] if ctx.gather_over is None else collectives.all_gather(gradients[0], ctx.gather_over)
        of_rows = (gradient @ ctx.a.detach().t() * ctx.scale).masked_fill(outside.unsqueeze(-1), 0.0)
        of_a = ProductGradient(inner.flatten(0, -2), gradient.flatten(0, -2))
        of_b = RowsGradient(local.flatten(), of_rows.flatten(0, -2))
        found = accumulate_grad(ctx.a, of_a), accumulate_grad(ctx.b, of_b)
        return None, *found, None, None, None, None, None


class VocabParallelEmbedding(Adaptable):
    """Embedding table split over ranks. Each rank looks up its own ids and zeros the others; then ranks are summed."""

    lacks = ("lora_dropout",)

    def __init__(self, context: ParallelContext, weight: Sharding | Parameter, *, use: int = 0) -> None:
        """Make the layer.

        Args:
            weight: the placement of the table; or, for a table of another layer, that `Parameter`.
            use: the number of this use, if the table has several.
        """
        super().__init__()
        self.weight = weight if isinstance(weight, Parameter) else context.parameter(weight)
        self.group, self.sequence_parallel, self.use = context.group("vocabulary"), context.sequence_parallel, use
        self.first_id = self.group.rank * self.weight.shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [sequence, batch] to [sequence (/ size under sequence parallelism), batch, hidden]."""
        first, group, sequence_parallel = self.first_id, self.group, self.sequence_parallel
        rows: Tensor
        if self.update is not None:
            adapter = self.a, self.b[0], self.update.scale
            rows = _AdaptedRows.apply(self.weight, *adapter, ids, first, group, sequence_parallel)
            if self.magnitudes:
                rows = torch.addcmul(rows, rows, self._changes(self.update.scale))
        else:
            rows = _VocabParallelRows.apply(self.weight, ids, first, group, sequence_parallel, self.use)
        return rows

    def _changes(self, scale: float) -> Tensor:
        """Return the factors by which columns get the lengths of DoRA, less 1: [hidden]."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.no_grad():
            both = self.weight, torch.addmm(self.weight, self.b[0], self.a, alpha=scale)
            squares = torch.stack([each.to(wide).square().sum(0) for each in both])
            first, now = collectives.all_reduce_(squares, self.group).sqrt().unbind()
        return (row_factors(first, self.magnitudes[0].to(wide), now) - 1.0).to(self.weight.dtype)

    @property
    def splits_output(self) -> bool:  # type: ignore[override]
        return self.sequence_parallel

    def matrices(self) -> list[Matrix]:
        return [replace(matrix, looked_up=True) for matrix in super().matrices()]

    def weights_to_adapt(self) -> list[Parameter]:
        return [self.weight]

    def ranks_of_factors(self) -> tuple[Group | None, Group | None]:
        return self.group, None
