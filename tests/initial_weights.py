"""The weights that a run starts from, by the rule as it is documented: for what megalite draws to be compared with.

A tensor, whole and unpadded, is a matrix of rows of its last dimension, drawn in fp32 in blocks of so many rows as make
2^16 elements, each from torch's generator on the CPU, seeded by the first 8 bytes of blake2b("seed/name/block"), the
lowest bit left out. It is scaled by its standard deviation, and only then rounded. Like the oracle this imports nothing
of megalite.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 65536


def draw(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Values of a normal distribution, fp32."""
    width, rows = shape[-1], math.prod(shape[:-1])
    step = max(1, BLOCK_ELEMENTS // width)
    blocks = []
    for number, start in enumerate(range(0, rows, step)):
        digest = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") // 2)
        blocks.append(torch.randn(min(step, rows - start), width, generator=generator))
    return (torch.cat(blocks) * std).view(shape)


@dataclass(frozen=True)
class Network:
    """Properties that determine the tensors of a network and their initial values."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    std: float
    positions: int = 0  # learned ones
    centered: bool = True  # LayerNorm
    around_one: bool = False  # a norm's weight is its distance from 1
    biases: bool = True
    gated: bool = False
    tied: bool = True
    sandwich: bool = False
    query_key_norm: bool = False
    norm_over_heads: bool = False  # of queries and keys
    output_gate: bool = False
    sinks: bool = False
    expert_layers: tuple[int, ...] = ()
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    pattern: str | None = None  # a letter a layer; `expert_layers` then counts those that are not attention

    @property
    def halves(self) -> tuple[int, int]:
        """Numbers of attention layers and of feed-forward layers."""
        if self.pattern is None:
            return self.layers, self.layers
        return self.pattern.count("*"), len(self.pattern) - self.pattern.count("*")

    def drawn(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Shapes and standard deviations of the matrices: those that add to the residual have a smaller one."""
        small = self.std / math.sqrt(sum(self.halves))
        found = {"embedding.word": ((self.vocabulary, self.hidden), self.std)}
        if self.positions:
            found["embedding.position"] = ((self.positions, self.hidden), self.std)
        if not self.tied:
            found["output"] = ((self.vocabulary, self.hidden), self.std)
        attentions, feed_forwards = self.halves
        for layer in range(attentions):
            attention = f"layers.{layer}.attention."
            found[attention + "query"] = ((self.heads, self.head_dim, self.hidden), self.std)
            found[attention + "key_value"] = ((self.groups, 2, self.head_dim, self.hidden), self.std)
            if self.sinks:
                found[attention + "sink"] = (self.heads,), self.std
            if self.output_gate:
                found[attention + "gate"] = found[attention + "query"]
            found[attention + "output"] = ((self.hidden, self.heads, self.head_dim), small)
        for layer in range(feed_forwards):
            mlp = f"layers.{layer}.mlp."
            if layer not in self.expert_layers:
                found |= self._feed_forward(mlp, (), self.ffn)
                continue
            moe = f"layers.{layer}.moe."
            found[moe + "router"] = ((self.experts, self.hidden), self.std)
            if self.router_bias:
                found[moe + "router_bias"] = (self.experts,), self.std
            found |= self._feed_forward(moe, (self.experts,), self.expert_ffn)
            if self.shared_ffn:
                found |= self._feed_forward(moe + "shared.", (), self.shared_ffn)
            if self.shared_gate:
                found[moe + "shared_gate"] = ((1, self.hidden), self.std)
        return found

    def _feed_forward(self, name: str, several: tuple[int, ...], ffn: int) -> dict[str, tuple[tuple[int, ...], float]]:
        inner = (2, ffn, self.hidden) if self.gated else (ffn, self.hidden)
        small = self.std / math.sqrt(sum(self.halves))
        return {
            name + ("gate_up" if self.gated else "up"): ((*several, *inner), self.std),
            name + "down": ((*several, self.hidden, ffn), small),
        }

    def _feed_forward_biases(
        self, name: str, several: tuple[int, ...], ffn: int
    ) -> dict[str, tuple[tuple[int, ...], float]]:
        inner = (2, ffn) if self.gated else (ffn,)
        return {
            name + ("gate_up_bias" if self.gated else "up_bias"): ((*several, *inner), 0.0),
            name + "down_bias": ((*several, self.hidden), 0.0),
        }

    def constant(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Shapes and values of the vectors."""
        found: dict[str, tuple[tuple[int, ...], float]] = {}
        norms = {"final_norm": self.hidden}
        attentions, feed_forwards = self.halves
        for layer in range(attentions):
            name = f"layers.{layer}."
            norms[name + "input_norm"] = self.hidden
            if self.sandwich:
                norms[name + "attention_output_norm"] = self.hidden
            if self.query_key_norm:
                norms |= {name + "attention.query_norm": self.head_dim, name + "attention.key_norm": self.head_dim}
            if self.biases:
                found[name + "attention.query_bias"] = (self.heads, self.head_dim), 0.0
                found[name + "attention.key_value_bias"] = (self.groups, 2, self.head_dim), 0.0
                found[name + "attention.output_bias"] = (self.hidden,), 0.0
                if self.output_gate:
                    found[name + "attention.gate_bias"] = (self.heads, self.head_dim), 0.0
        for layer in range(feed_forwards):
            name = f"layers.{layer}."
            norms[name + "mlp_norm"] = self.hidden
            if self.sandwich:
                norms[name + "mlp_output_norm"] = self.hidden
            if self.biases and layer not in self.expert_layers:
                found |= self._feed_forward_biases(name + "mlp.", (), self.ffn)
            elif self.biases:
                found |= self._feed_forward_biases(name + "moe.", (self.experts,), self.expert_ffn)
                if self.shared_ffn:
                    found |= self._feed_forward_biases(name + "moe.shared.", (), self.shared_ffn)
        for name, width in norms.items():
            shape: tuple[int, ...] = (width,)
            if self.norm_over_heads and name.endswith(("query_norm", "key_norm")):
                shape = (self.heads if name.endswith("query_norm") else self.groups, width)
            found[name + ".weight"] = shape, 0.0 if self.around_one else 1.0
            if self.centered:
                found[name + ".bias"] = (width,), 0.0
        return found

    def weights(self, seed: int, dtype: torch.dtype, *, noise: float = 0.0) -> dict[str, Tensor]:
        """Return initial weights by logical name. `noise`: deviation of noise added to constants, by the same rule."""
        values = {name: draw(name, shape, std, seed).to(dtype) for name, (shape, std) in self.drawn().items()}
        for name, (shape, value) in self.constant().items():
            values[name] = torch.full(shape, value, dtype=dtype).add_(draw(name, shape, noise, seed))
        return values
