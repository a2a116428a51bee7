"""The rival: a Llama-style training step in plain PyTorch, as short as it can be written without being slow.

F.linear, scaled_dot_product_attention, F.cross_entropy, AdamW(fused=True), gradients accumulated by autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(hidden)) for _ in range(2)])
        shapes = [(3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
        self.qkv, self.out, self.gate_up, self.down = (nn.Parameter(torch.randn(s) * 0.02) for s in shapes)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        normed = F.rms_norm(x, (hidden,), self.norms[0], 1e-5)
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in F.linear(normed, self.qkv).chunk(3, dim=-1)
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, sequence, hidden), self.out)
        gate, up = F.linear(F.rms_norm(x, (hidden,), self.norms[1], 1e-5), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class PlainLlama(nn.Module):
    def __init__(self, vocabulary: int, layers: int, hidden: int, heads: int, ffn: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocabulary, hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.output = nn.Parameter(torch.randn(vocabulary, hidden) * 0.02)
        half = hidden // heads // 2
        angles = torch.outer(torch.arange(sequence), 10000.0 ** (-torch.arange(half) / half))
        self.cosine, self.sine = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = F.linear(F.rms_norm(x, self.norm.shape, self.norm, 1e-5), self.output)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(model: PlainLlama, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
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
