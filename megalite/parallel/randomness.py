"""Keyed randomness: what is drawn follows from the seed and from what it is drawn for, and from nothing else.

A random site masks a tensor of each sample, and knows which box of it is on this rank. Neither the rank nor the split
is part of the key, and no random state is carried or saved: so the same elements are dropped on every layout, at every
micro-batch size, under every schedule and in every recomputation. The rule: `megalite_kernels.dropout`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.device import default_generator
from megalite.parallel.sequence import Runs
from megalite_kernels.dropout import DropoutMask, drop

SITES = {"embedding": 0, "attention": 1, "attention output": 2, "mlp output": 3}
"""Number of each site in the rule: no two layers' and no two sites' numbers may be the same."""


@dataclass(frozen=True)
class Site:
    """A place in the model that draws random numbers.

    In each sample it masks a tensor [positions, hidden], or the probabilities [heads * queries, keys] of attention.

    Attributes:
        layer: global index of the layer; 0 for the embedding.
        name: one of SITES.
    """

    layer: int
    name: str


@dataclass(frozen=True)
class RandomKey:
    """Key of one micro-batch's random numbers, which depend only on it and on the site.

    `samples`: the number of each row's sample in the run's order.
    """

    seed: int
    samples: tuple[int, ...]

    def dropout_mask(self, probability: float, site: Site, rows: Runs) -> DropoutMask:
        """Return what `site` drops from these rows of its tensor, of each sample."""
        return DropoutMask(probability, self.seed, site.layer, SITES[site.name], self.samples, rows)

    def drop(self, input: Tensor, probability: float, site: Site, rows: Runs) -> Tensor:
        """Do as `dropout`, at a probability above 0: compiled layers leave this untraced."""
        return drop(input, self.dropout_mask(probability, site, rows), dimension=1)

    def seed_site(self, site: Site, first_row: int, device: torch.device) -> None:
        """Seed the device's default generator for a fused operator that draws by itself, which follows no rule."""
        packed = struct.pack("<qqqqq", self.seed, self.samples[0], site.layer, SITES[site.name], first_row)
        digest = hashlib.blake2b(packed, digest_size=8).digest()
        default_generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def dropout(input: Tensor, probability: float, key: RandomKey, site: Site, rows: Runs) -> Tensor:
    """Zero elements of [sequence, batch, hidden] with `probability` and scale the rest; the identity at 0.

    Args:
        rows: the places in the sample of the sequence that is here.
    """
    if probability == 0.0:
        return input
    return key.drop(input, probability, site, rows)
