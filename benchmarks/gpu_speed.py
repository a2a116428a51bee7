"""Speed of training on this machine's GPUs: variants and rivals in turn, whose losses are compared step by step."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.errors import largest
from benchmarks.gpu_shapes import Shape
from benchmarks.gpu_state import Sample, sampled, summary
from benchmarks.gpu_training import metrics_of, train
from megalite.tasks.flops import peak_flops
from megalite_kernels.measure import time_interleaved
from megalite_kernels.torch_internals import operator_of_attention

OURS = "kernels"
VARIANTS = {
    OURS: "",
    "without kernels": "--kernels reference",
    "layers compiled": "--compile",
    "fused linear cross entropy": "--fused-linear-cross-entropy",
    "compiled without kernels": "--compile --kernels reference",
}
"""Flags of each. All compute the same."""
RIVALS = {"PyTorch": "torch", "Liger-Kernel": "liger"}
"""Operations of each in `benchmarks.gpu_rival`. They start from other weights."""
ORDER = (OURS, "PyTorch", "without kernels", "Liger-Kernel", *list(VARIANTS)[2:])
"""The most telling first."""
ROUNDS = 2
WARM_UP = 14
"""Steps before those that are timed; compilation is in the first, and clocks settle."""
TOLERANCE = {"lm_loss": 2e-3, "grad_norm": 3e-2}
"""Largest of each step's relative difference between variants, whose bf16 sums are rounded in other places."""
PRODUCT = 8192


@dataclass(frozen=True)
class Run:
    """A training of one of the variants or rivals."""

    name: str
    shape: Shape
    steps: Sequence[Mapping[str, Any]]
    samples: Sequence[Sample]
    """State of the GPUs meanwhile."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of the timed steps: of half of all steps where these are few."""
        return [step["iteration_time_s"] for step in self.steps[min(WARM_UP, len(self.steps) // 2) :]]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def flops(self) -> float | None:
        """Model FLOPs of a step on one GPU, with half of the causal scores; None for a rival, which counts none."""
        step = self.steps[-1]
        rate = step.get("model_tflops_per_device")
        return None if rate is None else rate * 1e12 * step["iteration_time_s"]

    def row(self, flops: float | None, peak: float | None) -> dict[str, object]:
        """Return figures of the timed steps. `flops`: of a step on one GPU; `peak`: FLOP/s of the GPU."""
        seconds, tokens = self.seconds, self.shape.batch * self.shape.sequence
        first, last = self.steps[-len(seconds) - 1], self.steps[-1]
        walls = (last["wall_time"] - first["wall_time"]) / len(seconds)
        row: dict[str, object] = {
            "variant": self.name,
            "layers": self.shape.layers,
            "steps timed": len(seconds),
            "milliseconds": [1e3 * each for each in (min(seconds), *quartiles(seconds), max(seconds))],
            "mean milliseconds": 1e3 * statistics.mean(seconds),
            "mean milliseconds of the wall clock": 1e3 * walls,
            "tokens per second per GPU": tokens / self.median,
            "TFLOP/s per GPU": None if flops is None else flops / self.median / 1e12,
            "mfu": None if flops is None or peak is None else flops / self.median / peak,
            "peak memory bytes": self.steps[-1].get("peak_memory_bytes"),
            "lm_loss": self.steps[-1]["lm_loss"],
        }
        return row | summary(self.samples, first["wall_time"], last["wall_time"])

    def differences(self, expected: Run) -> dict[str, float]:
        """Return the largest relative difference of each step's loss and norm; infinity where one is not finite."""
        worst = {}
        for key in TOLERANCE:
            pairs = zip(self.steps, expected.steps, strict=True)
            # NaN is a word in the metrics
            worst[key] = largest(abs(float(ours[key]) / float(theirs[key]) - 1) for ours, theirs in pairs)
        return worst


def quartiles(values: Sequence[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def run_once(name: str, shape: Shape, gpus: int, *, gpu: bool, deadline: float) -> Run:
    """Train in processes of their own. Raises CalledProcessError, or TimeoutExpired at the deadline."""
    with sampled() as samples:
        if name in RIVALS:
            command = [sys.executable, "-m", "benchmarks.gpu_rival", "--shape", json.dumps(asdict(shape))]
            command += ["--operations", RIVALS[name], "--device", "cuda" if gpu else "cpu"]
            steps = metrics_of(command, gpu=gpu, deadline=deadline)
        else:
            steps = train(f"{shape.flags(gpus)} {VARIANTS[name]}", gpus, gpu=gpu, deadline=deadline)
    return Run(name, shape, steps, samples)


def run_in_turn(
    cells: Sequence[tuple[str, Shape]], gpus: int, *, gpu: bool, deadline: float
) -> Iterator[dict[str, object]]:
    """Train each variant or rival in turn, ROUNDS times and as long as there is time.

    One that fails is told once. Rows of variants say how far their losses and norms are from those of the first run of
    the same shape. The last rows tell the time of one layer, where shapes differ in their number of layers alone.
    """
    peak = peak_flops(torch.cuda.get_device_name()) if gpu else None
    cells = [(name, shape) for name, shape in cells if gpus == 1 or name not in RIVALS]
    done: list[Run] = []
    for name, shape in [*cells] * ROUNDS:
        about: dict[str, object] = {"variant": name, "layers": shape.layers}
        if time.monotonic() > deadline:
            yield about | {"left out": "no time was left"}
            continue
        if (name, shape) not in cells:
            continue
        try:
            run = run_once(name, shape, gpus, gpu=gpu, deadline=deadline)
        except subprocess.TimeoutExpired:
            yield about | {"left out": "no time was left"}
            continue
        except subprocess.CalledProcessError as error:
            cells.remove((name, shape))
            yield about | {"failed": f"exit code {error.returncode}"}
            continue
        done.append(run)
        expected = next((each for each in done if each.shape == shape and each.name == OURS), None)
        row = run.row(None if expected is None else expected.flops, peak)
        row["attention"] = attention_operator(shape, "cuda" if gpu else "cpu")
        if expected is not None and name not in RIVALS:
            row["largest relative difference"] = run.differences(expected)
        yield row
    yield from _of_a_layer(done, peak)


def _of_a_layer(runs: Sequence[Run], peak: float | None) -> Iterator[dict[str, object]]:
    """Yield what each variant takes for one layer and step: the difference of two depths over that of their layers."""
    flops = {run.shape.layers: run.flops for run in runs if run.flops is not None}
    for name in dict.fromkeys(run.name for run in runs):
        times: dict[int, list[float]] = {}
        for run in runs:
            if run.name == name:
                times.setdefault(run.shape.layers, []).extend(run.seconds)
        if len(times) != 2:
            continue
        few, many = sorted(times)
        seconds = (statistics.median(times[many]) - statistics.median(times[few])) / (many - few)
        row: dict[str, object] = {"a layer of": name, "milliseconds": 1e3 * seconds}
        if {few, many} <= flops.keys():
            needed = (flops[many] - flops[few]) / (many - few)
            row |= {
                "TFLOP/s per GPU": needed / seconds / 1e12,
                "mfu": None if peak is None else needed / seconds / peak,
            }
        yield row


@functools.cache
def attention_operator(shape: Shape, device: str) -> str:
    """Return the name of torch's operator for the causal attention of a network."""
    width, tokens = shape.hidden // shape.heads, shape.sequence
    query, key = (
        torch.empty(shape.micro_batch, count, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        for count in (shape.heads, shape.groups)
    )
    return operator_of_attention(query, key, key, True).name


def ceiling(device: str) -> dict[str, object]:
    """Return the rate of one large matrix product in bf16, which no training reaches."""
    size = PRODUCT if device == "cuda" else 64
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    ((seconds,),) = time_interleaved([lambda mark: left @ right], left.device, repeats=100)
    return {"product": f"{size}^3 in bf16", "TFLOP/s per GPU": 2 * size**3 / seconds / 1e12}
