"""Count sketches: gradients as tables of signed sums (arXiv:1903.04488).

Each row of a table adds sign * value to one column per value. The median over rows of sign * column estimates a value;
the others that share its columns are noise. An estimate that stands out of the noise is restored as it is. All others
are multiplied by the share of their variance that is not noise, about the ratio. If they were restored as they are,
even only the largest, residuals would grow from step to step; if they were left out, a gradient without large values
would never be sent. The tables of ranks could be added first, but what is restored from a sum of tables is not the sum
of what is restored from each, and so not the gradient less the residuals.

The gradient is cut into rounds, as long as the table's rows. Each row of the table rotates each round by a random
distance. Values of a round never meet, those of different rounds do in one of `columns` cases, and their signs are
independent: that of their round times that of their place in it. So one row as long as the gradient restores it
exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.extras.synchronization.compressor import Compressor, Field, finite
from megalite.extras.synchronization.hashing import mixed


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
        """Add up values [parts, length] with random signs at random columns; a part that is not finite is NaN."""
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
        """Estimate the values [parts, length] as medians of rows, and shrink those that may be noise."""
        (table,) = self.views(packed, length)
        columns, estimates = self.columns(length), []
        rounds = table[:, None, :columns].expand(-1, -(-length // columns), -1)
        for row, sums in enumerate(table.split(columns, dim=1)):
            distance, sign = self._drawn(rounds, row, key)
            place = columns - distance + torch.arange(columns, device=table.device)
            estimates.append((torch.cat((sums, sums), dim=1)[:, place] * sign).flatten(1)[:, :length])
        estimate = torch.stack(estimates).median(0).values
        # Relative to the largest sum, so that no square overflows or vanishes.
        size = table.abs().amax(1, keepdim=True)
        relative = (table / size.clamp(min=torch.finfo(table.dtype).tiny)).double()
        of_median = math.pi / 2 / self.rows if self.rows > 1 else 1.0  # variance of a median of normal numbers
        noise = relative.square().mean(1, keepdim=True) * (of_median * (1 - columns / length))
        least = (noise * (2 * math.log(length))).sqrt().to(self.dtype) * size
        share = 1 / (1 + of_median * (length / columns - 1))
        restored = torch.where(estimate.abs() > least, estimate, estimate * share)
        return torch.where(finite(table), restored, math.nan).to(dtype)

    def _drawn(self, rounds: Tensor, row: int, key: int) -> tuple[Tensor, Tensor]:
        """Return distances [rounds, 1] and signs [rounds, columns] for one row of the table."""
        count, columns = rounds.shape[1:]
        bits = mixed(torch.arange(count + columns, device=rounds.device), key * 8 + row)
        signs = (1 - 2 * (bits & 1)).to(self.dtype)
        return (bits[:count, None] >> 1) % columns, signs[:count, None] * signs[count:]
