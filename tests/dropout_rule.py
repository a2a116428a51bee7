"""The rule of docs/invariants.md by which elements are dropped, written once more, in Python's integers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 2**64 - 1


@dataclass(frozen=True)
class Dropout:
    """Dropout of a batch whose rows are these samples of the run."""

    seed: int
    samples: Sequence[int]
    hidden: float
    attention: float

    def embedding(self, hidden: Tensor) -> Tensor:
        return self.drop(hidden, self.hidden, 0, 0)

    def probabilities(self, layer: int, probabilities: Tensor) -> Tensor:
        return self.drop(probabilities, self.attention, layer, 1)

    def attended(self, layer: int, hidden: Tensor) -> Tensor:
        return self.drop(hidden, self.hidden, layer, 2)

    def transformed(self, layer: int, hidden: Tensor) -> Tensor:
        return self.drop(hidden, self.hidden, layer, 3)

    def drop(self, whole: Tensor, probability: float, layer: int, site: int) -> Tensor:
        """Drop elements of `[batch, ...]`, a tensor that is not split."""
        if probability == 0.0:
            return whole
        limit = round(65536 * probability)
        drawn = [random_bits(self.seed, sample, layer, site, whole[0].numel()) for sample in self.samples]
        kept = torch.tensor(drawn).view(whole.shape) >= limit
        return whole * kept / ((65536 - limit) / 65536)


@functools.cache
def random_bits(seed: int, sample: int, layer: int, site: int, count: int) -> list[int]:
    """So many numbers of 16 bits for a site, of which each counter gives 16."""
    numbers: list[int] = []
    for counter in range(1, count // 16 + 2):
        for word in philox((counter, sample, layer, site), (seed, 0)):
            numbers += [word >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    return numbers[:count]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x64-10 (Salmon, Moraes, Dror, Shaw, SC'11, section 3.3)."""
    first, second, third, fourth = counter
    for turn in range(10):
        one, other = 0xD2E7470EE14C6C93 * first, 0xCA5A826395121157 * third
        low, high = key[0] + turn * 0x9E3779B97F4A7C15 & MASK, key[1] + turn * 0xBB67AE8584CAA73B & MASK
        first, second = (other >> 64) ^ second ^ low, other & MASK
        third, fourth = (one >> 64) ^ fourth ^ high, one & MASK
    return first, second, third, fourth
