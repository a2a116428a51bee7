"""Every operation at the shapes that models train with, on any device.

One table for three readers: `selftest` runs it on a GPU, `make compile-kernels` compiles it on the meta device, and
benchmarks/kernels.py times it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.norm import layer_norm, rms_norm

HIDDEN = (2048, 4096, 5120, 8192, 16384)
HEAD = 128
# of the activations and of the weights; a weight around one is fp32 beside every activation
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)


@dataclass(frozen=True)
class Case:
    """An operation with its sizes and dtypes, but for the number of tokens."""

    operation: str
    """The name of its file, by which it can be left to the reference."""
    name: str
    """Of the function, and its sizes and dtypes."""
    width: int
    """Elements of a token in the largest input."""
    make_inputs: Callable[[int, str], list[Tensor]]
    """Random ones, of so many tokens, on a device. Those that require a gradient get one."""
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    """The operation on the inputs, which it may write over. In float64 it is what the kernels are compared with."""
    keeps_inputs: bool = True
    """Whether backward reads the inputs again: they count as traffic there."""
    backward_reads: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]] | None = None
    """Where it is neither the inputs nor nothing: which of inputs and outputs backward reads."""
    tolerance: float | None = None
    """Of the error's norm over the result's; None: that of each output's dtype, as `selftest` has it."""
    timed: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    """What is timed where `run` does more than the operation, such as copies of what is written over."""

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = self.run(*inputs)
        return (found,) if isinstance(found, Tensor) else found


def _dtypes(*dtypes: torch.dtype) -> str:
    return "/".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _norm_inputs(
    width: int, vectors: int, dtypes: tuple[torch.dtype, torch.dtype], tokens: int, device: str
) -> list[Tensor]:
    input = torch.randn(tokens, width, dtype=dtypes[0], device=device)
    weights = [torch.randn(width, dtype=dtypes[1], device=device) for _ in range(vectors)]
    return [tensor.requires_grad_() for tensor in (input, *weights)]


def _norms() -> Iterator[Case]:
    for function, vectors in ((rms_norm, 1), (layer_norm, 2)):
        for width in (HEAD, *HIDDEN) if vectors == 1 else HIDDEN:
            for dtypes in DTYPES:
                name = f"{function.__name__} {width} {_dtypes(*dtypes)}"
                inputs = partial(_norm_inputs, width, vectors, dtypes)
                yield Case("norm", name, width, inputs, partial(function, epsilon=1e-5))


def cases() -> Iterator[Case]:
    yield from _norms()
