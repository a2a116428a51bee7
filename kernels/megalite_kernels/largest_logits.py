"""Largest logit of each head of attention, over all queries and the keys that they see."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megalite_kernels.implementation import on_gpu

AT_ONCE = 2**25
"""Number of logits in memory, of 4 bytes each."""
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

    Logits are those before a soft cap. They are computed for some rows of queries at a time, and never kept.

    Args:
        query: [batch, heads, rows, width].
        key: [batch, groups, keys, width]. Each group serves equally many consecutive heads.
        mask: the keys that each row sees, [batch or 1, 1, rows, keys] if it is a tensor. Causal: row i sees the keys up
            to i.
        scale: factor of the logits, above 0; None for 1 / sqrt(width).
        counted: the queries that count, [batch, rows] bool; None: all.
        at_once: most logits in memory, but for those of one row.
    """
    (batch, heads, rows, width), (groups, keys) = query.shape, key.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    found = torch.full((heads,), -math.inf, dtype=wide, device=query.device)
    if not (narrow := _multiplies_narrow(query)):
        key = key.to(wide)
    key, step = key.transpose(2, 3), max(1, at_once // (batch * heads * keys))
    for start in range(0, rows, step):
        own = slice(start, min(start + step, rows))
        seen = slice(0, own.stop if mask is None or mask == "causal" else keys)
        part = query[:, :, own].unflatten(1, (groups, -1)).flatten(2, 3)
        if narrow:
            logits = torch.bmm(part.flatten(0, 1), key[..., seen].flatten(0, 1), out_dtype=wide)
        else:
            logits = part.to(wide) @ key[..., seen]
        logits = logits.view(batch, heads, own.stop - start, -1)
        if (visible := _rows_of(mask, own, seen, query.device)) is not None:
            logits.masked_fill_(~visible, -math.inf)
        of_rows = logits.amax(dim=3)
        if counted is not None:
            of_rows.masked_fill_(~counted[:, None, own], -math.inf)
        found = torch.maximum(found, of_rows.amax(dim=(0, 2)))
    return found * (1.0 / math.sqrt(width) if scale is None else scale)


def _multiplies_narrow(query: Tensor) -> bool:
    """Tell whether the device multiplies narrow numbers to wide logits, without wide copies of queries and keys."""
    return on_gpu(query) and torch.version.hip is None and query.dtype in (torch.bfloat16, torch.float16)


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
