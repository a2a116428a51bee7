"""The interpreter computes bf16 as torch does, and finds each planted fault."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.extras.planner.dry_run import dry_run
from tests.kernels.interpreter import FP8, nan_is_written, only_programs
from tests.kernels.memory import KernelFault
from tests.kernels.number_formats import rounded


@triton.jit
def copy(source, target, count, SIZE: tl.constexpr, WRITTEN: tl.constexpr):
    """Right where there are as many programs as SIZE goes into count, and WRITTEN is the smaller of the two."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place, mask=place < count, other=0.0), mask=place < WRITTEN)


@triton.jit
def far_copy(source, target, stride):
    row = tl.program_id(0)
    tl.store(target + row, tl.load(source + row * stride))


@triton.jit
def sum_up(source, target):
    tl.store(target, tl.load(source + tl.program_id(0)))


@triton.jit
def shift_in_place(values):
    program = tl.program_id(0)
    tl.store(values + program + 1, tl.load(values + program))


@triton.jit
def add_atomically(source, target):
    tl.atomic_add(target, tl.load(source + tl.program_id(0)))


@triton.jit
def fold(source, target, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place // 2, tl.load(source + place))


@triton.jit
def masked_without_other(source, target, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target, tl.sum(tl.load(source + place, mask=place < count), 0))


@triton.jit
def arithmetic(x, y, results, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(results + place, a * b)
    tl.store(results + SIZE + place, a + b)
    tl.store(results + 2 * SIZE + place, a - b)
    tl.store(results + 3 * SIZE + place, tl.where(a < b, a, b))
    tl.store(results + 4 * SIZE + place, (a.to(tl.float32) * b.to(tl.float32) + 1.0).to(tl.bfloat16))


@triton.jit
def cast(source, target, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))


@triton.jit
def add(source, target):
    tl.store(target, tl.load(source) + tl.load(source + 1))


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_bf16_is_torchs() -> None:
    x, y = numbers(512, torch.bfloat16).view(2, 256)
    results = torch.empty(5, 256, dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, results, 256)
    wide = (x.float() * y.float() + 1.0).bfloat16()
    assert torch.equal(results, torch.stack([x * y, x + y, x - y, torch.minimum(x, y), wide]))


def test_bf16_rounds_to_nearest_even() -> None:
    ties = torch.arange(0x3F80_0000, 0x3F90_0000, 0x4000, dtype=torch.int32).view(torch.float32)
    values = torch.cat([ties, numbers(10_000), torch.tensor([float("inf"), -0.0, 3.4e38])])
    assert torch.equal(torch.from_numpy(rounded(values.numpy())), values.bfloat16().float())


@pytest.mark.parametrize("format", FP8.values(), ids=str)
def test_fp8_is_torchs_but_for_what_is_too_large(format: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format)
    largest = torch.finfo(format).max
    ties = codes.float().nan_to_num(0.0, 0.0, 0.0).sort()[0].unfold(0, 2, 1).mean(-1)
    beyond = torch.tensor([1.1, 2.0, 1e9, torch.inf]) * largest
    values = torch.cat([ties, torch.nextafter(ties, ties * 2), 3 * numbers(1538), 1e-3 * numbers(1538)])[:4086]
    values = torch.cat([values.clamp(-largest, largest), beyond, -beyond, torch.tensor([torch.nan, 0.0])])
    with nan_is_written():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            wide, narrow = torch.empty(256, dtype=dtype), torch.empty(4096, dtype=format)
            cast[(1,)](codes, wide, 256)
            assert torch.equal(wide.nan_to_num(7.0, 8.0), codes.to(dtype).nan_to_num(7.0, 8.0))
            padded = torch.cat([values, torch.zeros(4096 - len(values))]).to(dtype)
            cast[(1,)](padded, narrow, 4096)
            expected = padded.float().clamp(-largest, largest).to(format)
            assert torch.equal(narrow.view(torch.uint8), expected.view(torch.uint8))


def test_arithmetic_in_fp8_is_found() -> None:
    with pytest.raises(KernelFault, match="arithmetic in fp8"):
        add[(1,)](torch.ones(2).to(torch.float8_e5m2), torch.empty(1))


def test_what_is_right_passes() -> None:
    source, target = numbers(10), torch.empty(10)
    copy[(3,)](source, target, 10, 4, 10)
    assert torch.equal(source, target)


def test_a_load_beyond_the_end_is_found() -> None:
    with pytest.raises(KernelFault, match="loads from memory that no argument has"):
        copy[(3,)](numbers(10), torch.empty(10), 12, 4, 10)


def test_a_store_beyond_the_end_is_found() -> None:
    with pytest.raises(KernelFault, match="program 2 stores"):
        copy[(3,)](numbers(10), torch.empty(12)[:10], 10, 4, 12)


def test_a_load_between_the_rows_of_a_slice_is_found() -> None:
    with pytest.raises(KernelFault, match="out of bounds: program 1 loads element 4 of the memory of source"):
        copy[(2,)](numbers(16).view(2, 8)[:, :4], torch.empty(8), 8, 4, 8)


def test_two_programs_that_store_one_element_are_found() -> None:
    with pytest.raises(KernelFault, match="two programs: 1 stores element 0 of target"):
        sum_up[(2,)](numbers(2), torch.empty(1))


def test_a_store_to_what_another_program_loads_is_found() -> None:
    with pytest.raises(KernelFault, match="two programs: 1 loads element 1 of values, which another program stored"):
        shift_in_place[(2,)](numbers(3))


def test_two_lanes_that_store_one_element_are_found() -> None:
    with pytest.raises(KernelFault, match="two lanes"):
        fold[(1,)](numbers(4), torch.empty(4), 4)


def test_an_atomic_operation_is_found() -> None:
    with pytest.raises(KernelFault, match="atomic"):
        add_atomically[(2,)](numbers(2), torch.zeros(1))


def test_an_offset_beyond_32_bits_is_found() -> None:
    with pytest.raises(AssertionError, match="int32 overflow"), only_programs(-1):
        far_copy[(3,)](numbers(8), torch.empty(3), 2**30)


def test_a_load_of_what_nothing_was_written_to_is_found() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64):
        with pytest.raises(KernelFault, match="unwritten"):
            copy[(2,)](torch.empty(8, dtype=dtype), torch.empty(8, dtype=dtype), 8, 4, 8)


def test_masked_lanes_without_a_value_are_not_numbers() -> None:
    target = torch.empty(1)
    masked_without_other[(1,)](numbers(3), target, 3, 4)
    assert target.isnan().all()


def test_a_dry_run_launches_no_interpreted_kernel() -> None:
    """Kernels are of another class under TRITON_INTERPRET=1, and would read memory that the meta device has not."""
    flags = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 1 --global-batch-size 2 --vocab-size 100 --tokenizer-type NullTokenizer --mock-data --bf16 "
        "--lr 1 --train-iters 1 --hidden-dropout 0 --attention-dropout 0"
    )
    found = dry_run(parse_arguments(flags.split()).config, 2, 0)
    assert {"normalize", "normalize_backward"} <= {operation.name for operation in found.total.operations}
