"""All code that depends on the kind of device (CUDA, ROCm or CPU), except collectives and kernels."""

from __future__ import annotations

import os
import resource
import sys
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megalite.torch_internals import is_profiling


def local_device(local_rank: int) -> torch.device:
    """Return the device of the process with this local rank: a CUDA or ROCm device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def activate(device: torch.device) -> None:
    """Make `device` the current device of this process. A no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work. A no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_mark(device: torch.device) -> Any:
    """Return a mark of the time at which the device has done what is queued so far; see `seconds_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks of `time_mark`. The host waits for the device to pass the second one."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def finish_stream(device: torch.device) -> None:
    """Wait until the device has finished what the current stream has queued; messages of other ranks may be on their
    way. A no-op on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch's random operations on `device` use by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def default_generators() -> list[torch.Generator]:
    """Return the generators that torch's random operations use by default: the CPU's, and the current device's."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def make_deterministic(enabled: bool) -> None:
    """Turn torch's deterministic algorithms on or off. Call it before the first operation.

    On the CPU, operations are always deterministic at a fixed number of threads.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for reproducible results
    if enabled != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler, which takes a second
        torch.use_deterministic_algorithms(enabled)


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host, with all pages present, for fast copies to and from the device (pinned for CUDA)."""
    memory = torch.empty(size, dtype=torch.uint8).fill_(0)  # the first write makes the system map the pages
    page_lock(memory, device)
    return memory


def page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Keep bytes of the host where they are, for fast copies to and from the device. A no-op on the CPU."""
    if device.type == "cuda" and memory.numel():
        # Registered by hand, because torch's own pinned allocations are rounded up to powers of two.
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        # Views keep the storage, and not this tensor.
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device. The host does not wait for a GPU's queued work.

    A copy from memory that is not page-locked would wait for it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # torch keeps the memory until the copy is done
    return tensor.to(device, non_blocking=True)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on the device; on the CPU, the peak resident set size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_unused_memory(device: torch.device) -> None:
    """Return cached memory that no tensor uses to the device; on the CPU there is none."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def profile_range(name: str) -> AbstractContextManager[object]:
    """Return a context that names its block in the profile being recorded. Without a profiler it does nothing."""
    return torch.profiler.record_function(name) if is_profiling() else nullcontext()
