"""Recurrences and short convolutions token by token: the formulas in numpy and in torch, without anything of megalite.

Shapes are those of the kernels: tokens first, [tokens, batch, heads, width]. `first` [batch, tokens] has the index of
the first token of each token's document. The state is [batch, heads, key width, value width].
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def delta_rule(
    query: Array, key: Array, value: Array, decay: Array, step: Array, first: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """Return outputs and the last state of S <- e^decay S; S <- S + key (x) step * (value - S^T key)."""
    return _walk(query, key, value, decay, step, first, state, delta=True)


def state_space(
    query: Array, key: Array, value: Array, decay: Array, step: Array, first: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """Return outputs and the last state of S <- e^decay S + key (x) step * value."""
    return _walk(query, key, value, decay, step, first, state, delta=False)


def _walk(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    step: Array,
    first: Array,
    state: Array | None,
    delta: bool,
) -> tuple[Array, Array]:
    tokens, samples, heads, width = value.shape
    of_key_head = heads // key.shape[2]
    last = np.zeros((samples, heads, key.shape[3], width)) if state is None else state.copy()
    output = np.zeros_like(value)
    for sample in range(samples):
        for head in range(heads):
            matrix = last[sample, head]
            for token in range(tokens):
                q, k = query[token, sample, head // of_key_head], key[token, sample, head // of_key_head]
                if first[sample, token] == token:
                    matrix = np.zeros_like(matrix)
                matrix = np.exp(decay[token, sample, head]) * matrix
                seen = matrix.T @ k if delta else 0.0
                matrix = matrix + np.outer(k, step[token, sample, head] * (value[token, sample, head] - seen))
                output[token, sample, head] = matrix.T @ q
            last[sample, head] = matrix
    return output, last


def recurrence_in_torch(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, first: Tensor, *, delta: bool
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state as torch computes them, with gradients of all inputs.

    A decay [tokens, batch, heads, key width] is that of each row of the state.
    """
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    groups = torch.arange(value.shape[2]) // (value.shape[2] // key.shape[2])
    query, key = query[:, :, groups], key[:, :, groups]
    state = torch.zeros(*value.shape[1:3], key.shape[3], value.shape[3], dtype=value.dtype)
    outputs = []
    for token in range(len(value)):
        state = state * (first[:, token] != token).to(state.dtype)[:, None, None, None]
        state = state * decay[token].exp().unsqueeze(-1)
        added = value[token]
        if delta:
            added = added - torch.einsum("bhkv,bhk->bhv", state, key[token])
        state = state + torch.einsum("bhk,bhv,bh->bhkv", key[token], added, step[token])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[token]))
    return torch.stack(outputs), state


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, *, silu: bool) -> Tensor:
    """Return the causal convolution of each channel over the tokens of its document, with gradients of all inputs."""
    tokens, taps = len(input), weight.shape[1]
    outputs = []
    for token in range(tokens):
        total = torch.zeros_like(input[0]) if bias is None else bias.expand_as(input[0])
        for back in range(min(taps, token + 1)):
            seen = (token - back >= first[:, token]).to(input.dtype).unsqueeze(1)
            total = total + input[token - back] * seen * weight[:, taps - 1 - back]
        outputs.append(total * torch.sigmoid(total) if silu else total)
    return torch.stack(outputs)
