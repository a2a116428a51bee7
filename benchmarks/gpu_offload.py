"""Costs and savings of offloading on this machine's GPU: time by fraction, hidden copies, the largest model."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from benchmarks.errors import largest
from benchmarks.gpu_shapes import LLAMA_1B, SMALL, Shape
from benchmarks.gpu_training import train
from megalite.offload.transfers import make_transfers

TOLERANCE = 2e-3
"""Largest relative difference of a loss from that without offloading: the host rounds bf16 updates otherwise."""
OVERLAP = "--overlap-cpu-optimizer-d2h-h2d"
WAYS: Mapping[str, str] = {
    "on the device": "",
    "half of the optimizer": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    "optimizer": "--optimizer-cpu-offload",
    "optimizer, overlapped": f"--optimizer-cpu-offload {OVERLAP}",
    "half of the layers": "--cpu-offloading-num-layers {half} --cpu-offloading-retain-pinned-cpu-buffers",
}
"""Flags of each way; {half} stands for half of the layers."""
ALL_ON_HOST = (
    f"--optimizer-cpu-offload {OVERLAP} --parameter-offload --data-parallel-sharding-strategy optim_grads_params "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
FAMILY = tuple(
    Shape(layers=layers, hidden=hidden, heads=heads, groups=8, ffn=ffn, micro_batch=1, batch=1, sequence=2048, steps=2)
    for layers, hidden, heads, ffn in (
        (16, 2048, 32, 8192),
        (28, 3072, 24, 8192),
        (32, 4096, 32, 14336),
        (40, 5120, 40, 17920),
        (60, 6656, 52, 17920),
    )
)
"""Networks of the Llama family, from 1 to 33 billion parameters."""


def shapes(*, gpu: bool) -> tuple[Shape, tuple[Shape, ...]]:
    """Return the network that is timed and those of which the largest is sought."""
    if gpu:
        return replace(LLAMA_1B, steps=16), FAMILY
    return SMALL, (SMALL,)


def times(*, gpu: bool, deadline: float) -> Iterator[dict[str, object]]:
    """Yield a row for each way: milliseconds, memory, losses beside those on the device, the share of hidden copies.

    Hidden is what the step does not take longer of the time that its copies of gradients and weights take alone.
    """
    shape, _ = shapes(gpu=gpu)
    first: list[dict[str, float]] = []
    for name, flags in WAYS.items():
        if time.monotonic() > deadline:
            yield {"way": name, "left out": "no time was left"}
            continue
        try:
            text = f"{shape.flags(1)} {flags.format(half=shape.layers // 2)}"
            steps = train(text, 1, gpu=gpu, deadline=deadline)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            yield {"way": name, "failed": str(error)}
            continue
        first = first or steps
        seconds, plain = _median(steps), _median(first)
        row: dict[str, object] = {
            "way": name,
            "milliseconds": 1e3 * seconds,
            "over that on the device": seconds / plain,
            "peak memory bytes": steps[-1].get("peak_memory_bytes"),
            "host bytes": steps[-1].get("host_memory_bytes"),
            "largest relative difference": largest(
                abs(ours["lm_loss"] / theirs["lm_loss"] - 1) for ours, theirs in zip(steps, first, strict=True)
            ),
        }
        if name.startswith("optimizer"):
            alone = copies(_parameters(shape), gpu=gpu)
            row |= {"milliseconds of copies": 1e3 * alone, "share hidden": 1 - max(seconds - plain, 0.0) / alone}
        yield row


def copies(elements: int, *, gpu: bool) -> float:
    """Return the seconds that fp32 gradients take to the host and bf16 weights back, each way after the other."""
    device = torch.device("cuda" if gpu else "cpu")
    transfers, part = make_transfers(device), min(elements, 1 << 26)
    spent = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        there, here = torch.zeros(part, dtype=dtype, device=device), transfers.on_host(part, dtype)
        direction = "to host" if dtype == torch.float32 else "to device"
        ends = (there, here) if direction == "to host" else (here, there)
        rounds = []
        for _ in range(4):
            began = time.perf_counter()
            transfers.begin(direction, *ends).wait()
            if gpu:
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - began)
        spent += statistics.median(rounds[1:]) * elements / part
    return spent


def largest_models(*, gpu: bool, deadline: float) -> Iterator[dict[str, object]]:
    """Yield a row for each network, until one does not fit, without offloading and with all that can be on the host."""
    for way, flags in (("on the device", ""), ("all on the host", ALL_ON_HOST)):
        for shape in shapes(gpu=gpu)[1]:
            row: dict[str, object] = {"way": way, "billions of parameters": _parameters(shape) / 1e9}
            if time.monotonic() > deadline:
                yield row | {"left out": "no time was left"}
                break
            try:
                steps = train(f"{shape.flags(1)} {flags}", 1, gpu=gpu, deadline=deadline)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                yield row | {"does not train": str(error)[-100:]}
                break
            yield row | {"peak memory bytes": steps[-1].get("peak_memory_bytes")}


def _parameters(shape: Shape) -> int:
    """Return the number of parameters of a network."""
    width = shape.hidden // shape.heads
    layer = shape.hidden * (2 * shape.hidden + 2 * shape.groups * width) + 3 * shape.hidden * shape.ffn
    return shape.layers * layer + shape.vocabulary * shape.hidden * (1 if shape.tied else 2)


def _median(steps: list[dict[str, float]]) -> float:
    return statistics.median(step["iteration_time_s"] for step in steps[len(steps) // 2 :])


def main() -> None:
    gpu = torch.cuda.is_available()
    for row in (*times(gpu=gpu, deadline=math.inf), *largest_models(gpu=gpu, deadline=math.inf)):
        print(row)


if __name__ == "__main__":
    main()
