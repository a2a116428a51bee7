"""The Triton kernels on this machine's GPU: their numbers against float64, and their bandwidth beside a copy's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from megalite_kernels.implementation import Choice, choose
from megalite_kernels.norm import layer_norm, rms_norm

TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # norm of the error, as the tests have it
SHAPES = ((1, 64), (7, 1000), (4099, 128), (1025, 4096), (515, 8192), (300, 20000))  # tokens, hidden
HIDDEN = (1024, 4096, 8192, 16384)
ELEMENTS = 2**28  # of the tensors that are timed: far beyond the caches, and longer than a launch takes
IMPLEMENTATIONS: tuple[Choice, ...] = ("triton", "reference")


def norm(parts: list[Tensor]) -> Tensor:
    return rms_norm(*parts, 1e-5) if len(parts) == 2 else layer_norm(*parts, 1e-5)


def norm_inputs(tokens: int, hidden: int, dtype: torch.dtype, device: str, *, bias: bool) -> list[Tensor]:
    shapes = [(tokens, hidden), *[(hidden,)] * (1 + bias)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def check_norms(device: str = "cuda") -> float:
    """The largest error of output and gradients over what is tolerated; infinite where two runs differ by a bit."""
    worst = 0.0
    choose("triton")
    for (tokens, hidden), dtype, bias in itertools.product(SHAPES, TOLERANCE, (False, True)):
        parts = norm_inputs(tokens, hidden, dtype, device, bias=bias)
        gradient = torch.randn_like(parts[0])
        wide = [part.detach().double().requires_grad_() for part in parts]
        runs = []
        for inputs, incoming in ((parts, gradient), (parts, gradient), (wide, gradient.double())):
            output = norm(inputs)
            runs.append([output, *torch.autograd.grad(output, inputs, incoming)])
        for ours, again, exact in zip(*runs, strict=True):
            error = ((ours.double() - exact).norm() / exact.norm()).item() / TOLERANCE[dtype]
            same = torch.equal(ours, again) and math.isfinite(error)
            worst = max(worst, error if same else math.inf)
    choose("auto")
    print(f"norms in Triton: error {worst:.2f} of what is tolerated", flush=True)
    return worst


def time_norms() -> list[dict[str, object]]:
    """Milliseconds, GB/s and the share of a copy's bandwidth, forward and backward, of kernels and reference."""
    source = torch.randn(ELEMENTS, dtype=torch.bfloat16, device="cuda")
    copied = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: copied.copy_(source))
    print(f"a copy: {copy / 1e9:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = []
    for bias, hidden, choice in itertools.product((False, True), HIDDEN, IMPLEMENTATIONS):
        choose(choice)
        parts = norm_inputs(ELEMENTS // hidden, hidden, torch.bfloat16, "cuda", bias=bias)
        output = norm(parts)
        gradient = source.view_as(output)

        def forward(parts: list[Tensor] = parts) -> None:
            norm(parts)

        def backward(output: Tensor = output, parts: list[Tensor] = parts, gradient: Tensor = gradient) -> None:
            torch.autograd.grad(output, parts, gradient, retain_graph=True)

        for direction, call, streams in (("forward", forward, 2), ("backward", backward, 3)):
            time = seconds(call)
            rate = streams * source.nbytes / time
            name = "layer_norm" if bias else "rms_norm"
            row = {"operation": name, "hidden": hidden, "direction": direction, "kernels": choice}
            rows.append(row | {"ms": time * 1e3, "GB/s": rate / 1e9, "of a copy": rate / copy})
            print(
                f"{name:10} {hidden:5} {direction:8} {choice:9} {time * 1e3:7.3f} ms {rate / 1e9:5.0f} GB/s "
                f"{rate / copy:4.0%} of a copy",
                flush=True,
            )
    choose("auto")
    return rows


def seconds(call: Callable[[], object]) -> float:
    """Median of 20 calls on the GPU."""
    times = []
    for _ in range(23):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median([start.elapsed_time(stop) / 1e3 for start, stop in times[3:]])
