"""Causal attention in which each query sees the keys from a first one on: inside its document, inside a window.

Scores are query @ key * scale, bent to cap * tanh(score / cap) where there is a cap; the softmax is in fp32 or wider.
The mask decides what runs: with a dense one torch's scaled_dot_product_attention, and with one of blocks FlexAttention
(arXiv:2412.05496), which leaves out the blocks of scores that no query sees. Under a cap, or where probabilities are
dropped by place (`dropout`), attention over a dense mask is written out; a GPU's fused operator drops by a mask of its
own (`draws_its_own`).

Attention to parts of the keys is put together by the log-sum-exp of each part's scores (`attention_with_lse`): with lse
that of all lse_i, lse = log(sum of exp(lse_i)), the output is the sum of exp(lse_i - lse) * output_i.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megalite_kernels.activation import soft_cap
from megalite_kernels.dropout import DropoutMask, drop

BLOCK = 128
"""Queries of a block, and keys."""
_WIDTHS = (16, 32, 64, 128, 256)


def goes_in_blocks(device: torch.device, dtype: torch.dtype, sequence: int, width: int, dropout: float) -> bool:
    """Tell if FlexAttention is for heads of `width` channels there, over runs of `sequence` tokens.

    It has no dropout and no fp64, and its gradients are sound for whole blocks alone
    (github.com/pytorch/pytorch/issues/153799).
    """
    if device.type != "cuda" or dropout > 0.0 or dtype == torch.float64:
        return False
    return sequence % BLOCK == 0 and width in _WIDTHS


Mask = Tensor | BlockMask | None
"""The keys that each query sees, as `dense_mask` and `block_mask` say them; None: causal, from the first key on."""


def dense_mask(first: Tensor, queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
    """The first place that each query sees, [batch or 1, queries], to [batch or 1, 1, queries, keys] bool, true where a
    query may look. `queries` and `keys` are their places in the sample; None: all of them, in their order.
    """
    whole = torch.arange(first.shape[1], device=first.device)
    queries, keys = (whole if places is None else places for places in (queries, keys))
    return ((keys <= queries.unsqueeze(1)) & (keys >= first.unsqueeze(2))).unsqueeze(1)


def block_mask(first: Tensor, queries: Tensor | None = None, keys: int | None = None) -> BlockMask:
    """The same as blocks of scores: for each block of queries those of which it sees all, and those of which it sees a
    part. `first` [batch, queries] never falls, and places follow on each other, inside a block of queries; `keys`: of
    the whole sample, as many as it has; None: as many as there are queries.
    """
    count = first.shape[1]
    keys = count if keys is None else keys
    places = torch.arange(count, device=first.device) if queries is None else queries
    blocks = torch.arange(keys // BLOCK, device=first.device)
    begins = places[::BLOCK].unsqueeze(1)
    # The first query of a block sees the most of what lies before it, the last one the least.
    seen = (blocks >= first[:, ::BLOCK, None] // BLOCK) & (blocks * BLOCK < begins + BLOCK)
    whole = (blocks * BLOCK >= first[:, BLOCK - 1 :: BLOCK, None]) & ((blocks + 1) * BLOCK <= begins + 1)
    first = first.contiguous()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if queries is None else queries[query]
        return (key <= place) & (key >= first[batch, query])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(count, keys)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [batch, of queries, of keys] bool to how many of each row are chosen, and all of them, those first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def draws_its_own(device: torch.device, dtype: torch.dtype, cap: float | None) -> bool:
    """Tell if what is dropped follows from the state of the device's generator: there a fused operator runs, and takes
    no mask from others. On a CPU there is none, nor for fp64 and for capped scores.
    """
    return device.type == "cuda" and dtype != torch.float64 and cap is None


def keeps_scores(mask: Mask, cap: float | None, *, with_lse: bool = False) -> bool:
    """Tell if backward would keep every score, so that computing the scores again is the better deal."""
    return (with_lse or cap is not None) and not isinstance(mask, BlockMask)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scale: float | None,
    cap: float | None,
    dropout: DropoutMask | None,
) -> Tensor:
    """[batch, heads, queries, width] to the same, over keys and values [batch, groups, keys, width].

    Consecutive heads share a group. With a mask of blocks there is no dropout (`goes_in_blocks`). `scale`: None is
    1 / the root of the width. `dropout`: of the probabilities, whose rows are [heads * queries].
    """
    if isinstance(mask, BlockMask):
        output: Tensor = _in_blocks(query, key, value, mask, scale, cap)
        return output
    if cap is not None or (dropout is not None and not draws_its_own(query.device, query.dtype, cap)):
        # Written out: scaled_dot_product_attention has no soft cap and takes no dropout mask.
        scores = _scores(query, key, _causal(query, key) if mask is None else mask, scale, cap)
        probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
        if dropout is not None:
            probabilities = drop(probabilities.flatten(1, 2), dropout, dimension=0).view_as(probabilities)
        return probabilities @ _for_heads_of(query, value)
    chance, shared = 0.0 if dropout is None else dropout.probability, key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=chance, scale=scale, enable_gqa=shared
    )


def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute `attention` without dropout, and the log-sum-exp of each query's scores.

    The latter is [batch, heads, queries], in fp32 or wider, the natural logarithm, of scores scaled and capped.
    Gradients flow through both.

    A query that sees no key has the output 0 and the log-sum-exp -inf. Nothing is dropped: a `DropoutMask` covers whole
    rows of keys, not parts of them. Over a dense mask it is written out, and keeps every score for backward: torch's
    operators return the log-sum-exp, and take no gradient of it.
    """
    if isinstance(mask, BlockMask):
        output, more = _in_blocks(query, key, value, mask, scale, cap, return_aux=AuxRequest(lse=True))
        return output, more.lse
    mask = _causal(query, key) if mask is None else mask
    # A softmax over nothing is no number, and neither is its gradient: over all keys, it is left out.
    blind = ~mask.any(dim=-1, keepdim=True)
    scores = _scores(query, key, mask | blind, scale, cap)
    lse = scores.logsumexp(dim=-1).masked_fill(blind.squeeze(-1), -math.inf)
    output = torch.softmax(scores, dim=-1).to(value.dtype) @ _for_heads_of(query, value)
    return output.masked_fill(blind, 0.0), lse


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, cap: float | None, **more: Any
) -> Any:
    bend, shared = None if cap is None else _bend(cap), key.shape[1] != query.shape[1]
    return _flex_attention()(query, key, value, score_mod=bend, block_mask=mask, scale=scale, enable_gqa=shared, **more)


def _scores(query: Tensor, key: Tensor, mask: Tensor, scale: float | None, cap: float | None) -> Tensor:
    """[batch, heads, queries, keys], in fp32 or wider; -inf where a query may not look."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ _for_heads_of(query, key).transpose(2, 3)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)) * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    return scores.masked_fill(~mask, -math.inf)


def _for_heads_of(query: Tensor, shared: Tensor) -> Tensor:
    """Keys or values of groups, repeated for each head of theirs."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()


@functools.cache  # one function for all layers and steps: the compiled kernel is of this one
def _bend(cap: float) -> Callable[..., Tensor]:
    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap(score, cap)

    return bend


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
