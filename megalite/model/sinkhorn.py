"""Sinkhorn's iteration, which evens out the choices of experts among tokens (S-BASE, arXiv:2202.01169).

The rows and the columns of exp(logits), [tokens, experts], are scaled in turn, until all tokens have the same sum, and
so have all experts. A token then chooses by its scaled row. The factor of a row changes no choice, and that of a column
is a number for the expert, whose logarithm is added to the logits. So the iteration may begin with their softmax, which
does not overflow.
"""

from __future__ import annotations

from torch import Tensor

_TOLERANCE, _SMALLEST_SUM = 1e-4, 1e-8
"""Mean change of the experts' factors at which the iteration ends, and the number that is added to sums: both are
Megatron-LM's."""
_MOST_ROUNDS = 1000
"""Rounds after which the iteration ends anyway: in fp32, very large factors may never settle."""
PLANNED_ROUNDS = 10
"""Rounds on the meta device, where nothing settles. Random logits of 2,048 to 8,192 tokens and 8 to 128 experts take 3
to 7 with a standard deviation of 1.3, as a new router's may have, and 6 to 17 with one of 3."""


def expert_factors(shares: Tensor) -> Tensor:
    """Return the factors of the columns of shares [tokens, experts]. Tokens that do not count have zeros.

    They are 1 for a single token: even shares of one row would leave its choice to rounding.
    """
    experts = shares.shape[1]
    tokens = shares.any(1).sum().clamp(min=1)
    factors = shares.new_ones(experts)
    for _ in range(PLANNED_ROUNDS if shares.is_meta else _MOST_ROUNDS):
        before = factors
        of_tokens = 1 / (tokens * ((shares * factors).sum(1, keepdim=True) + _SMALLEST_SUM))
        factors = 1 / (experts * ((shares * of_tokens).sum(0) + _SMALLEST_SUM))
        if not (factors - before).abs().mean() > _TOLERANCE:  # true for NaN, too
            break
    return factors.where(tokens > 1, 1.0)
