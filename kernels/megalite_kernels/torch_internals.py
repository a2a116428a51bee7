"""Uses of non-public torch functions. Review this file for every new torch release.

References with their own backward call the gradient operators that torch itself uses in backward. These operators are
available only under `torch.ops.aten`. tests/unit/test_torch_internals.py checks that they exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite_kernels.implementation import on_gpu


def silu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor) -> None:
    """Write the gradient of silu(input) into `place`, which may be a view of a part of a larger tensor."""
    torch.ops.aten.silu_backward.grad_input(gradient, input, grad_input=place)


def gelu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor, approximate: str) -> None:
    """Write the gradient of GELU into `place`, which may be a view of a part of a larger tensor.

    `approximate`: "none" or "tanh", as in `torch.nn.functional.gelu`.
    """
    torch.ops.aten.gelu_backward.grad_input(gradient, input, approximate=approximate, grad_input=place)


def layer_norm_gradients(
    gradient: Tensor, input: Tensor, shape: Sequence[int], mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias. `mean` and `inverse` are from `torch.native_layer_norm`."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        gradient, input, shape, mean, inverse, weight, bias, (True, True, True)
    )
    return found


def operator_of_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> SDPBackend:
    """Return the operator that scaled_dot_product_attention takes for tensors like these without a mask.

    On an H100 it is cuDNN's, unless algorithms must be deterministic or the user has disabled it.
    """
    shared = key.shape[1] != query.shape[1]
    return SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, causal, enable_gqa=shared))


def _takes_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Tell if it does so for training: some widths have a forward alone."""
    if not query.is_cuda:
        return False
    with torch.enable_grad():  # torch asks for a backward where there may be a graph, which this is called without
        taken = operator_of_attention(query.detach().requires_grad_(), key, value, causal)
    return taken == SDPBackend.CUDNN_ATTENTION


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [batch, heads, queries, width] and the log-sum-exp of each query's scores, without a graph.

    On a GPU, by cuDNN where scaled_dot_product_attention takes it, else by FlashAttention 2.
    Heads come before tokens in all arguments, and consecutive heads share a group of keys and values.

    Args:
        bias: [batch or 1, 1, queries, keys], added to the scores, in their dtype; on CPUs only.
        causal: query i sees the keys up to i.
    """
    operators: Any = torch.ops.aten
    if _takes_cudnn(query, key, value, causal):
        operator = operators._scaled_dot_product_cudnn_attention
        output, lse, *_ = operator(query, key, value, None, True, 0.0, causal, scale=scale)
        if not lse.is_contiguous():  # and backward would expect it so, without a check
            raise RuntimeError("attention by parts needs TORCH_CUDNN_SDPA_AVOID_RECOMPILE unset")
        return output, lse.squeeze(-1)
    if on_gpu(query):
        found = operators._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        operator = operators._scaled_dot_product_flash_attention_for_cpu
        found = operator(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return found[0], found[1]


def flash_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. Output and log-sum-exp may be those over more keys than these."""
    operators: Any = torch.ops.aten
    given = (gradient, query, key, value, output, lse)
    lengths = None, None, query.shape[2], key.shape[2]
    if _takes_cudnn(query, key, value, causal):
        state = torch.empty(2, dtype=torch.int64, device=query.device)  # of dropout's generator, which is not used
        operator = operators._scaled_dot_product_cudnn_attention_backward
        of_forward = output, lse.unsqueeze(-1), state[0], state[1], None
        found = operator(gradient, query, key, value, *of_forward, *lengths, 0.0, causal, scale=scale)
    elif on_gpu(query):
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        operator = operators._scaled_dot_product_flash_attention_backward
        found = operator(*given, *lengths, 0.0, causal, state, state[:0], scale=scale)
    else:
        operator = operators._scaled_dot_product_flash_attention_for_cpu_backward
        found = operator(*given, 0.0, causal, attn_mask=bias, scale=scale)
    return found[0], found[1], found[2]
