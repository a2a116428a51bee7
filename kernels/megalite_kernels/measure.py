"""Measurement of how long operations take, and at what share of a copy's bandwidth.

Cases are much larger than the caches. A kernel shorter than its launch would be timed together with the gap before it;
so the device first gets some milliseconds of copies to do, and the calls queue up after them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.cases import Case

ELEMENTS = 2**28
"""Elements of the largest input of a case that is timed."""
WARM_UP, REPEATS = 3, 15


class Clock:
    """Measures the seconds between marks: by CUDA events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if not self._on_gpu:
            return [stop - start for start, stop in zip(self._times, self._times[1:], strict=False)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in zip(self._marks, self._marks[1:], strict=False)]


Step = Callable[[Callable[[], None]], object]
"""Call to time: it calls its argument between its parts."""


def interleaved(steps: Sequence[Step], device: torch.device, repeats: int = REPEATS) -> list[list[float]]:
    """Median seconds of the parts of each step, the steps in turn, so that a clock that falls slows all alike."""
    found: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(WARM_UP):
        for step in steps:
            step(lambda: None)
    head_start(device)
    clocks = [(times, step, Clock(device)) for _ in range(repeats) for times, step in zip(found, steps, strict=True)]
    for _, step, clock in clocks:
        clock.mark()
        step(clock.mark)
        clock.mark()
    for times, _, clock in clocks:
        times.append(clock.seconds())
    return [[statistics.median(part) for part in zip(*times, strict=True)] for times in found]


def head_start(device: torch.device) -> None:
    """Some milliseconds of work for a GPU, which the calls that follow queue behind."""
    if device.type == "cuda":
        filler = torch.empty(2**28, dtype=torch.uint8, device=device)
        for _ in range(50):
            filler.copy_(filler.flip(0))


def copy_rate(device: torch.device, nbytes: int = 2**30) -> float:
    """Bytes a second, read and written, of a plain copy."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ((seconds,),) = interleaved([lambda mark: target.copy_(source)], device)
    return 2 * nbytes / seconds


def case_step(case: Case, inputs: Sequence[Tensor]) -> Step:
    """Return the call that is timed of a case."""
    if case.timed is None:
        return step_of(case.outputs, inputs)
    alone = case.timed(inputs)
    return lambda mark: alone()


def step_of(run: Callable[[Sequence[Tensor]], Iterable[Tensor]], inputs: Sequence[Tensor]) -> Step:
    """Forward and, where the inputs require gradients, backward from gradients that are drawn once."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    incoming: list[Tensor] = []

    def step(mark: Callable[[], None]) -> None:
        outputs = [output for output in run(inputs) if output.requires_grad]
        if outputs:
            if not incoming:
                incoming.extend(torch.randn_like(output) for output in outputs)
            mark()
            torch.autograd.grad(outputs, wanted, incoming)

    return step


class Traffic(NamedTuple):
    """Bytes that an operation must at least read and write."""

    forward: int
    backward: int


def traffic(case: Case, inputs: Sequence[Tensor]) -> Traffic:
    """Forward: inputs and outputs. Backward: outgoing gradients, the inputs if they are kept, and their gradients."""
    outputs = case.outputs(inputs)
    if case.traffic is not None:
        return Traffic(*case.traffic(inputs, outputs))
    gradients = [tensor for tensor in inputs if tensor.requires_grad]
    outgoing = [output for output in outputs if output.requires_grad]
    again = inputs if case.keeps_inputs else ()
    return Traffic(_bytes(*inputs, *outputs), _bytes(*outgoing, *again, *gradients) if outgoing else 0)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
