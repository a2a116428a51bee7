"""Low-rank adapters as one writes them down: weights with what adapters add, for the oracle of the network.

It imports nothing of megalite. The adapters of a weight are `{name}.lora_a`, `{name}.lora_b` and
`{name}.lora_magnitude`, those of a fused weight by part: `attention.key` and `attention.value` of `...key_value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.initial_weights import draw, even

FUSED = {"key_value": ("key", "value", 1), "gate_up": ("gate", "up", -3)}
"""The two parts of fused weights, and the dimension that enumerates them."""
TABLES = {"embedding.word": "embedding.word_embeddings", "output": "output_layer"}
"""Names of the adapters of tables, which have them only if they are named."""
ADAPTED = {
    *("query", "gate", "key_value", "output", "gate_up", "up", "down"),
    *("query_down", "query_up", "key_value_down", "projection", "latent_down", "latent_up"),
    *("key_value_up", "z", "dt", "x", "B", "C", "beta", "alpha", "key", "value", "decay_b", "gate_b"),
}


def columns_of(name: str, part: Tensor) -> int:
    """Return how many of the last dimensions are columns."""
    return part.dim() - 1 if name.endswith((".output", ".projection")) else 1


def of_experts(name: str) -> bool:
    """Tell whether the first dimension is that of the experts."""
    return ".moe." in name and ".shared." not in name and ".latent_" not in name


@dataclass(frozen=True)
class Adapters:
    """Options of adapters: their rank, the factor of what they add, and what they adapt."""

    rank: int
    scale: float
    names: tuple[str, ...] | None = None
    dora: bool = False

    def matrices(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str, int | None, int]]:
        """Yield each adapted matrix: its name, that of the weight, and the dimension and the number of its part."""
        for weight in weights:
            if TABLES.get(weight) in (self.names or ()):
                yield TABLES[weight], weight, None, 0
            begin, _, last = weight.rpartition(".")
            if last not in ADAPTED or not begin or begin.endswith(".indexer"):
                continue
            first, second, dimension = FUSED.get(last, (last, None, None))
            for number, part in enumerate([first] if second is None else [first, second]):
                if self.names is None or part in self.names or f"{begin}.{part}" in self.names:
                    yield f"{begin}.{part}", weight, dimension, number

    def initial(self, weights: Mapping[str, Tensor], seed: int, dtype: torch.dtype, noise: float) -> dict[str, Tensor]:
        """Return the tensors of the adapters; those that begin with zeros, with noise."""
        found = {}
        for name, weight, dimension, number in self.matrices(weights):
            whole = weights[weight]
            part = whole if dimension is None else whole.select(dimension, number)
            columns, experts = columns_of(name, part), part.shape[: int(of_experts(name))]
            rows, inner = part.shape[: part.dim() - columns], part.shape[part.dim() - columns :]
            bound = 1 / math.sqrt(math.prod(inner))
            shape = (*experts, self.rank, *inner)
            if weight == "embedding.word":
                drawn = draw(f"{name}.lora_a", shape, 1.0, seed)
            else:
                drawn = (even(f"{name}.lora_a", shape, "", 0.0, 1.0, seed) * 2 - 1) * bound
            found[f"{name}.lora_a"] = drawn.to(dtype)
            found[f"{name}.lora_b"] = draw(f"{name}.lora_b", (*rows, self.rank), noise, seed).to(dtype)
            if self.dora:
                lengths = inner if weight == "embedding.word" else rows
                found[f"{name}.lora_magnitude"] = draw(f"{name}.lora_magnitude", lengths, noise, seed).to(dtype)
        return found

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a network without adapters that computes the same."""
        found = {name: each for name, each in weights.items() if ".lora_" not in name}
        parts: dict[str, dict[int, Tensor]] = {}
        for name, weight, dimension, number in self.matrices(weights):
            whole = weights[weight]
            part = whole if dimension is None else whole.select(dimension, number)
            parts.setdefault(weight, {})[number] = self._merged(weights, name, part)
        for weight, changed in parts.items():
            whole = weights[weight]
            dimension = FUSED.get(weight.rpartition(".")[2], (None,))[-1]
            if dimension is None:
                found[weight] = changed[0]
            else:
                both = [changed.get(number, whole.select(dimension, number)) for number in range(2)]
                found[weight] = torch.stack(both, whole.dim() + dimension if dimension < 0 else dimension)
        return found

    def _merged(self, weights: Mapping[str, Tensor], name: str, part: Tensor) -> Tensor:
        a, b = weights[f"{name}.lora_a"], weights[f"{name}.lora_b"]
        columns = columns_of(name, part)
        if of_experts(name):
            changed = part + self.scale * torch.einsum("e...r,erc->e...c", b, a.flatten(2)).view_as(part)
        else:
            changed = part + self.scale * (b.flatten(0, -2) @ a.flatten(1)).view_as(part)
        if not self.dora:
            return changed
        over = (0,) if name.endswith("word_embeddings") else tuple(range(-columns, 0))
        first, now = (each.detach().square().sum(over, keepdim=True).sqrt() for each in (part, changed))
        lengths = first + weights[f"{name}.lora_magnitude"].view(first.shape)
        return lengths / now * changed
