"""Measurement of the time of operations, and of their bandwidth relative to a plain copy.

Cases are much larger than the caches. If a kernel is shorter than its launch, the time would include the gap before it.
So the device first gets some milliseconds of copies, and the calls queue up after them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels.case import Case

ELEMENTS = 2**28
"""Elements of the largest input of a timed case."""
WARM_UP, REPEATS = 3, 15


class Clock:
    """Clock for the seconds between marks: CUDA events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between each mark and the next."""
        if not self._on_gpu:
            return [stop - start for start, stop in pairwise(self._marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairwise(self._marks)]


Step = Callable[[Callable[[], None]], object]
"""Function to time. It calls its argument between its parts, for example between forward and backward."""


def time_interleaved(steps: Sequence[Step], device: torch.device, repeats: int = REPEATS) -> list[list[float]]:
    """Return the median seconds of the parts of each step."""
    return [[statistics.median(part) for part in parts] for parts in all_times(steps, device, repeats)]


def all_times(
    steps: Sequence[Step], device: torch.device, repeats: int = REPEATS, before: Callable[[], object] = lambda: None
) -> list[list[list[float]]]:
    """Return the seconds of each repeat, of each part of each step.

    Steps run in turn, so that a drop of the GPU's clock frequency slows all of them equally.

    Args:
        before: called before each step, outside its time, for example to write inputs that steps overwrite.
    """
    found: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(WARM_UP):
        for step in steps:
            before()
            step(lambda: None)
    head_start(device)
    clocks = [(times, step, Clock(device)) for _ in range(repeats) for times, step in zip(found, steps, strict=True)]
    for _, step, clock in clocks:
        before()
        clock.mark()
        step(clock.mark)
        clock.mark()
    for times, _, clock in clocks:
        times.append(clock.seconds())
    return [[list(part) for part in zip(*times, strict=True)] for times in found]


def head_start(device: torch.device) -> None:
    """Queue some milliseconds of work on a GPU. Later calls queue up after it."""
    if device.type == "cuda":
        filler = torch.empty(2**28, dtype=torch.uint8, device=device)
        for _ in range(50):
            filler.copy_(filler.flip(0))


def copy_rate(device: torch.device, nbytes: int = 2**30) -> float:
    """Return the bytes per second that a plain copy reads and writes together."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)  # equal bytes would need less power
    target = torch.empty_like(source)
    ((seconds,),) = time_interleaved([lambda mark: target.copy_(source)], device)
    return 2 * nbytes / seconds


def case_step(case: Case, inputs: Sequence[Tensor]) -> Step:
    """Return the function to time for a case."""
    if case.timed is None:
        return step_of(case.outputs, inputs)
    alone = case.timed(inputs)
    return lambda mark: alone()


def step_of(run: Callable[[Sequence[Tensor]], Iterable[Tensor]], inputs: Sequence[Tensor]) -> Step:
    """Return a step of forward and, if inputs require gradients, backward from gradients that are drawn once.

    The gradient of a scalar is 1, as that of a loss.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    output_gradients: list[Tensor] = []

    def step(mark: Callable[[], None]) -> None:
        outputs = [output for output in run(inputs) if output.requires_grad]
        if outputs:
            if not output_gradients:
                draw = ((torch.randn_like if output.dim() else torch.ones_like)(output) for output in outputs)
                output_gradients.extend(draw)
            mark()
            torch.autograd.grad(outputs, wanted, output_gradients)

    return step


class Traffic(NamedTuple):
    """The least bytes that an operation must read and write."""

    forward: int
    backward: int


def traffic(case: Case, inputs: Sequence[Tensor]) -> Traffic:
    """Return the least bytes that forward and backward of a case must move.

    Forward moves inputs and outputs. Backward moves the outputs' gradients, the inputs if they are saved, and the
    inputs' gradients.
    """
    outputs = case.outputs(inputs)
    if case.traffic is not None:
        return Traffic(*case.traffic(inputs, outputs))
    gradients = [tensor for tensor in inputs if tensor.requires_grad]
    differentiable = [output for output in outputs if output.requires_grad]
    again = inputs if case.keeps_inputs else ()
    return Traffic(_bytes(*inputs, *outputs), _bytes(*differentiable, *again, *gradients) if differentiable else 0)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
