"""Largest logit of each head of attention, over all queries and the keys that they see."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megalite_kernels.attention import multiplies_narrow, wide_product

AT_ONCE = 2**25
"""Most logits in memory, of 4 bytes each."""
ROWS = 512
"""Most rows at a time: causal keys behind all of them are left out."""
Visible = Literal["all", "causal"] | Tensor | BlockMask | None
"""Masks of attention and of its parts (`Mask`, `PartMask`), as bool or as an addend. None is causal."""


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    mask: Visible,
    scale: float | None,
    counted: Tensor | None = None,
    at_once: int = AT_ONCE,
) -> Tensor:
    """Return the largest of query @ key * scale of each head, [heads] in fp32 or wider; -inf if its queries see no key.

    Logits are those before a soft cap. They are computed for some heads and rows at a time, and never kept.

    Args:
        query: [batch, heads, rows, width].
        key: [batch, groups, keys, width]. Each group serves equally many consecutive heads.
        mask: the keys that each row sees, [batch or 1, 1, rows, keys] if it is a tensor. Causal: row i sees the keys up
            to i.
        scale: factor of the logits, above 0; None for 1 / sqrt(width).
        counted: the queries that count, [batch, rows] bool; None: all.
        at_once: most logits in memory, but for those of one row of the heads of a group.
    """
    (batch, heads, rows, width), (groups, keys) = query.shape, key.shape[1:3]
    wide, each = torch.promote_types(query.dtype, torch.float32), heads // groups
    dtype = query.dtype if multiplies_narrow(query) else wide  # keys are made wide once, not for each block of rows
    query = query.unflatten(1, (groups, each))
    step = max(1, min(ROWS, at_once // (batch * each * keys)))
    together = max(1, at_once // (batch * each * min(step, rows) * keys))
    found = torch.full((groups, each), -math.inf, dtype=wide, device=query.device)
    for group in range(0, groups, together):
        some = slice(group, group + together)
        of_some = key[:, some].to(dtype)
        for start in range(0, rows, step):
            own = slice(start, min(start + step, rows))
            seen = slice(0, own.stop if mask is None or mask == "causal" else keys)
            of_groups = wide_product(query[:, some, :, own].flatten(2, 3), of_some[:, :, seen])
            logits = of_groups.unflatten(2, (each, -1))
            if (visible := _rows_of(mask, own, seen, query.device)) is not None:
                logits.masked_fill_(~visible.unsqueeze(-3), -math.inf)
            of_rows = logits.amax(dim=4)
            if counted is not None:
                of_rows.masked_fill_(~counted[:, None, None, own], -math.inf)
            found[some] = torch.maximum(found[some], of_rows.amax(dim=(0, 3)))
    return found.flatten() * (1.0 / math.sqrt(width) if scale is None else scale)


def _rows_of(mask: Visible, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
    """Return which keys some rows of queries see, [batch or 1, 1, rows, keys] bool; None: all."""
    if isinstance(mask, Tensor):
        part = mask[:, :, rows]
        return part if part.dtype == torch.bool else part > -math.inf
    if mask == "all":
        return None
    places = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    others = torch.arange(keys.stop, device=device)
    if isinstance(mask, BlockMask):
        batch = torch.arange(mask.shape[0], device=device)[:, None, None, None]
        return mask.mask_mod(batch, torch.zeros_like(batch), places, others)
    return others <= places
