"""Count sketches: tables of signed sums that add up over ranks before anything is restored (arXiv:1903.04488).

Row r of a table adds sign_r(i) * value_i to the column column_r(i). The median over rows of sign * column estimates a
value; the others that share its columns are noise of variance |values|^2 (1 / columns - 1 / length). Only the largest
estimates are restored, as many as a row has columns, and each is shrunk by noise^2 / estimate^2. Without that, the
noise in the estimates of a gradient without large elements would make residuals grow from step to step.

The gradient is cut into rounds, as long as the table's rows. Each row of the table rotates each round by a random
distance. Elements of a round never meet, those of different rounds do in one of `columns` cases, and their signs are
independent: that of their round times that of their place in it. So one row as long as the gradient restores it exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.synchronization.compressor import Compressor, Field, finite
from megalite.synchronization.hashing import mixed


@dataclass(frozen=True)
class CountSketch(Compressor):
    """Table of `rows` x `columns` signed sums.

    Attributes:
        ratio: size of the table relative to the elements, above 0 and at most 1. There are five rows, three with a
            ratio above 1/5, and one with a ratio above 1/3.
        dtype: dtype of the gradients, and of the sums that are sent.
    """

    ratio: float
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        return next(rows for rows in (5, 3, 1) if rows * self.ratio <= 1)

    def columns(self, length: int) -> int:
        """Return the columns for `length` elements, at least 1."""
        return min(max(math.ceil(self.ratio * length / self.rows), 1), length)

    def fields(self, length: int) -> list[Field]:
        return [(self.rows * self.columns(length), self.dtype)]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (table,) = self.allocate(values)
        columns = self.columns(values.shape[1])
        rounds = pad(values, (0, -values.shape[1] % columns)).unflatten(1, (-1, columns))
        for row, sums in enumerate(table.split(columns, dim=1)):
            distance, sign = self._drawn(rounds, row, key)
            signed = rounds * sign
            source = distance + torch.arange(columns, device=values.device)
            rotated = torch.cat((signed, signed), dim=2).gather(2, source.expand_as(signed))
            torch.sum(rotated, 1, out=sums)
        table.copy_(torch.where(finite(values), table, math.nan))
        return packed

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        (table,) = self.views(packed, length)
        return self._largest(table, length, key).to(dtype)

    def sum(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        (tables,) = self.views(packed, length)
        total = tables[:1].clone()
        for rank in range(1, len(tables)):
            total += tables[rank]
        return self._largest(total, length, key).to(dtype)[0]

    def _drawn(self, rounds: Tensor, row: int, key: int) -> tuple[Tensor, Tensor]:
        """Return by how much to rotate each of [parts, rounds, columns], [rounds, 1], and the signs [rounds, columns]."""
        count, columns = rounds.shape[1:]
        bits = mixed(torch.arange(count + columns, device=rounds.device), key * 8 + row)
        signs = (1 - 2 * (bits & 1)).to(self.dtype)
        return (bits[:count, None] >> 1) % columns, signs[:count, None] * signs[count:]

    def _largest(self, table: Tensor, length: int, key: int) -> Tensor:
        columns = self.columns(length)
        rounds = table[:, None, :columns].expand(-1, -(-length // columns), -1)
        estimates = []
        for row, sums in enumerate(table.split(columns, dim=1)):
            distance, sign = self._drawn(rounds, row, key)
            place = columns - distance + torch.arange(columns, device=table.device)
            estimates.append((torch.cat((sums, sums), dim=1)[:, place] * sign).flatten(1)[:, :length])
        estimate = torch.stack(estimates).median(0).values
        top = estimate.abs().topk(columns, dim=1, sorted=False).indices
        found = estimate.gather(1, top)
        # Relative to the largest sum, so that no square overflows or vanishes.
        size = table.abs().amax(1, keepdim=True).clamp(min=torch.finfo(table.dtype).tiny).double()
        noise = (table / size).square().mean(1, keepdim=True) * (1 - columns / length)
        kept = (1 - noise / (found / size).square().clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0.0)
        restored = torch.zeros_like(estimate).scatter_(1, top, (found * kept).to(found.dtype))
        return torch.where(finite(table), restored, math.nan)
