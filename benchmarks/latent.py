"""Attention over latents on a CPU: its time beside its bare products, a decoded token, what is kept and what is sent.

    python -m benchmarks.latent [--rounds 9]

- layer: forward and backward of a layer over 1,024 tokens in fp32, one thread, beside the sum of its matrix products
  (each forward, and both of its backward) and of torch's scaled_dot_product_attention of the same heads, values as wide
  as keys or narrower, whichever takes less time.
- one token: a token after 2,048 cached ones, 16 heads as in DeepSeek-V3, beside the same with keys and values of all
  cached tokens made of their latents.
- counted: numbers that are cached of a token, and numbers that a rank gathers of a token under sequence parallelism.

All step in turn, round by round; a figure is the median over rounds of the ratio of CPU times, with quartiles.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.latent_attention import LatentAttention, LatentCache, LatentSizes
from megalite.model.norm import RMSNorm
from megalite.model.rotary import tables_of
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout

TOKENS, CACHED, REPEATS = 1024, 2048, 5
TRAINED = LatentSizes(
    hidden=1024, heads=8, query_rank=384, rank=256, key_width=64, rotated=32, value_width=64, scale=96**-0.5
)
DECODED = LatentSizes(
    hidden=1024, heads=16, query_rank=None, rank=512, key_width=128, rotated=64, value_width=128, scale=192**-0.5
)
GOALS = {"layer": 1.25, "one token": 0.2}
"""The most that each figure should be."""


def layer_of(sizes: LatentSizes) -> LatentAttention:
    """Return a layer with initial weights and norms of its latents."""
    layer = LatentAttention(ParallelContext(ParallelMesh()), "latent_attention", sizes, norm=RMSNorm)
    initialize(layer, seed=1)
    return layer


def context_of(sizes: LatentSizes, start: int, tokens: int, cache: StageCache | None = None) -> LayerContext:
    """Return the context of so many tokens from a position on."""
    positions = torch.arange(start, start + tokens)[None]
    frequencies = 10_000.0 ** -(torch.arange(sizes.rotated // 2) / (sizes.rotated // 2))
    mask = None
    if cache is not None:
        cache.move_to(positions)
        mask = cache.mask()
    layout, key = SequenceLayout.whole(tokens), RandomKey(0, (0,))
    return LayerContext(tables_of(frequencies, positions), None, {None: mask}, key, layout, layout.runs, cache)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def layer_step() -> Step:
    """Return forward and backward of the layer."""
    layer, context = layer_of(TRAINED), context_of(TRAINED, 0, TOKENS)
    hidden, gradient = normal(TOKENS, 1, TRAINED.hidden).requires_grad_(), normal(TOKENS, 1, TRAINED.hidden)
    return lambda: layer(hidden, context).backward(gradient)


def products_step() -> Step:
    """Return the matrix products of the layer, forward and backward, and nothing else."""
    weights = [each.detach() for each in layer_of(TRAINED).parameters() if each.dim() == 2]
    inputs = [normal(TOKENS, weight.shape[1]) for weight in weights]
    gradients = [normal(TOKENS, weight.shape[0]) for weight in weights]

    def step() -> None:
        for weight, input, gradient in zip(weights, inputs, gradients, strict=True):
            F.linear(input, weight), gradient @ weight, gradient.t() @ input

    return step


def attention_step(value_width: int) -> Step:
    """Return forward and backward of torch's attention with values of this width."""
    heads, width = TRAINED.heads, TRAINED.query_width
    query, key, value = (normal(1, heads, TOKENS, each).requires_grad_() for each in (width, width, value_width))
    gradient = normal(1, heads, TOKENS, value_width)

    def step() -> object:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(output, (query, key, value), gradient)

    return step


class _WrittenOut(LatentAttention):
    """Latent attention that makes keys and values of all cached tokens."""

    def absorbing_is_less(self, queries: int, keys: int) -> bool:
        return False


@torch.no_grad()
def token_step(*, absorbed: bool) -> Step:
    """Return a token after the cached ones, some times."""
    layer, cache = layer_of(DECODED), StageCache(CACHED + 1)
    layer.__class__ = LatentAttention if absorbed else _WrittenOut
    layer(normal(CACHED, 1, DECODED.hidden), context_of(DECODED, 0, CACHED, cache))
    hidden = normal(1, 1, DECODED.hidden)

    @torch.no_grad()
    def step() -> None:
        for _ in range(REPEATS):
            layer(hidden, context_of(DECODED, CACHED, 1, cache))

    return step


def counted() -> dict[str, float]:
    """Return numbers of a token in the cache, and of what a rank gathers, beside those of the keys and values."""
    layer, cache = layer_of(DECODED), StageCache(8)
    with torch.no_grad():
        layer(normal(8, 1, DECODED.hidden), context_of(DECODED, 0, 8, cache))
    kept = cache.of(layer, LatentCache).extend(normal(1, 1, DECODED.rank + DECODED.rotated), cache).shape[-1]
    keys_and_values = DECODED.heads * (DECODED.query_width + DECODED.value_width)
    gathered = TRAINED.rank + TRAINED.rotated + (TRAINED.query_rank or 0)
    return {
        "cached, of rank + rotated": kept / (DECODED.rank + DECODED.rotated),
        "cached, of keys and values": kept / keys_and_values,
        "gathered, of hidden": gathered / TRAINED.hidden,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {count} rounds, median [quartiles] of ratios of CPU time")
    steps = {
        "layer": layer_step(),
        "products": products_step(),
        "attention": attention_step(TRAINED.value_width),
        "attention, one width": attention_step(TRAINED.query_width),
        "absorbed": token_step(absorbed=True),
        "written out": token_step(absorbed=False),
    }
    times = measure(steps, count, ParallelMesh())
    attention = map(min, times["attention"], times["attention, one width"])
    times["bare"] = [sum(each) for each in zip(times["products"], attention, strict=True)]
    found = {"layer": ratios(times, "layer", "bare"), "one token": ratios(times, "absorbed", "written out")}
    for name, values in found.items():
        print(f"  {name:28} {quartiles(values)}  (goal {GOALS[name]})")
    numbers = counted()
    for name, value in numbers.items():
        print(f"  {name:28} {value:.4f}")
    write_results(
        "latent", {"load": os.getloadavg(), "found": found, "seconds": times, "counted": numbers, "goals": GOALS}
    )


if __name__ == "__main__":
    main()
