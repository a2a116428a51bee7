"""Operations whose GPU code is PyTorch's: attention in blocks, and weight gradients that are added in fp32."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.errors import largest, relative
from megalite.parallel.parameter import ProductGradient
from megalite_kernels.attention import Mask, attention, block_mask, dense_mask
from megalite_kernels.measure import Step, time_interleaved
from megalite_kernels.torch_internals import flash_attention, flash_attention_gradients, operator_of_attention

WEIGHT_GRADIENT_TOLERANCE = 1e-5  # fp32 sums of 512 products that are exact; bf16 sums would be off by 1e-3
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # norm of the error; bf16 rounds each factor by 4e-3
ATTENTION = {"documents": (None, None), "and a window": (512, None), "and capped scores": (512, 30.0)}  # window, cap


def check_weight_gradients(device: str) -> float:
    """The largest error, relative to the largest element, of bf16 weight gradients added to fp32."""
    generator = torch.Generator().manual_seed(1)
    output, inputs = (torch.randn(512, width, generator=generator).bfloat16() for width in (384, 256))
    exact = output.double().t() @ inputs.double()
    errors = []
    for overwrite, start in ((True, math.nan), (False, 1.0)):
        target = torch.full((384, 256), start, device=device)
        ProductGradient(output.to(device), inputs.to(device)).add_to(target, overwrite=overwrite)
        error = target.cpu().double() - exact - (0.0 if overwrite else start)
        errors.append((error.abs().max() / exact.abs().max()).item())
    worst = largest(errors)
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
        error = largest(relative(ours, exact) for ours, exact in zip(*found, strict=True))
        worst["error over tolerance"] = max(worst["error over tolerance"], error / ATTENTION_TOLERANCE[dtype])
        print(f"attention in blocks, {name}, {dtype}: error {error:.1e} of the norm", flush=True)
    parts = heads(2, 4096, torch.bfloat16)
    for name, (window, cap) in ATTENTION.items():
        first = first_keys(2, 4096, window)
        steps = [attention_step(parts, mask, cap) for mask in (block_mask(first), dense_mask(first))]
        times = [sum(seconds) for seconds in time_interleaved(steps, parts[0].device)]
        worst[f"times faster: {name}"] = times[1] / times[0]
        print(f"attention in blocks, {name}, 4096 tokens: {times[0] * 1e3:.1f} ms, dense {times[1] * 1e3:.1f} ms")
    before = counters["stats"]["unique_graphs"]
    for seed in range(2, 5):
        attention(*parts, block_mask(first_keys(2, 4096, None, seed)), scale=None, cap=None, dropout=None)
    return worst | {"compiled anew": counters["stats"]["unique_graphs"] - before}


def attention_step(parts: list[Tensor], mask: Mask, cap: float | None) -> Step:
    """Forward and backward."""

    def step(_: object) -> None:
        torch.autograd.grad(attention(*parts, mask, scale=None, cap=cap, dropout=None).sum(), parts)

    return step


FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def time_fused_attention(device: str) -> dict[str, object]:
    """Time causal attention of a layer of Llama 3 8B over one sample, forward and backward, by each fused operator.

    Returns the names of those that runs take, whole and by parts, and milliseconds and TFLOP/s, in turn, of each alone
    and of one part. Half of the scores are counted, twice forward and five times backward.
    """
    tokens, (heads, groups, width) = (8192, (32, 8, 128)) if device == "cuda" else (32, (4, 2, 16))
    parts = [
        torch.randn(1, tokens, count, width, dtype=torch.bfloat16, device=device) for count in (heads, groups, groups)
    ]
    inputs = [part.transpose(1, 2).requires_grad_() for part in parts]
    gradient = torch.randn_like(inputs[0])
    name = operator_of_attention(*inputs, True).name
    steps: dict[str, Step] = {each.name: partial(_by_operator, each, inputs, gradient) for each in FUSED}
    steps["by parts"] = partial(_as_part, [each.detach() for each in inputs], gradient)
    found: dict[str, object] = {"operator": name}
    for each in list(steps):
        try:
            steps[each](lambda: None)
        except RuntimeError as error:  # there is no such operator for this device
            found[each] = f"{error}".partition("\n")[0]
            del steps[each]
    flops = 7 * 2 * heads * width * tokens**2 / 2
    for each, times in zip(steps, time_interleaved(list(steps.values()), gradient.device), strict=True):
        found[each] = {"milliseconds": 1e3 * sum(times), "TFLOP/s": flops / sum(times) / 1e12}
    return found


def _by_operator(operator: SDPBackend, inputs: list[Tensor], gradient: Tensor, _: object) -> None:
    with sdpa_kernel(operator):
        output = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    torch.autograd.grad(output, inputs, gradient)


def _as_part(inputs: list[Tensor], gradient: Tensor, _: object) -> None:
    scale = 1.0 / math.sqrt(gradient.shape[-1])
    output, lse = flash_attention(*inputs, None, True, scale)
    flash_attention_gradients(gradient, *inputs, output, lse, None, True, scale)
