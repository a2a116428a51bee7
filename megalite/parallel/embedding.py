"""Word embeddings with the vocabulary split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter, RowsGradient, hand_over
from megalite.parallel.regions import reduce_from_region, reduce_scatter_sequence
from megalite.parallel.sharding import Sharding


class _Rows(torch.autograd.Function):
    """Rows of a table; ids outside [first, first + rows) give zeros."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, first: int) -> Tensor:
        local = ids - first
        outside = (local < 0) | (local >= table.shape[0])
        local = local.masked_fill(outside, 0)
        ctx.table = table
        ctx.save_for_backward(local, outside)
        return F.embedding(local, table).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        local, outside = ctx.saved_tensors
        values = gradients[0].masked_fill(outside.unsqueeze(-1), 0.0)
        rows = RowsGradient(local.flatten(), values.reshape(-1, values.shape[-1]))
        return hand_over(ctx.table, rows), None, None


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids that it holds; the sum over ranks has them all."""

    def __init__(
        self, weight: Sharding, group: Group, *, sequence_parallel: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = Parameter(weight, dtype, device)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.first_id = group.rank * weight.local_shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        """ids [sequence, batch] to [sequence (/ size under sequence parallelism), batch, hidden]."""
        rows: Tensor = _Rows.apply(self.weight, ids, self.first_id)
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_region
        return reduce(rows, self.group)
