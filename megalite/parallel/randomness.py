"""Keyed randomness: before each random site the generator is seeded from what names the site.

No random state is carried or saved. The same bits come out whatever the layout of pipeline and data-parallel ranks, the
schedule and the recomputation; where a tensor is split over ranks, the shard is part of the key.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.device import default_generator


@dataclass(frozen=True)
class Site:
    """A place in the model that draws random numbers."""

    layer: int
    """Global index of the layer; -1 for the embedding."""
    name: str
    shard: int = 0
    """Index of this rank's part where the tensor is split over ranks, else 0."""


@dataclass(frozen=True)
class RandomKey:
    """What the random numbers of one micro-batch depend on, beside the site."""

    seed: int
    sample: int
    """Global id of the micro-batch's first sample."""

    def seed_site(self, site: Site, device: torch.device) -> None:
        """Seed the device's default generator for the draws of `site`."""
        packed = struct.pack("<qqqq", self.seed, self.sample, site.layer, site.shard)
        digest = hashlib.blake2b(packed, digest_size=8, key=site.name.encode()).digest()
        default_generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def dropout(input: Tensor, probability: float, key: RandomKey, site: Site) -> Tensor:
    """Zero elements with `probability` and scale the rest by 1 / (1 - probability); the identity at 0."""
    if probability == 0.0:
        return input
    return drop(input, probability, key, site)


def drop(input: Tensor, probability: float, key: RandomKey, site: Site) -> Tensor:
    """As `dropout`, at a probability above 0."""
    key.seed_site(site, input.device)
    return F.dropout(input, probability)
