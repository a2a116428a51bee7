"""Layout of a kernel over rows on the GPU: its view of a tensor, its tile, and its number of programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS = 16  # of each tensor that a thread holds: two accesses of 128 bits in bf16; with 8 or 32 registers spill
FEWEST_WARPS = 4  # of a program
LANES = 64 if torch.version.hip else 32  # threads of a warp
LOOPING_WARPS = 32  # of a multiprocessor: enough loads under way to fill the memory's latency
INTERPRETED_MULTIPROCESSORS = 1  # where there is no GPU: few, so that programs loop as they do on one
UNIT = 16  # elements of a flat buffer that are there together or not at all: a mask by element narrows each access


class Tile(NamedTuple):
    """`rows` by `columns` elements that a program holds at once, both powers of two, and the warps that hold them."""

    rows: int
    columns: int
    warps: int


def tile(width: int, *, largest: int) -> Tile:
    """The tile for rows of `width` elements: whole rows, several where they are short, and at most `largest` columns.

    What is wider goes through the kernel in columns, half as many at once, and half as many a thread: it is read again.
    """
    wide = width > largest
    columns = largest // 2 if wide else 1 << (width - 1).bit_length()
    warp = LANES * (ELEMENTS // 2 if wide else ELEMENTS)
    rows = max(FEWEST_WARPS * warp // columns, 1)
    return Tile(rows, columns, min(rows * columns // warp, 16))


def unit(elements: int) -> int:
    """Return how many elements of a flat buffer a mask can take for one: UNIT if they are a multiple of it, else 1."""
    return 1 if elements % UNIT else UNIT


def chunk_elements(device: torch.device) -> int:
    """Elements of flat tensors that plain operations work on at a time: what stays in a processor's cache, or keeps a
    GPU busy."""
    return 1 << 24 if device.type == "cuda" else 1 << 18


def as_rows(tensor: Tensor) -> Tensor:
    """[..., width] as [rows, width], the elements of a row side by side; a copy only where the strides ask for one."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def looping_programs(tiles: int, warps: int, device: torch.device) -> int:
    """Return how many programs of so many warps share the tiles of a kernel that adds up over them; at least one."""
    return max(min(tiles, LOOPING_WARPS // warps * _multiprocessors(device)), 1)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
