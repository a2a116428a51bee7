"""Keyed randomness: random numbers depend only on the seed and on the position for which they are drawn.

A random site masks one tensor per sample, and the caller gives the rows of it that are on this rank. The key contains
neither the rank nor the layout, and no random state is carried or saved. The same elements are therefore dropped on
every layout, at every micro-batch size, under every schedule and in every recomputation. The rule is in
`megalite_kernels.dropout`.

One operator is an exception: on GPUs, the dropout inside torch's fused attention draws its own mask. It is seeded by
`RandomKey.seed_site`, and differs between tensor-parallel sizes and between micro-batch sizes (`docs/invariants.md`).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.device import default_generator
from megalite.parallel.sequence import Runs
from megalite_kernels.dropout import drop
from megalite_kernels.dropout_mask import DropoutMask

SITES = {
    "embedding": 0,
    "attention": 1,
    "attention output": 2,
    "mlp output": 3,
    "mamba output": 4,
    "gated delta output": 5,
    "short convolution output": 6,
    "kimi delta output": 7,
    "latent attention output": 8,
    "adapter": 9,
}
"""Number of each site in the key. Each pair of a layer and a site must be unique."""


@dataclass(frozen=True)
class Site:
    """A place in the model that draws random numbers.

    In each sample, it masks a tensor [positions, hidden], or attention probabilities [heads * queries, keys].

    Attributes:
        layer: global index of the layer; 0 for the embedding, or the depth whose inputs it embeds.
        name: one of SITES.
    """

    layer: int
    name: str


@dataclass(frozen=True)
class RandomKey:
    """Key of one micro-batch's random numbers, which depend only on this key and on the site.

    Attributes:
        samples: the global number of each sample of the micro-batch, in the run's order of samples.
        later: number added to the layer of each site, for the later passes through a layer that is used several times.
    """

    seed: int
    samples: tuple[int, ...]
    later: int = 0

    def dropout_mask(self, probability: float, site: Site, rows: Runs) -> DropoutMask:
        """Return the mask of `site` for these rows of each sample's tensor."""
        return DropoutMask(probability, self.seed, site.layer + self.later, SITES[site.name], self.samples, rows)

    def drop(self, input: Tensor, probability: float, site: Site, rows: Runs) -> Tensor:
        """Apply `dropout` with a probability above 0. Compiled layers do not trace this method."""
        return drop(input, self.dropout_mask(probability, site, rows), dimension=1)

    def seed_site(self, site: Site, first_row: int, device: torch.device) -> None:
        """Seed the device's default generator, for a fused operator that draws its own mask and takes none."""
        if device.type == "meta":  # which draws nothing
            return
        layer = site.layer + self.later
        packed = struct.pack("<qqqqq", self.seed, self.samples[0], layer, SITES[site.name], first_row)
        digest = hashlib.blake2b(packed, digest_size=8).digest()
        default_generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def dropout(input: Tensor, probability: float, key: RandomKey, site: Site, rows: Runs) -> Tensor:
    """Zero elements of [sequence, batch, hidden] with `probability` and scale the rest. Does nothing at 0.

    Args:
        rows: indices in the sample of the tokens in `input`.
    """
    if probability == 0.0:
        return input
    return key.drop(input, probability, site, rows)
