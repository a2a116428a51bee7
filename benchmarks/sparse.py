"""Sparse attention on a CPU: a layer beside one of latent attention, a decoded token, and what is kept for backward.

    python -m benchmarks.sparse [--rounds 9]

- layer: forward and backward of a layer over 2,048 tokens in fp32, one thread, with 256 chosen keys a token, beside
  latent attention of the same sizes; without the indexer's loss, and with it over the chosen and over all keys. All
  keys are multiplied, chosen or not, so none is below 1.
- one token: a token after 8,192 cached ones, of which it attends to 512, beside the layer that attends to all; 16 heads
  as in DeepSeek-V3, 16 of an indexer of the same width.
- kept: bytes that the layer's forward keeps for backward, beside latent attention's.

All step in turn, round by round; a figure is the median over rounds of the ratio of CPU times, with quartiles.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor

from benchmarks import latent
from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.latent import DECODED, TRAINED, context_of, layer_of, normal
from benchmarks.results import write_results
from megalite.model.cache import StageCache
from megalite.model.indexer import IndexerSizes
from megalite.model.latent_attention import LatentAttention, LatentSizes
from megalite.model.norm import RMSNorm
from megalite.model.sparse_attention import SparseAttention
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh

TOKENS, CACHED = 2048, 8192
ONE_TOKEN = 1.0
"""The most that a token should take of that which attends to all keys."""


def sparse_layer(sizes: LatentSizes, topk: int, **options: bool) -> SparseAttention:
    """Return a layer with initial weights and norms of its latents."""
    indexer = IndexerSizes(16, 64, topk, epsilon=1e-6, rotated=sizes.rotated, **options)
    context = ParallelContext(ParallelMesh())
    layer = SparseAttention(context, "latent_attention", sizes, indexer=indexer, norm=RMSNorm)
    initialize(layer, seed=1)
    return layer


def outputs(layer: LatentAttention, hidden: Tensor) -> list[Tensor]:
    """Return the output of a layer, and the sum of its loss if it has one."""
    found: Any = layer(hidden, context_of(TRAINED, 0, len(hidden)))
    return [found[0], *found[1].values()] if isinstance(found, tuple) else [found]


def layer_step(layer: LatentAttention) -> Step:
    """Return forward and backward of a layer."""
    hidden, gradient = normal(TOKENS, 1, TRAINED.hidden).requires_grad_(), normal(TOKENS, 1, TRAINED.hidden)

    def step() -> None:
        found = outputs(layer, hidden)
        torch.autograd.backward(found, [gradient, *(torch.ones(()) for _ in found[1:])])

    return step


@torch.no_grad()
def token_step(layer: LatentAttention) -> Step:
    """Return a token after the cached ones, some times."""
    cache = StageCache(CACHED + 1)
    for start in range(0, CACHED, 1024):
        layer(normal(1024, 1, DECODED.hidden), context_of(DECODED, start, 1024, cache))
    hidden = normal(1, 1, DECODED.hidden)

    @torch.no_grad()
    def step() -> None:
        for _ in range(latent.REPEATS):
            layer(hidden, context_of(DECODED, CACHED, 1, cache))

    return step


def kept_bytes(layer: LatentAttention) -> int:
    """Return the bytes of the tensors that a forward saves for backward, without the weights."""
    weights = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = outputs(layer, normal(TOKENS, 1, TRAINED.hidden).requires_grad_())
    del found
    return sum(saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {count} rounds, median [quartiles] of ratios of CPU time")
    layers = {
        "latent": layer_of(TRAINED),
        "sparse": sparse_layer(TRAINED, 256),
        "sparse, loss over chosen keys": sparse_layer(TRAINED, 256, trained=True, sparse_loss=True),
        "sparse, loss over all keys": sparse_layer(TRAINED, 256, trained=True),
    }
    steps = {name: layer_step(layer) for name, layer in layers.items()}
    steps |= {"token": token_step(layer_of(DECODED)), "token, sparse": token_step(sparse_layer(DECODED, 512))}
    times = measure(steps, count, ParallelMesh())
    found = {name: ratios(times, name, "latent") for name in layers if name != "latent"}
    found["one token"] = ratios(times, "token, sparse", "token")
    for name, values in found.items():
        print(f"  {name:32} {quartiles(values)}" + (f"  (goal {ONE_TOKEN})" if name == "one token" else ""))
    plain = kept_bytes(layers["latent"])
    kept = {name: kept_bytes(layer) / plain for name, layer in layers.items() if name != "latent"}
    for name, value in kept.items():
        print(f"  {'kept, ' + name:32} {value:.3f}")
    write_results("sparse", {"load": os.getloadavg(), "found": found, "seconds": times, "kept": kept})


if __name__ == "__main__":
    main()
