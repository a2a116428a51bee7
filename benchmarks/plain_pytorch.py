"""The rival: a Llama-style training step in plain PyTorch, as short as it can be written without being slow.

F.linear, scaled_dot_product_attention, F.cross_entropy, AdamW(fused=True), gradients accumulated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of [tokens, hidden] and [tokens]."""
    return F.cross_entropy(F.linear(x, weight), labels)


class Operations(NamedTuple):
    """Operations that a library of kernels may replace."""

    rms_norm: Callable[[Tensor, Tensor], Tensor] = rms_norm
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = linear_cross_entropy


PLAIN = Operations()


class Layer(nn.Module):
    def __init__(
        self, hidden: int, heads: int, ffn: int, groups: int | None = None, operations: Operations = PLAIN
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.operations = heads, groups or heads, operations
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(hidden)) for _ in range(2)])
        width = hidden // heads
        shapes = [
            ((heads + 2 * self.groups) * width, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)
        ]  # fmt: skip
        self.qkv, self.out, self.gate_up, self.down = (nn.Parameter(torch.randn(s) * 0.02) for s in shapes)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        width = hidden // self.heads
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(1, 2)
            for part in F.linear(self.operations.rms_norm(x, self.norms[0]), self.qkv).split(
                [hidden, self.groups * width, self.groups * width], dim=-1
            )
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        shared = self.groups != self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, sequence, hidden), self.out)
        gate, up = F.linear(self.operations.rms_norm(x, self.norms[1]), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(self.operations.swiglu(gate, up), self.down)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class PlainLlama(nn.Module):
    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        sequence: int,
        *,
        groups: int | None = None,
        tied: bool = False,
        operations: Operations = PLAIN,
    ) -> None:
        super().__init__()
        self.operations = operations
        self.embedding = nn.Parameter(torch.randn(vocabulary, hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn, groups, operations) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.output = self.embedding if tied else nn.Parameter(torch.randn(vocabulary, hidden) * 0.02)
        half = hidden // heads // 2
        angles = torch.outer(torch.arange(sequence), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.operations.loss(self.operations.rms_norm(x, self.norm).flatten(0, 1), self.output, labels.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One optimizer step over the micro-batches, clipped at norm 1."""
    for tokens, labels in batches:
        (model(tokens, labels) / len(batches)).backward()
    return update(model, optimizer)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip, step, and forget the gradients."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
