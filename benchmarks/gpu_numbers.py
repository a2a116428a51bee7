"""The self-test's numbers of every kernel, in processes side by side: most of their time is compilation."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from megalite_kernels import cases
from megalite_kernels.case import Case
from megalite_kernels.selftest import Numbers, check_numbers

PROCESSES = 16
"""The most, which share the GPU's memory: eight of the cases need several GB each."""


def check_side_by_side(chosen: Sequence[Case], device: str, deadline: float = math.inf) -> Iterator[Numbers]:
    """Yield the numbers of each case, in order. Raises TimeoutError at the deadline, of the monotonic clock."""
    processes = max(min(os.cpu_count() or 1, PROCESSES, len(chosen)), 1)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        found = [pool.submit(_check_named, case.name, device) for case in chosen]
        for case, each in zip(chosen, found, strict=True):
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            yield Numbers(case, *each.result(left))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _check_named(name: str, device: str) -> tuple[float, str]:
    (numbers,) = check_numbers([case for case in cases.cases() if case.name == name], device)
    if device == "cuda":
        torch.cuda.empty_cache()  # for the others
    return numbers.error, numbers.failure
