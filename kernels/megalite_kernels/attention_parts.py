"""Attention to a part of the keys, and its gradients, for queries whose keys are on several ranks.

The outputs of parts are merged by their log-sum-exp (lse): if part i gave lse_i and output_i, then lse = log(sum of
exp(lse_i)), and output = sum of exp(lse_i - lse) * output_i. The gradients of a part depend on the merged output and
lse alone: with the probabilities p = exp(score - lse) and d = gradient @ value for each key, the gradient of a score is
p * (d - sum of gradient * output) (arXiv:2310.01889). So backward keeps nothing of a part.

torch's fused operators compute parts on CPUs, and in bf16 and fp16 on NVIDIA GPUs: there cuDNN's, where torch takes it
for the same attention without context parallelism, else FlashAttention 2. With a soft cap or dropout, and in
other precisions on GPUs, a part is written out in plain operations, or runs by FlexAttention if it has a block mask.
Then backward computes its forward again.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megalite_kernels.attention import Kept, as_addend, attention_with_lse, same_width
from megalite_kernels.implementation import on_gpu
from megalite_kernels.torch_internals import flash_attention, flash_attention_gradients

PartMask = Literal["all", "causal"] | Tensor | BlockMask
"""The keys that each query sees: all; causal, if queries and keys are the same tokens; or a mask as in `attention`."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PartMask,
    *,
    scale: float,
    cap: float | None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention to a part of the keys, without a graph.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, groups, keys, width]; consecutive heads share a group.
        value: as `key`, of any width, which is that of the output.
        mask: the keys that each query sees.
        scale: factor of the scores.
        cap: soft cap of the scores; None for no cap.
        kept: the probabilities that dropout keeps, [batch, heads, queries, keys]; None without dropout.

    Returns:
        The output [batch, heads, queries, width], and the lse [batch, heads, queries] in fp32 or wider. A query that
        sees no key has the output 0 and the lse -inf.
    """
    if takes_flash(query, mask, cap, kept):
        width = value.shape[-1]
        query, key, value = same_width(query, key, value)
        output, lse = flash_attention(query, key, value, _additive(mask, query), mask == "causal", scale)
        output = output[..., :width]
        if isinstance(mask, Tensor):  # for a query without keys, the operator's lse is 0
            lse = lse.masked_fill(~mask.any(dim=-1), -torch.inf)
        return output, lse
    with torch.no_grad():
        return attention_with_lse(query, key, value, _plain(mask, query, key), scale=scale, cap=cap, kept=kept)


def part_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: PartMask,
    *,
    scale: float,
    cap: float | None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's contributions to the gradients of query, key and value.

    Args:
        gradient: gradient of the merged output, [batch, heads, queries, width].
        output: the merged output, over all parts of the keys.
        lse: the merged lse, over all parts of the keys.

    The other arguments are those of `attend`.
    """
    if takes_flash(query, mask, cap, kept):
        bias, causal = _additive(mask, query), mask == "causal"
        lse = lse.contiguous()  # the operator of GPUs takes it so, without a check
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        gradient, query, key, value, output = same_width(gradient, query, key, value, output)
        found = flash_attention_gradients(gradient, query, key, value, output, lse, bias, causal, scale)
        of_query, of_key, of_value = (each[..., :width] for each, width in zip(found, widths, strict=True))
        return of_query, of_key, of_value
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in (query, key, value)]
        own = attention_with_lse(
            inputs[0], inputs[1], inputs[2], _plain(mask, query, key), scale=scale, cap=cap, kept=kept
        )
    # Merged, the output is weight * own output + (1 - weight) * the rest, and the weight is exp(own lse - lse).
    weight = torch.exp(own[1].detach() - lse).unsqueeze(-1)
    of_output = weight * gradient
    of_lse = (of_output * (own[0].detach() - output)).sum(dim=-1)
    upstream = [of_output.to(own[0].dtype), of_lse.to(own[1].dtype)]
    of_query, of_key, of_value = torch.autograd.grad(own, inputs, upstream)
    return of_query, of_key, of_value


def takes_flash(query: Tensor, mask: PartMask, cap: float | None, kept: Kept | None) -> bool:
    """Tell if one of torch's fused operators computes such a part."""
    if cap is not None or kept is not None or isinstance(mask, BlockMask):
        return False
    if not on_gpu(query):
        return True
    width, narrow = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return narrow and not isinstance(mask, Tensor) and width % 8 == 0 and width <= 256


def _additive(mask: PartMask, query: Tensor) -> Tensor | None:
    """Return a dense mask as numbers to add to the scores: 0, or -inf for keys that are not seen."""
    return as_addend(mask, query.dtype) if isinstance(mask, Tensor) else None


def _plain(mask: PartMask, query: Tensor, key: Tensor) -> Tensor | BlockMask | None:
    if mask == "all":
        return torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return None if isinstance(mask, str) else mask
