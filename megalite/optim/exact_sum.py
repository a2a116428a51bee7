"""Exact sums of float64 numbers over ranks: the result does not depend on the order of the additions or on the split.

Each rank's device adds up digits, which ranks add up. The host waits for the device once, and puts the digits together.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite_kernels.exact_sum import exact_digits, rounded


def sums_over_ranks(numbers: Sequence[Tensor], group: Group) -> list[float]:
    """Return the sum of each tensor's elements over the ranks of a group, rounded once, with the same bits on each.

    Args:
        numbers: float64 tensors on the mesh's device. No element may be negative. All ranks pass the same number of
            tensors; their sizes may differ.
        group: the ranks.

    Returns:
        One number per tensor. It is infinity if the sum exceeds the range of float64 or if an element is infinite, and
        NaN if an element is NaN.
    """
    return [rounded(row) for row in collectives.all_reduce_(exact_digits(numbers), group).tolist()]
