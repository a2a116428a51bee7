"""Case of an operation for selftest, compilation and benchmarks: its inputs, its call and what it must move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """An operation with its sizes and dtypes, for any number of tokens.

    Attributes:
        operation: its `Operation`, the name by which it can be set to use the reference.
        name: name of the function, with sizes and dtypes.
        width: elements per token in the largest input.
        make_inputs: makes random inputs for a number of tokens on a device.
        run: runs the operation on the inputs, which it may overwrite. Its result in float64 is the expected result.
        keeps_inputs: True if backward reads the inputs again, so that they count as its traffic.
        traffic: returns the least bytes that forward and backward move, given inputs and outputs; None for
            `measure.traffic`.
        tolerance: largest norm of the error relative to the norm of the result; None for the tolerance of the output's
            dtype in `selftest`.
        timed: makes the call to time, if `run` does more than the operation. The call may overwrite its inputs.
        indexed: True if some accesses are of single numbers: indices decide what is read, or numbers stand apart.
    """

    operation: str
    name: str
    width: int
    make_inputs: Callable[[int, str], list[Tensor]]
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    keeps_inputs: bool = True
    traffic: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[int, int]] | None = None
    tolerance: float | None = None
    timed: Callable[[Sequence[Tensor]], Callable[[], object]] | None = None
    indexed: bool = False

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = self.run(*inputs)
        return (found,) if isinstance(found, Tensor) else found


def dtype_names(*dtypes: torch.dtype) -> str:
    """Return each name once, with slashes between them."""
    return "/".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
