"""Causal attention with a first visible key per query, which limits it to a document or a sliding window.

Scores are query @ key * scale, capped as cap * tanh(score / cap) if there is a cap. The softmax is in fp32 or wider.

The mask selects the implementation. A dense mask uses torch's scaled_dot_product_attention. A block mask uses
FlexAttention (arXiv:2412.05496), which skips the blocks of scores that no query sees. With a dense mask and a cap, or
dropout by position (`dropout`), attention runs unfused in plain operations. The fused operator on a GPU draws its own
dropout mask (`draws_its_own`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megalite_kernels.activation import soft_cap
from megalite_kernels.dropout import drop, kept_reference
from megalite_kernels.dropout_mask import DropoutMask
from megalite_kernels.implementation import on_gpu
from megalite_kernels.torch_internals import flash_attention, flash_attention_gradients

BLOCK = 128
"""Queries per block, and keys per block."""
_WIDTHS = (16, 32, 64, 128, 256)


def goes_in_blocks(device: torch.device, dtype: torch.dtype, sequence: int, width: int, dropout: float) -> bool:
    """Tell if FlexAttention can run on this device, for heads of `width` channels and runs of `sequence` tokens.

    It supports neither dropout nor fp64, and its gradients are correct only for full blocks
    (github.com/pytorch/pytorch/issues/153799).
    """
    if not on_gpu(device) or dropout > 0.0 or dtype == torch.float64:
        return False
    return sequence % BLOCK == 0 and width in _WIDTHS


Mask = Tensor | BlockMask | None
"""The keys that each query sees, made by `dense_mask`, `as_addend` or `block_mask`. None is causal over all keys."""


def dense_mask(first: Tensor, queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
    """Make a mask [batch or 1, 1, queries, keys] bool, true if a query sees a key.

    Args:
        first: index in the sample of the first key that each query sees, [batch or 1, queries].
        queries: indices in the sample of the queries; None if they are 0, 1, 2, ...
        keys: indices in the sample of the keys; None if they are 0, 1, 2, ...
    """
    whole = torch.arange(first.shape[1], device=first.device)
    queries, keys = (whole if places is None else places for places in (queries, keys))
    return ((keys <= queries.unsqueeze(1)) & (keys >= first.unsqueeze(2))).unsqueeze(1)


def takes_addend(device: torch.device, dtype: torch.dtype, cap: float | None, dropout: float) -> bool:
    """Tell if `attention` adds a dense mask to the scores, in torch's operator: `as_addend` then makes it once."""
    return cap is None and (dropout == 0.0 or draws_its_own(device, dtype, cap))


def as_addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a dense mask as numbers that are added to the scores, 0 and -inf, in the dtype of the queries.

    Each call of torch's operator would make them from a bool mask, and keep them for its backward.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def block_mask(first: Tensor, queries: Tensor | None = None, keys: int | None = None) -> BlockMask:
    """Make the same mask as blocks of scores: lists of the fully and of the partly visible blocks of keys.

    Args:
        first: as in `dense_mask`, [batch, queries]. It must not decrease inside a block of queries.
        queries: as in `dense_mask`. Indices must be consecutive inside a block of queries.
        keys: number of keys, all those of the sample; None for the number of queries.
    """
    count = first.shape[1]
    keys = count if keys is None else keys
    places = torch.arange(count, device=first.device) if queries is None else queries
    blocks = torch.arange(keys // BLOCK, device=first.device)
    begins = places[::BLOCK].unsqueeze(1)
    # In a block of queries, the first one has the lowest first key, and the last one has the highest.
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
    """Convert a choice of blocks [batch, query blocks, key blocks] bool to the lists that BlockMask takes.

    Returns the number of chosen key blocks per query block, and the indices of all key blocks, chosen ones first.
    """
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def draws_its_own(device: torch.device, dtype: torch.dtype, cap: float | None) -> bool:
    """Tell if dropout uses the device's default generator, because a fused operator draws its own dropout mask.

    There is no such operator on CPUs, for fp64 and for capped scores.
    """
    return on_gpu(device) and dtype != torch.float64 and cap is None


def keeps_scores(mask: Mask, cap: float | None) -> bool:
    """Tell if forward would save all scores for backward, so that recomputing them is better."""
    return cap is not None and not isinstance(mask, BlockMask)


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
    """Compute attention. Consecutive heads share a key-value group.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, groups, keys, width].
        value: [batch, groups, keys, width], perhaps of another width.
        mask: the keys that each query sees; made by `as_addend` only if `takes_addend`.
        scale: factor of the scores; None for 1 / sqrt(width).
        cap: soft cap of the scores; None for no cap.
        dropout: dropout of the probabilities, whose rows are [heads * queries]. Not supported with a block mask
            (`goes_in_blocks`).

    Returns:
        [batch, heads, queries, width of the values].
    """
    fused = cap is None and (dropout is None or draws_its_own(query.device, query.dtype, cap))
    if query.shape[-1] != value.shape[-1] and (fused or isinstance(mask, BlockMask)):
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        width = value.shape[-1]
        query, key, value = same_width(query, key, value)
        return attention(query, key, value, mask, scale=scale, cap=cap, dropout=dropout)[..., :width]
    if isinstance(mask, BlockMask):
        output: Tensor = (
            _BlocksOnMeta.apply(query, key, value)[0]
            if query.is_meta
            else _in_blocks(query, key, value, mask, scale, cap)
        )
        return output
    if not fused:
        # Unfused: scaled_dot_product_attention supports neither a soft cap nor a given dropout mask.
        scores = masked_scores(query, key, _causal(query, key) if mask is None else mask, scale, cap)
        probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
        if dropout is not None:
            probabilities = drop(probabilities.flatten(1, 2), dropout, dimension=0).view_as(probabilities)
        return probabilities @ _for_heads_of(query, value)
    chance, shared = 0.0 if dropout is None else dropout.probability, key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=chance, scale=scale, enable_gqa=shared
    )


def same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fill up heads of queries, keys and values with zeros to one width: fused operators take no other.

    Scores stay the same, and the output has zeros beyond the width of the values.
    """
    width = max(each.shape[-1] for each in tensors)
    # A copy of zero columns more would be a copy all the same.
    return tuple(each if each.shape[-1] == width else F.pad(each, (0, width - each.shape[-1])) for each in tensors)


def draw_kept(dropout: DropoutMask, query: Tensor, keys: int) -> Tensor:
    """Draw which probabilities dropout keeps, on the CPU: [batch, heads, queries, keys] uint8."""
    batch, heads, queries, _ = query.shape
    return kept_reference(torch.Size((batch, heads * queries, keys)), 0, dropout).view(batch, heads, queries, keys)


class Kept(NamedTuple):
    """Dropout of the probabilities for a part of the keys.

    Attributes:
        mask: [batch, heads, queries, keys] uint8, 1 for kept probabilities.
        scale: factor of the kept probabilities.
    """

    mask: Tensor
    scale: float


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scale: float | None,
    cap: float | None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `attention`, and the log-sum-exp of each query's scores, which dropout does not change.

    The log-sum-exp is [batch, heads, queries], in fp32 or wider, of scaled and capped scores, with the natural
    logarithm. Gradients flow through both results. A query that sees no key has the output 0 and the log-sum-exp -inf.

    With a dense mask, attention runs unfused and saves all scores for backward: torch's fused operators return the
    log-sum-exp but have no gradient for it. Dropout needs a dense mask.
    """
    if isinstance(mask, BlockMask):
        if query.is_meta:
            found: tuple[Tensor, Tensor] = _BlocksOnMeta.apply(query, key, value)
            return found
        output, more = _in_blocks(query, key, value, mask, scale, cap, return_aux=AuxRequest(lse=True))
        return output, more.lse
    mask = _causal(query, key) if mask is None else mask
    # A softmax over no keys is NaN, and so is its gradient. Such queries see all keys here, and are masked afterwards.
    blind = ~mask.any(dim=-1, keepdim=True)
    scores = masked_scores(query, key, mask | blind, scale, cap)
    lse = scores.logsumexp(dim=-1).masked_fill(blind.squeeze(-1), -math.inf)
    probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
    if kept is not None:
        probabilities = probabilities * kept.mask * kept.scale
    output = probabilities @ _for_heads_of(query, value)
    return output.masked_fill(blind, 0.0), lse


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, cap: float | None, **more: Any
) -> Any:
    bend, shared = None if cap is None else _bend(cap), key.shape[1] != query.shape[1]
    return _flex_attention()(query, key, value, score_mod=bend, block_mask=mask, scale=scale, enable_gqa=shared, **more)


class _BlocksOnMeta(torch.autograd.Function):
    """FlexAttention on the meta device, by the operators of flash attention: it reads, writes and keeps as much.

    How many blocks a query sees is known on the device alone, so the work is that of a causal mask, the most of all.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = flash_attention(query, key, value, None, True, 1.0)
        ctx.save_for_backward(query, key, value, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, lse = (each.detach() for each in ctx.saved_tensors)
        return flash_attention_gradients(gradients[0], query, key, value, output, lse, None, True, 1.0)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor, scale: float | None, cap: float | None) -> Tensor:
    """Compute scores [batch, heads, queries, keys] in fp32 or wider, with -inf for masked keys."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = wide_product(query, _for_heads_of(query, key)) * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    return scores.masked_fill(~mask, -math.inf)


def wide_product(query: Tensor, key: Tensor) -> Tensor:
    """Return query @ key, [batch, heads, queries, keys], in fp32 or wider: rounded to bf16, a softmax would be off."""
    if multiplies_narrow(query):
        output: Tensor = _WideProduct.apply(query, key)
        return output
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.to(wide) @ key.to(wide).transpose(2, 3)


def multiplies_narrow(query: Tensor) -> bool:
    """Tell whether the device multiplies narrow numbers to wide ones, without wide copies of queries and keys."""
    return on_gpu(query) and torch.version.hip is None and query.dtype in (torch.bfloat16, torch.float16)


class _WideProduct(torch.autograd.Function):
    """Product of narrow queries and keys on a GPU, whose sums are wide, without wide copies of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        product = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
        return product.unflatten(0, query.shape[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        return gradient @ key, gradient.transpose(2, 3) @ query


def _for_heads_of(query: Tensor, shared: Tensor) -> Tensor:
    """Repeat keys or values of groups for each of their heads."""
    heads = query.shape[1] // shared.shape[1]
    return shared if heads == 1 else shared.repeat_interleave(heads, dim=1)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()


@functools.cache  # one function for all layers and steps, because a new one would be compiled again
def _bend(cap: float) -> Callable[..., Tensor]:
    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap(score, cap)

    return bend


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
