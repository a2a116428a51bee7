"""The one place that knows which kind of device a run is on."""

from __future__ import annotations

import os
import resource
import sys
import weakref

import torch


def local_device(local_rank: int) -> torch.device:
    """The device of the process with this local rank: its CUDA (or ROCm) device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def activate(device: torch.device) -> None:
    """Make `device` the current one of this process; a no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's own random operations on `device` draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def adds_products_in(target: torch.Tensor) -> bool:
    """Tell if torch can add the product of two matrices of half its precision to `target` without a temporary."""
    return target.device.type == "cuda" and torch.version.hip is None and target.dtype == torch.float32


def make_deterministic(enabled: bool) -> None:
    """Have torch use, or not insist on, operations that give the same bits every time; to be called before the first.

    On the CPU they always do, at a fixed number of threads.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be reproducible
    if enabled != torch.are_deterministic_algorithms_enabled():  # for the call imports the compiler, a second
        torch.use_deterministic_algorithms(enabled)


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes on the host, there from now on, to and from which the device copies fast (pinned for CUDA)."""
    memory = torch.empty(size, dtype=torch.uint8).fill_(0)  # the system gives memory when it is first written to
    if device.type == "cuda" and size:
        # torch's own pinned memory comes in powers of two.
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the device; on the CPU, the peak resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
