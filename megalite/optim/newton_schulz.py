"""Approximate orthogonalization by matrix products only: the Newton-Schulz iteration of Muon (Jordan et al. 2024).

Each step maps every singular value s to a s + b s^3 + c s^5. A few steps bring all but the smallest singular values
near 1. The result is a fixed polynomial of the normalized matrix. Its slope is at most the product of the a
(about 500 for five steps), which bounds the growth of rounding errors, whatever the rank of the matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

EPSILON = 1e-7
"""Lower bound of the norm by which a matrix is divided, so that a zero matrix remains zero."""

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
"""Coefficients (a, b, c) of each step, under the names that Megatron-LM uses.

simple: Jordan et al. 2024, the same in all steps. quintic: leloykun.github.io/ponder/muon-opt-coeffs, repeated from the
beginning after the last. polar_express: arXiv:2505.16932; further steps repeat the last entry.
"""


def coefficients(kind: str, steps: int) -> Iterator[tuple[float, float, float]]:
    """Return the coefficients of `steps` steps, in order."""
    table = _COEFFICIENTS[kind]
    rest = table[-1:] if kind == "polar_express" else table
    return itertools.islice(itertools.chain(table, itertools.cycle(rest)), steps)


def orthogonalized(matrix: Tensor, kind: str, steps: int, dtype: torch.dtype) -> Tensor:
    """Return the orthogonalized matrix, computed in `dtype`: [rows, columns] -> [rows, columns].

    A third dimension before these two counts matrices that are orthogonalized each by itself.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    values = matrix.to(dtype)
    values = values.mT if tall else values
    values = values / torch.linalg.vector_norm(values, dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    add_product = torch.addmm if values.dim() == 2 else torch.baddbmm
    for a, b, c in coefficients(kind, steps):
        gram = values @ values.mT
        values = add_product(values, add_product(gram, gram, gram, beta=b, alpha=c), values, beta=a)
    return values.mT if tall else values


def update_scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor by which an orthogonal [rows, columns] update is multiplied, as in Megatron-LM.

    - spectral: gives all shapes the same root mean square (arXiv:2502.16982). Times 0.2, it is the root mean square of
      an AdamW update (torch's `match_rms_adamw`).
    - shape_scaling: torch's `original`.
    - unit_rms_norm: arXiv:2410.21265.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))
