"""Functions by which kernels read and write moments, in Triton: see moments.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megalite_kernels.quantization_kernels import dequantized, quantized


@triton.jit
def load_moment(
    moment: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    ROOT: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """A tile in fp32, [rows, BLOCK]. FORMAT is None where the moment is a tensor of its values."""
    if FORMAT is None:
        return tl.load(moment + place, mask=present, other=0.0).to(tl.float32)
    else:  # noqa: RET505  (one of the two is compiled)
        codes = tl.load(moment + place, mask=present, other=0)
        scale = tl.load(scales + row, mask=tl.max(present.to(tl.int32), 1) > 0, other=0.0)
        value = dequantized(codes, scale, FORMAT[0], FORMAT[1])
        return value * value if ROOT else value


@triton.jit
def store_moment(
    value: tl.tensor,
    moment: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    seed: tl.tensor,
    offset: tl.tensor,
    ROOT: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    if FORMAT is None:
        tl.store(moment + place, value.to(moment.dtype.element_ty), mask=present)
    else:
        wide = tl.sqrt_rn(value) if ROOT else value
        wide = tl.where(present, wide, 0.0)
        codes, scale = quantized(wide, seed, offset + row * value.shape[1], FORMAT[0], FORMAT[1], FORMAT[2], True)
        if ROOT:
            scale = tl.where(scale < 2.0 ** (FORMAT[0] - FORMAT[1] - 63), 0.0, scale)
            there = (scale > 0.0)[:, None]
            codes = tl.where((scale == 0.0)[:, None], 0, tl.where((codes == 0) & (wide > 0.0) & there, 1, codes))
        tl.store(moment + place, codes.to(moment.dtype.element_ty), mask=present)
        tl.store(scales + row, scale, mask=tl.max(present.to(tl.int32), 1) > 0)
