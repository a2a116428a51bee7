"""Functions by which kernels read and write master weights, in Triton: see master_weights.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_master(master: tl.tensor, parameters: tl.tensor, place: tl.tensor, present: tl.tensor) -> tl.tensor:
    """In fp32. A master of 16-bit integers is remainders."""
    if master.dtype.element_ty == tl.int16:
        bits = tl.load(parameters + place, mask=present, other=0).to(tl.int32) << 16
        bits += tl.load(master + place, mask=present, other=0)
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505  (one of the two is compiled)
        return tl.load(master + place, mask=present, other=0.0).to(tl.float32)


@triton.jit
def store_master(
    value: tl.tensor, master: tl.tensor, parameters: tl.tensor, place: tl.tensor, present: tl.tensor
) -> None:
    """And the parameters, where they are not their own masters."""
    if parameters is not None and parameters.dtype.element_ty == tl.int16:
        bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + (1 << 15)) >> 16
        tl.store(parameters + place, upper.to(tl.int16), mask=present)
        if master.dtype.element_ty == tl.int16:
            tl.store(master + place, (bits - (upper << 16)).to(tl.int16), mask=present)
    elif parameters is not None:
        tl.store(parameters + place, value.to(parameters.dtype.element_ty), mask=present)
    if master.dtype.element_ty != tl.int16:
        tl.store(master + place, value.to(master.dtype.element_ty), mask=present)
