"""Operations whose GPU code is PyTorch's: attention in blocks, and weight gradients that are added in fp32."""

from __future__ import annotations

import itertools
import math
import statistics

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from megalite.parallel.parameter import ProductGradient
from megalite_kernels.attention import attention, block_mask, dense_mask

WEIGHT_GRADIENT_TOLERANCE = 1e-5  # fp32 sums of 512 products that are exact; bf16 sums would be off by 1e-3
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # norm of the error; bf16 rounds each factor by 4e-3
ATTENTION = {"documents": (None, None), "and a window": (512, None), "and capped scores": (512, 30.0)}  # window, cap


def check_weight_gradients() -> float:
    """The largest error, relative to the largest element, of bf16 weight gradients added to fp32 on the GPU."""
    generator = torch.Generator().manual_seed(1)
    output, inputs = (torch.randn(512, width, generator=generator).bfloat16() for width in (384, 256))
    exact = output.double().t() @ inputs.double()
    worst = 0.0
    for overwrite, start in ((True, math.nan), (False, 1.0)):
        target = torch.full((384, 256), start, device="cuda")
        ProductGradient(output.cuda(), inputs.cuda()).add_to(target, overwrite=overwrite)
        error = target.cpu().double() - exact - (0.0 if overwrite else start)
        worst = max(worst, (error.abs().max() / exact.abs().max()).item())
    print(f"bf16 weight gradients added in fp32: error {worst:.1e} of the largest", flush=True)
    return worst


def first_keys(batch: int, sequence: int, window: int | None, seed: int = 1) -> Tensor:
    """The first key that each query sees, of documents of about a thousand tokens."""
    tokens = torch.arange(sequence)
    begins = torch.rand(batch, sequence, generator=torch.Generator().manual_seed(seed)) < 1 / 1000
    near = torch.zeros_like(tokens) if window is None else (tokens - window).clamp(min=0)
    return torch.maximum((tokens * begins).cummax(dim=1).values, near).cuda()


def heads(batch: int, sequence: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries of 16 heads, keys and values of 4, as a layer has them."""
    shapes = ((sequence, batch, count, 128) for count in (16, 4, 4))
    return [torch.randn(shape, device="cuda", dtype=dtype).permute(1, 2, 0, 3).requires_grad_() for shape in shapes]


def check_attention() -> dict[str, float]:
    """The largest error of attention in blocks, forward and backward, over what is tolerated, against float64; how much
    faster it is than with a dense mask; and how often it was compiled for what differs in nothing but its documents.
    """
    worst: dict[str, float] = {"error over tolerance": 0.0}
    for (name, (window, cap)), dtype in itertools.product(ATTENTION.items(), ATTENTION_TOLERANCE):
        parts = heads(2, 2048, dtype)
        wide = [part.detach().double().requires_grad_() for part in parts]
        first, found = first_keys(2, 2048, window), []
        for inputs, mask in ((parts, block_mask(first)), (wide, dense_mask(first))):
            mixed = attention(*inputs, mask, scale=None, cap=cap, dropout=None)
            found.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
        errors = [((ours - exact).norm() / exact.norm()).item() for ours, exact in zip(*found, strict=True)]
        error = max(errors) if all(map(math.isfinite, errors)) else math.inf
        worst["error over tolerance"] = max(worst["error over tolerance"], error / ATTENTION_TOLERANCE[dtype])
        print(f"attention in blocks, {name}, {dtype}: error {error:.1e} of the norm", flush=True)
    parts = heads(2, 4096, torch.bfloat16)
    for name, (window, cap) in ATTENTION.items():
        first = first_keys(2, 4096, window)
        times = [time_attention(parts, mask, cap) for mask in (block_mask(first), dense_mask(first))]
        worst[f"times faster: {name}"] = times[1] / times[0]
        print(f"attention in blocks, {name}, 4096 tokens: {times[0] * 1e3:.1f} ms, dense {times[1] * 1e3:.1f} ms")
    before = counters["stats"]["unique_graphs"]
    for seed in range(2, 5):
        attention(*parts, block_mask(first_keys(2, 4096, None, seed)), scale=None, cap=None, dropout=None)
    return worst | {"compiled anew": counters["stats"]["unique_graphs"] - before}


def time_attention(parts: list[Tensor], mask: Tensor | BlockMask, cap: float | None) -> float:
    """Median seconds of forward and backward."""

    def once() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(attention(*parts, mask, scale=None, cap=cap, dropout=None).sum(), parts)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return statistics.median([once() for _ in range(13)][3:])
