"""Triton's interpreter, made to compute what a GPU computes and to find what a GPU would hide.

The stock interpreter (3.5 to 3.9) computes bf16 on raw bits and truncates where a GPU rounds, reads and writes memory
that no argument holds, and runs one program after the other. Under this one

- bf16 is held as fp32, rounded to nearest even after each operation;
- fp8 e4m3fn and e5m2 are cast as NVIDIA's GPUs do it, and no arithmetic is done in them but products, whose operands
  keep their subnormal numbers;
- an access outside what the arguments' views hold is an error, also between the rows of a slice;
- so is an element that one program stores and another loads or stores, and every atomic operation, whose order changes
  from run to run;
- integers of 32 bits that overflow are an error;
- so is a load of what nothing was written to: `hardened` fills fresh memory with NaN (integers: their largest value),
  which inputs therefore must not hold, but within `nan_is_written`; lanes that are masked and have no `other` are NaN
  as well.

It replaces private parts of Triton: what another version has elsewhere fails at import, not silently. It also does once
what the stock interpreter repeats: it patches the language for good, not at each launch and at each call of a function
inside one, looks a dtype up in a cache, and multiplies the high words of integers as arrays, not one by one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

if "triton" in sys.modules:
    assert sys.modules["triton"].knobs.runtime.interpret, "Triton was imported before its interpreter"
os.environ["TRITON_INTERPRET"] = "1"  # read where Triton's own functions are defined
import triton
import triton.language as tl
from triton.runtime import interpreter as stock

from tests.kernels.memory import KernelFault, Launch
from tests.kernels.number_formats import from_bf16, from_fp8, rounded, to_bf16, to_fp8

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]  # what the tests start has none of this

# ------------------------------------------------------------------------------------------------- launches

_launch: Launch | None = None
_runs: tuple[int, ...] | None = None
_finds_unwritten = True


@contextmanager
def only_programs(*numbers: int) -> Iterator[None]:
    """Run these programs of each launch alone; negative numbers count from the end.

    So a kernel meets tensors of more than 2^31 elements in the memory that a few rows take.
    """
    global _runs
    _runs = numbers
    try:
        yield
    finally:
        _runs = None


@contextmanager
def nan_is_written() -> Iterator[None]:
    """Here inputs may hold NaN, and a load of what nothing was written to is not found."""
    global _finds_unwritten
    _finds_unwritten = False
    try:
        yield
    finally:
        _finds_unwritten = True


@contextmanager
def hardened() -> Iterator[None]:
    """Fresh memory holds NaN, so that a load from it is found."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Executor(stock.GridExecutor):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        global _launch
        options = {name: value for name, value in kwargs.items() if name in self.arg_names}
        arguments = dict(zip(self.arg_names, args, strict=False)) | options
        before, _launch = _launch, Launch(arguments)
        try:
            values = {
                name: value if name in self.constexprs else stock._implicit_cvt(value)
                for name, value in arguments.items()
            }
            grid = self.grid(values) if callable(self.grid) else self.grid
            grid = (*grid, 1, 1)[:3]
            stock.interpreter_builder.set_grid_dim(*grid)
            count = int(np.prod(grid))
            numbers = range(count) if _runs is None else [number % count for number in _runs]
            for number in numbers:
                _launch.program = number
                place = (int(index) for index in np.unravel_index(number, grid))
                stock.interpreter_builder.set_grid_idx(*place)
                self.fn(**values)
        finally:
            _launch = before


# ------------------------------------------------------------------------------------------------- number formats

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_stock_dtype, _stock_size = stock._get_np_dtype, stock._validate_np_data_size
_stock_compute, _stock_dot = stock.InterpreterBuilder.binary_op, stock.InterpreterBuilder.create_dot


@cache
def _dtype_of_scalars(scalar: Any) -> np.dtype:
    return np.dtype(np.float32) if scalar == tl.bfloat16 else _stock_dtype(scalar)


def _dtype(triton_type: Any) -> np.dtype:
    scalar = triton_type.scalar
    return _stock_dtype(scalar) if isinstance(scalar, tl.pointer_type) else _dtype_of_scalars(scalar)


def _high_words(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the upper 64 bits of products of 64 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFF_FFFF)
    (a, b), (c, d) = ((words >> half, words & low) for words in (left.astype(np.uint64), right.astype(np.uint64)))
    middle = a * d + (b * d >> half)
    return a * c + (middle >> half) + (b * c + (middle & low) >> half)


def _round_handle(handle: Any) -> None:
    if handle.dtype == tl.bfloat16 and handle.data.dtype != bool:
        handle.data = rounded(handle.data)
    elif not stock._validate_np_data_size(handle.data, handle.dtype):
        raise ValueError(f"{handle.data.dtype} is wider than {handle.dtype}")


def _cast(builder: Any, source: Any, target: Any, *rest: Any) -> Any:
    narrow, wanted = FP8.get(source.dtype.scalar), FP8.get(target.scalar)
    values = source.data if narrow is None else from_fp8(source.data, narrow)
    return stock.TensorHandle(
        values.astype(_dtype(target)) if wanted is None else to_fp8(values, wanted), target.scalar
    )


def _compute(builder: Any, left: Any, right: Any, operation: Any) -> Any:
    if left.dtype.scalar.is_fp8():
        raise KernelFault("arithmetic in fp8: cast what is loaded to fp32")
    return _stock_compute(builder, left, right, operation)


def _dot(builder: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
    narrow = [FP8.get(each.dtype.scalar) for each in (left, right)]
    if None in narrow:
        return _stock_dot(builder, left, right, total, *rest)
    a, b = (from_fp8(each.data, format) for each, format in zip((left, right), narrow, strict=True))
    return stock.TensorHandle(np.matmul(a, b, dtype=total.data.dtype) + total.data, total.dtype.scalar)


def _bitcast(builder: Any, source: Any, target: Any) -> Any:
    data = to_bf16(source.data) if source.dtype.scalar == tl.bfloat16 else source.data
    if target.scalar == tl.bfloat16:
        return stock.TensorHandle(from_bf16(data.view(np.uint16)), tl.bfloat16)
    return stock.TensorHandle(data.view(_stock_dtype(target)), target.scalar)


# ------------------------------------------------------------------------------------------------- access


def _unwritten(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind == "i" and values.itemsize > 1:
        return values == np.iinfo(values.dtype).max
    return np.zeros(values.shape, bool)


def _load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
    assert _launch is not None
    element = pointers.get_element_ty()
    raw = np.dtype(np.uint16) if element == tl.bfloat16 else _stock_dtype(element)
    active = np.broadcast_to(mask.data, pointers.data.shape)
    _launch.touch(pointers.data, active, store=False)
    found = stock._interpreter.load(pointers.data, active, np.zeros(pointers.data.shape, raw), raw)
    values = from_bf16(found) if element == tl.bfloat16 else found
    if _finds_unwritten and (_unwritten(values) & active).any():
        raise KernelFault(f"unwritten: program {_launch.program} loads what nothing was written to")
    if other is not None:
        values = np.where(active, values, other.data)
    elif not active.all():
        values = np.where(active, values, np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max)
    return stock.TensorHandle(values.astype(_dtype(element), copy=False), element)


def _store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    assert _launch is not None
    element, shape = pointers.get_element_ty(), pointers.data.shape
    active = np.ascontiguousarray(np.broadcast_to(mask.data, shape))
    _launch.touch(pointers.data, active, store=True)
    if len(np.unique(pointers.data[active])) < active.sum():
        raise KernelFault(f"two lanes of program {_launch.program} store one element")
    data = to_bf16(value.data) if element == tl.bfloat16 else value.data
    return stock._interpreter.store(pointers.data, np.ascontiguousarray(np.broadcast_to(data, shape)), active)


def _refuse_atomic(builder: Any, *rest: Any) -> Any:
    raise KernelFault("atomic: the order of atomic operations changes from run to run")


_stock_patch = stock._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    _stock_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda value: value.handle.data.item())  # 3.6's fails with numpy 2.4


def _install() -> None:
    stock._patch_lang_tensor = _patch
    stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # and never restored
    stock._patch_lang = lambda function: None
    assert callable(stock.np_umulhi_u64)
    stock.np_umulhi_u64 = _high_words
    builder = stock.InterpreterBuilder
    casts = ["si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp"]
    replaced = dict.fromkeys(["cast_impl", *(f"create_{cast}" for cast in casts)], _cast)
    replaced |= {"create_bitcast": _bitcast, "create_masked_load": _load, "create_masked_store": _store}
    replaced |= {"binary_op": _compute, "create_dot": _dot}
    replaced |= dict.fromkeys(("create_atomic_rmw", "create_atomic_cas"), _refuse_atomic)
    replaced["create_fabs"] = lambda self, value: stock.TensorHandle(np.abs(value.data), value.dtype.scalar)
    for name, function in replaced.items():
        assert hasattr(builder, name), f"this Triton has no {name}"
        setattr(builder, name, function)
    builder.get_bf16 = lambda self, value: stock.TensorHandle(np.array([value], np.float32), tl.bfloat16)
    stock._get_np_dtype = _dtype
    stock._validate_np_data_size = lambda data, dtype: dtype == tl.bfloat16 or _stock_size(data, dtype)
    stock.TensorHandle.__post_init__ = _round_handle
    stock.GridExecutor = _Executor
    stock.interpreter_builder.options = stock.InterpreterOptions(debug=True)  # looks for overflow


_install()
