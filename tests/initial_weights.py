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
RECURRENT = {"M": "mamba", "G": "gated_delta", "L": "short_convolution", "K": "kimi_delta"}


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


def even(name: str, shape: tuple[int, ...], then: str, low: float, high: float, seed: int) -> Tensor:
    """Values drawn evenly, whole, by a generator seeded by "seed/name", fp32.

    "logarithm" takes theirs; "step" takes them as logarithms of what a softplus gives, at least 1e-4, and inverts it.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") // 2)
    values = torch.rand(shape, generator=generator) * (high - low) + low
    if then == "logarithm":
        return values.log()
    if then == "step":
        steps = values.exp().clamp(min=1e-4)
        return steps + torch.log(-torch.expm1(-steps))
    return values


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
    behind: tuple[int, ...] = ()  # 1 for each layer, or letter, whose norms are of outputs alone
    query_key_norm: bool = False
    norm_over_heads: bool = False  # of queries and keys
    output_gate: bool = False
    sinks: bool = False
    expert_layers: tuple[int, ...] = ()
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: int = 0  # width of the routed experts' rows, if it is another than `hidden`
    pattern: str | None = None  # a letter a layer; `expert_layers` then counts the feed-forward layers
    mamba: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # heads, groups, width, state, taps
    delta: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # key heads, heads, key width, value width, taps
    convolution: tuple[int, bool] = (0, False)  # taps of a short convolution, and whether it has biases
    kimi: tuple[int, int, int, float | None] = (0, 0, 0, None)  # heads, width, taps, bound of the decay
    router_bias: bool = False
    latents: tuple[int | None, int, int, int, int] | None = None
    """Sizes of latent attention, in the place of attention: rank of queries and of the rest, width of keys, of what is
    rotated, of values."""
    indexers: tuple[int, int] | None = None  # of sparse attention: heads, width
    indexed: tuple[int, ...] = ()  # numbers of the layers of latent attention that have one

    @property
    def halves(self) -> tuple[int, int]:
        """Numbers of attention layers and of feed-forward layers."""
        if self.pattern is None:
            return 0 if self.latents else self.layers, self.layers
        return self.pattern.count("*"), self.pattern.count("-") + self.pattern.count("E")

    @property
    def latent_layers(self) -> int:
        """Number of layers of latent attention."""
        return self.layers * bool(self.latents) if self.pattern is None else sum(map(self.pattern.count, "+D"))

    @property
    def small(self) -> float:
        """Standard deviation of what adds to the residual."""
        return self.std / math.sqrt(2 * self.layers if self.pattern is None else len(self.pattern))

    def drawn(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Shapes and standard deviations of the matrices: those that add to the residual have a smaller one."""
        small = self.small
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
            found |= self._feed_forward(moe, (self.experts,), self.expert_ffn, self.latent or self.hidden)
            if self.latent:
                found[moe + "latent_down"] = ((self.latent, self.hidden), self.std)
                found[moe + "latent_up"] = ((self.hidden, self.latent), small)
            if self.router_bias:
                found[moe + "router_bias"] = (self.experts,), self.std
            if self.shared_ffn:
                found |= self._feed_forward(moe + "shared.", (), self.shared_ffn)
            if self.shared_gate:
                found[moe + "shared_gate"] = ((1, self.hidden), self.std)
        heads, groups, width, state, _ = self.mamba
        for layer in range((self.pattern or "").count("M")):
            name = f"layers.{layer}.mamba."
            for part, shape in (("z", (heads, width)), ("x", (heads, width)), ("B", (groups, state))):
                found[name + part] = ((*shape, self.hidden), self.std)
            found[name + "C"], found[name + "dt"] = found[name + "B"], ((heads, self.hidden), self.std)
            found[name + "output"] = ((self.hidden, heads, width), small)
        keys, heads, width, wide, _ = self.delta
        for layer in range((self.pattern or "").count("G")):
            name = f"layers.{layer}.gated_delta."
            for part, shape in (("query", (keys, width)), ("value", (heads, wide)), ("beta", (heads,))):
                found[name + part] = ((*shape, self.hidden), self.std)
            found[name + "key"], found[name + "z"] = found[name + "query"], found[name + "value"]
            found[name + "alpha"] = found[name + "beta"]
            found[name + "output"] = ((self.hidden, heads, wide), small)
        for layer in range((self.pattern or "").count("L")):
            name = f"layers.{layer}.short_convolution."
            found |= {name + part: ((self.hidden, self.hidden), self.std) for part in ("B", "C", "x")}
            found[name + "output"] = ((self.hidden, self.hidden), small)
        for layer in range(self.latent_layers):
            name, (query_rank, rank, keys, rotated, wide) = f"layers.{layer}.latent_attention.", self._latents
            width = keys + rotated
            if query_rank is None:
                found[name + "query"] = ((self.heads, width, self.hidden), self.std)
            else:
                found[name + "query_down"] = ((query_rank, self.hidden), self.std)
                found[name + "query_up"] = ((self.heads, width, query_rank), self.std)
            found[name + "key_value_down"] = ((rank + rotated, self.hidden), self.std)
            found[name + "key_value_up"] = ((self.heads, keys + wide, rank), self.std)
            if self.output_gate:
                found[name + "gate"] = ((self.heads, wide, self.hidden), self.std)
            found[name + "output"] = ((self.hidden, self.heads, wide), small)
            if self.indexers is not None and layer in self.indexed:
                heads, width = self.indexers
                found[name + "indexer.query"] = ((heads, width, query_rank or self.hidden), self.std)
                found[name + "indexer.key"] = ((width, self.hidden), self.std)
                found[name + "indexer.weights"] = ((heads, self.hidden), self.std)
        heads, width, _, _ = self.kimi
        for layer in range((self.pattern or "").count("K")):
            name = f"layers.{layer}.kimi_delta."
            found |= {name + part: ((heads, width, self.hidden), self.std) for part in ("query", "key", "value")}
            found[name + "beta"] = ((heads, self.hidden), self.std)
            for part in ("decay", "gate"):
                found[f"{name}{part}_a"] = ((width, self.hidden), self.std)
                found[f"{name}{part}_b"] = ((heads, width, width), self.std)
            found[name + "output"] = ((self.hidden, heads, width), small)
        return found

    def uniform(self) -> dict[str, tuple[tuple[int, ...], str, float, float]]:
        """Shapes of what is drawn evenly between two numbers, whole: what is then done with it, and the two."""
        found: dict[str, tuple[tuple[int, ...], str, float, float]] = {}
        heads, groups, width, state, taps = self.mamba
        for layer in range((self.pattern or "").count("M")):
            name, bound = f"layers.{layer}.mamba.", taps**-0.5
            for part, shape in (("x", (heads, width)), ("B", (groups, state)), ("C", (groups, state))):
                found[f"{name}conv_{part}"] = ((*shape, taps), "", -bound, bound)
                found[f"{name}conv_{part}_bias"] = (shape, "", -bound, bound)
            found[name + "A_log"] = ((heads,), "logarithm", 1.0, 16.0)
            found[name + "dt_bias"] = ((heads,), "step", math.log(1e-3), math.log(1e-1))
        keys, heads, width, wide, taps = self.delta
        for layer in range((self.pattern or "").count("G")):
            name, bound = f"layers.{layer}.gated_delta.", taps**-0.5
            for part, shape in (("query", (keys, width)), ("key", (keys, width)), ("value", (heads, wide))):
                found[f"{name}conv_{part}"] = ((*shape, taps), "", -bound, bound)
            found[name + "A_log"] = ((heads,), "logarithm", 1.0, 16.0)
        taps, biases = self.convolution
        for layer in range((self.pattern or "").count("L")):
            name, bound = f"layers.{layer}.short_convolution.", taps**-0.5
            found[name + "conv"] = ((self.hidden, taps), "", -bound, bound)
            if biases:
                found[name + "conv_bias"] = ((self.hidden,), "", -bound, bound)
        heads, width, taps, least = self.kimi
        for layer in range((self.pattern or "").count("K")):
            name, bound = f"layers.{layer}.kimi_delta.", taps**-0.5
            for part in ("query", "key", "value"):
                found[f"{name}conv_{part}"] = ((heads, width, taps), "", -bound, bound)
            found[name + "dt_bias"] = ((heads, width), "step", math.log(1e-3), math.log(1e-1))
            if least is None:
                found[name + "A_log"] = ((heads,), "logarithm", 1.0, 16.0)
        return found

    @property
    def _latents(self) -> tuple[int | None, int, int, int, int]:
        assert self.latents is not None
        return self.latents

    def _feed_forward(
        self, name: str, several: tuple[int, ...], ffn: int, hidden: int | None = None
    ) -> dict[str, tuple[tuple[int, ...], float]]:
        hidden = self.hidden if hidden is None else hidden
        inner = (2, ffn, hidden) if self.gated else (ffn, hidden)
        small = self.small
        return {
            name + ("gate_up" if self.gated else "up"): ((*several, *inner), self.std),
            name + "down": ((*several, hidden, ffn), small),
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
        for layer in range(self.latent_layers):
            name = f"layers.{layer}.latent_attention"
            norms[name + "_norm"] = self.hidden
            if self.sandwich:
                norms[name + "_output_norm"] = self.hidden
            query_rank, rank, *_ = self._latents
            if self.query_key_norm:
                norms[name + ".key_value_norm"] = rank
                norms |= {} if query_rank is None else {name + ".query_norm": query_rank}
            if self.biases:
                found[name + ".output_bias"] = (self.hidden,), 0.0
            if self.indexers is not None and layer in self.indexed:
                found[name + ".indexer.key_norm.weight"] = (self.indexers[1],), 0.0 if self.around_one else 1.0
                found[name + ".indexer.key_norm.bias"] = (self.indexers[1],), 0.0
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
        heads, _, inner, _, _ = self.mamba
        for layer in range((self.pattern or "").count("M")):
            norms |= dict.fromkeys([f"layers.{layer}.mamba_norm"], self.hidden)
            found[f"layers.{layer}.mamba.D"] = (heads,), 1.0
            found[f"layers.{layer}.mamba.norm.weight"] = (heads, inner), 1.0
        _, heads, _, wide, _ = self.delta
        for layer in range((self.pattern or "").count("G")):
            norms |= dict.fromkeys([f"layers.{layer}.gated_delta_norm"], self.hidden)
            found[f"layers.{layer}.gated_delta.dt_bias"] = (heads,), 1.0
            found[f"layers.{layer}.gated_delta.norm.weight"] = (wide,), 1.0
        for layer in range((self.pattern or "").count("L")):
            norms |= dict.fromkeys([f"layers.{layer}.short_convolution_norm"], self.hidden)
            for part in ("B", "C", "x", "output") if self.convolution[1] else ():
                found[f"layers.{layer}.short_convolution.{part}_bias"] = (self.hidden,), 0.0
        heads, width, _, least = self.kimi
        for layer in range((self.pattern or "").count("K")):
            norms |= dict.fromkeys([f"layers.{layer}.kimi_delta_norm"], self.hidden)
            found[f"layers.{layer}.kimi_delta.norm.weight"] = (width,), 1.0
            if least is not None:
                found[f"layers.{layer}.kimi_delta.A_log"] = (heads,), 0.0
        for kind in RECURRENT if self.sandwich else ():
            for layer in range((self.pattern or "").count(kind)):
                norms[f"layers.{layer}.{RECURRENT[kind]}_output_norm"] = self.hidden
        for before, after in self._moved().items():
            norms[after] = norms.pop(before)
        for name, width in norms.items():
            shape: tuple[int, ...] = (width,)
            if self.norm_over_heads and name.endswith(("query_norm", "key_norm")):
                shape = (self.heads if name.endswith("query_norm") else self.groups, width)
            found[name + ".weight"] = shape, 0.0 if self.around_one else 1.0
            if self.centered:
                found[name + ".bias"] = (width,), 0.0
        return found

    def _moved(self) -> dict[str, str]:
        """Names of norms of inputs that are not there, each with that of an output that is there instead."""
        letters = self.pattern or ("+-" if self.latents else "*-") * self.layers
        behind = self.behind if self.pattern else [one for one in self.behind for _ in range(2)]
        found: dict[str, str] = {}
        for place, one in enumerate(behind):
            letter, before = letters[place], letters[:place]
            number = before.count(letter) if letter not in "-E" else before.count("-") + before.count("E")
            half = {"*": ("input", "attention"), "-": ("mlp", "mlp"), "E": ("mlp", "mlp")}
            own = RECURRENT.get(letter, "latent_attention")
            first, last = half.get(letter, (own, own))
            found |= {f"layers.{number}.{first}_norm": f"layers.{number}.{last}_output_norm"} if one else {}
        return found

    def weights(self, seed: int, dtype: torch.dtype, *, noise: float = 0.0) -> dict[str, Tensor]:
        """Return initial weights by logical name. `noise`: deviation of noise added to constants, by the same rule."""
        values = {name: draw(name, shape, std, seed).to(dtype) for name, (shape, std) in self.drawn().items()}
        for name, (shape, then, low, high) in self.uniform().items():
            values[name] = even(name, shape, then, low, high, seed).to(dtype)
        for name, (shape, value) in self.constant().items():
            values[name] = torch.full(shape, value, dtype=dtype).add_(draw(name, shape, noise, seed))
        return values
