"""Launch parameters of kernels over rows: the view of a tensor as rows, the tile size and the number of programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels.implementation import on_gpu

ELEMENTS = 16  # of each tensor per thread: two 128-bit accesses in bf16; with 8 or 32, registers spill
FEWEST_WARPS = 4  # per program
LANES = 64 if torch.version.hip else 32  # threads per warp
LOOPING_WARPS = 32  # per multiprocessor: enough loads in flight to hide the memory latency
INTERPRETED_MULTIPROCESSORS = 1  # without a GPU: few, so that programs loop as they do on a GPU
PLANNED_MULTIPROCESSORS = 132  # of the GPU that the meta device stands for: an H100's
IN_PLACE = frozenset({"master", "average", "squares"})  # arguments of kernels that they read and write back
UNIT = 16  # elements of a flat buffer that share one mask bit: with a mask per element, accesses become narrower


class Tile(NamedTuple):
    """The block of elements that a program loads at once, and its warps. Both sizes are powers of two."""

    rows: int
    columns: int
    warps: int


def tile(width: int, *, largest: int) -> Tile:
    """Choose the tile for rows of `width` elements.

    A tile has one full row, or several if rows are short. Rows wider than `largest` are processed in several tiles of
    `largest` / 2 columns, with half as many elements per thread. Some kernels read such rows more than once.
    """
    wide = width > largest
    columns = largest // 2 if wide else 1 << (width - 1).bit_length()
    warp = LANES * (ELEMENTS // 2 if wide else ELEMENTS)
    rows = max(FEWEST_WARPS * warp // columns, 1)
    return Tile(rows, columns, min(rows * columns // warp, 16))


def warps(elements: int) -> int:
    """Return the warps of a tile of so many elements, with half of ELEMENTS per thread: for kernels with many sums."""
    return max(elements // (LANES * ELEMENTS // 2), 1)


def unit(elements: int) -> int:
    """Return how many elements of a flat buffer share one mask bit: UNIT if their number is a multiple of it, or 1."""
    return 1 if elements % UNIT else UNIT


def chunk_elements(device: torch.device) -> int:
    """Return how many elements of a flat tensor a reference processes at once.

    They fit in a CPU's cache, or keep a GPU busy.
    """
    return 1 << 24 if on_gpu(device) else 1 << 18


def as_rows(tensor: Tensor) -> Tensor:
    """View [..., width] as [rows, width], with each row contiguous. Copies only if the strides require it."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def looping_programs(tiles: int, warps: int, device: torch.device) -> int:
    """Return how many programs share the tiles of a kernel that sums over tiles. It is at least one."""
    count = PLANNED_MULTIPROCESSORS if on_gpu(device) else INTERPRETED_MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(min(tiles, LOOPING_WARPS // warps * count), 1)


@contextmanager
def recorded_launches(record: Callable[[str, Sequence[Tensor]], None]) -> Iterator[None]:
    """Call `record` with the name and the tensors of each Triton kernel on the meta device, in place of its launch.

    Tensors that a kernel both reads and writes are there twice.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction  # what kernels are under TRITON_INTERPRET=1
    from triton.runtime.jit import JITFunction

    launches = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        tensors = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        if not any(each.is_meta for each in tensors):
            return launches[type(kernel)](kernel, *args, **options)
        named = dict(zip(kernel.arg_names, args, strict=False))
        again = [named[name] for name in IN_PLACE & named.keys()]
        record(kernel.__name__, [*tensors, *(each for each in again if each is not None)])
        return None

    for kind in launches:
        kind.run = run
    try:
        yield
    finally:
        for kind, launch in launches.items():
            kind.run = launch
