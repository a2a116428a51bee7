"""The orthogonal factor of a matrix, about, by matrix products alone: the iteration of Muon (Jordan et al. 2024).

Each step maps every singular value s to a s + b s^3 + c s^5; a few steps bring all but the smallest near 1. The result
is a fixed polynomial of the matrix over its norm, no steeper than the product of the a (500 for five steps): rounding
errors grow by no more than that, whatever the matrix's rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

EPSILON = 1e-7
"""Norms below this count as this: a matrix of zeros stays one."""

_COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""(a, b, c) of each step, as Megatron-LM names them. simple: Jordan et al. 2024, the same in all steps; quintic:
leloykun.github.io/ponder/muon-opt-coeffs, over and over; polar_express: arXiv:2505.16932, then the last on and on."""


def coefficients(kind: str, steps: int) -> Iterator[tuple[float, float, float]]:
    """Return the coefficients of each of `steps` steps."""
    table = _COEFFICIENTS[kind]
    rest = table[-1:] if kind == "polar_express" else table
    return itertools.islice(itertools.chain(table, itertools.cycle(rest)), steps)


def orthogonalized(matrix: Tensor, kind: str, steps: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] to the same in `dtype`, in which all of it is computed."""
    tall = matrix.shape[0] > matrix.shape[1]
    values = matrix.to(dtype)
    values = values.T if tall else values
    values = values / values.norm().clamp(min=EPSILON)
    for a, b, c in coefficients(kind, steps):
        gram = values @ values.T
        values = torch.addmm(values, torch.addmm(gram, gram, gram, beta=b, alpha=c), values, beta=a)
    return values.T if tall else values


def update_scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor of an orthogonal [rows, columns] update, as in Megatron-LM.

    spectral: the same root mean square for all shapes (arXiv:2502.16982; times 0.2 that of an AdamW update, torch's
    `match_rms_adamw`). shape_scaling: torch's `original`. unit_rms_norm: arXiv:2410.21265.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))
