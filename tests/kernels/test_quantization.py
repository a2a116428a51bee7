"""Codes and scales: the kernels' are the reference's bit for bit, and these are what they are said to be."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.formats import FORMATS
from megalite_kernels.quantization import dequantize, dequantize_reference, philox, quantize, quantize_reference
from megalite_kernels.quantization_kernels import dequantized, quantized
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written, only_programs

SEED = 0xFEDCBA9876543210
SEEDS = {"nearest": None, "stochastic": SEED}
ROUNDINGS = pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
# By the largest number of each; torch's integers have one more below zero than above.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ALL_FORMATS = pytest.mark.parametrize("format", LARGEST, ids=lambda format: str(format)[6:])
# Of blocks of 256 normal numbers, to nearest and stochastically, as the file says.
ERRORS = {torch.int8: (0.0070, 0.0098), torch.float8_e4m3fn: (0.026, 0.037), torch.float8_e5m2: (0.052, 0.074)}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(*parts: Tensor) -> list[bytes]:
    return [bytes(part.contiguous().view(torch.uint8).numpy()) for part in parts]


def check(values: Tensor, format: torch.dtype, block: int, seed: int | None, offset: int = 0) -> None:
    codes, scales = quantize(values, format, block, seed=seed, offset=offset)
    assert codes.dtype == format
    assert bits(codes, scales) == bits(*quantize_reference(values, format, block, seed, offset))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        back, expected = (f(codes, scales, block, dtype) for f in (dequantize, dequantize_reference))
        assert back.dtype == dtype
        assert torch.equal(back.isnan(), expected.isnan())
        assert bits(back.nan_to_num(0.0)) == bits(expected.nan_to_num(0.0))


@pytest.mark.parametrize(
    ("given", "format", "seed"),
    cells(
        named(
            [
                (1, 256, torch.float32),
                (3000, 256, torch.float32),
                (5 * 128, 128, torch.bfloat16),
                (2049, 2048, torch.float16),
                (0, 512, torch.float32),
            ],
            lambda given: "-".join(map(str, given)),
        ),
        named([*LARGEST], lambda format: str(format)[6:]),
        SEEDS,
        kept=lambda given, format, seed: (given + format + seed) % 2 == 0,
    ),
)
def test_kernels_are_the_reference(given: tuple[int, int, torch.dtype], format: torch.dtype, seed: int | None) -> None:
    elements, block, dtype = given
    check(numbers(elements).to(dtype), format, block, seed)


@ROUNDINGS
@ALL_FORMATS
def test_numbers_of_all_sizes_are_the_references(format: torch.dtype, seed: int | None) -> None:
    """Exponents from the smallest to the largest, within a block and from block to block."""
    exponents = torch.randint(-149, 128, (6, 256), generator=torch.Generator().manual_seed(2))
    many = torch.arange(-149, 107, 4)[:, None].expand(-1, 256) + exponents[0] % 20
    check(torch.ldexp(numbers(6, 256).clamp(-1.9, 1.9), exponents), format, 256, seed)
    check(torch.ldexp(numbers(64, 256), many), format, 256, seed)


@ALL_FORMATS
def test_stochastic_rounding_is_to_a_neighbour_and_right_on_average(format: torch.dtype) -> None:
    values, runs = numbers(256), 2000
    codes, scales = quantize_reference(values.expand(runs, 256), format, 256, SEED, 0)
    found = dequantize_reference(codes, scales, 256, torch.float64).view(runs, 256)
    low, high = found.amin(0), found.amax(0)
    assert (torch.sort(found, 0).values.diff(dim=0) != 0).sum(0).max() == 1
    between = (low < values) & (values < high)
    assert between.sum() > 230
    spread = ((high - values) * (values - low) / runs).sqrt()
    off = ((found.mean(0) - values) / spread)[between]
    assert off.abs().max() < 4.5
    assert 0.85 < off.square().mean().sqrt() < 1.15


@ROUNDINGS
@ALL_FORMATS
def test_the_error_is_as_told(format: torch.dtype, seed: int | None) -> None:
    values = numbers(2**20)
    error = dequantize_reference(*quantize_reference(values, format, 256, seed, 0), 256, torch.float32) - values
    assert error.norm() / values.norm() == pytest.approx(ERRORS[format][seed is not None], rel=0.02)
    assert error.mean().abs() < 4e-3 * error.norm() / values.norm()


def test_integers_are_the_nearest() -> None:
    values = numbers(64, 256)
    codes, scales = quantize_reference(values, torch.int8, 256, None, 0)
    exact = values.abs().amax(1).double() / 127
    assert (scales <= exact * (1 + 2**-24)).all()
    assert torch.allclose(scales.double(), exact, rtol=2**-16, atol=0.0)
    off = codes.view(64, 256).double() - (values.double() / scales[:, None]).clamp(-127, 127)
    assert off.abs().max() <= 0.5 + 127 * 2**-23


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_torchs(format: torch.dtype) -> None:
    largest = LARGEST[format]
    ties = torch.arange(128, dtype=torch.uint8).view(format).float().nan_to_num(0.0, 0.0).clamp(max=largest)
    ties = torch.cat([ties, ((ties[1:] + ties[:-1]) / 2), numbers(1 << 14) * 2.0 ** (numbers(1 << 14, seed=3) * 4)])
    values = torch.cat([ties, torch.nextafter(ties, torch.zeros(()))]).clamp(-largest, largest)
    values = torch.cat([values, torch.zeros(-len(values) % 255)]).view(-1, 255)
    blocks = torch.cat([values, torch.full((len(values), 1), largest)], 1)
    codes, scales = quantize_reference(blocks, format, 256, None, 0)
    assert (scales == 1.0).all()
    assert bits(codes) == bits(blocks.flatten().to(format))


@pytest.mark.wide
@ROUNDINGS
@ALL_FORMATS
def test_what_was_quantized_keeps_its_codes_and_scales(format: torch.dtype, seed: int | None) -> None:
    """Each code beside the largest, by scales of all sizes and many bits."""
    sizes = torch.cat([numbers(700).abs(), 2.0 ** torch.arange(-90.0, 117.0)])
    sizes = torch.cat(
        [sizes, torch.nextafter(sizes, torch.zeros(())), sizes.clamp(1e-1) * 1e-27, sizes.clamp(max=1e8) * 1e29]
    )
    known = torch.arange(256, dtype=torch.uint8).view(format).float()
    known = known[known.isfinite() & (known.abs() <= LARGEST[format])]
    known = torch.cat([known, torch.full((256 - len(known),), LARGEST[format])])
    values = (known / LARGEST[format])[None, :] * sizes[:, None]
    first = quantize_reference(values, format, 256, seed, 0)
    assert (first[1] > 0).all()
    back = dequantize_reference(*first, 256, torch.float32)
    exact = first[0].float().double().view(-1, 256) * first[1].double()[:, None]
    assert torch.equal(back.double().view(-1, 256), exact)
    assert bits(*quantize_reference(back, format, 256, seed, 0)) == bits(*first)
    assert bits(*quantize_reference(back, format, 256, 7, 0)) == bits(*first)


@ROUNDINGS
@ALL_FORMATS
def test_blocks_of_no_numbers_of_zeros_and_of_next_to_nothing(format: torch.dtype, seed: int | None) -> None:
    values = numbers(6, 128)
    values[0] = 0.0
    values[1, 5], values[2, 7] = float("inf"), -float("nan")
    values[3] *= 1e-40
    values[4] = torch.nextafter(torch.zeros(()), torch.ones(()))
    with nan_is_written():
        check(values, format, 128, seed)
        codes, scales = quantize(values, format, 128, seed=seed)
        back = dequantize(codes, scales, 128, torch.float32).view(6, 128)
        assert bits(*quantize(back, format, 128, seed=seed)) == bits(codes, scales)
    assert back[1:3].isnan().all()
    assert scales[1:3].isnan().all()
    assert (back[[0, 3, 4]] == 0).all()
    assert torch.allclose(back[5], values[5], rtol=0.3, atol=values[5].abs().max().item() / 100)


@ALL_FORMATS
def test_a_shard_draws_what_the_whole_draws(format: torch.dtype) -> None:
    whole, beyond = numbers(12 * 128), 2**34
    codes, scales = quantize(whole, format, 128, seed=SEED, offset=beyond)
    part = quantize(whole[4 * 128 : 9 * 128], format, 128, seed=SEED, offset=beyond + 4 * 128)
    assert bits(*part) == bits(codes[4 * 128 : 9 * 128], scales[4:9])
    assert bits(codes) != bits(quantize(whole, format, 128, seed=SEED + 1, offset=beyond)[0])
    assert bits(codes) != bits(quantize(whole, format, 128, seed=SEED ^ 1 << 40, offset=beyond)[0])
    assert bits(codes) != bits(quantize(whole, format, 128, seed=SEED, offset=0)[0])


def test_random_numbers_are_philoxs() -> None:
    """The vectors that Random123 publishes; and element i goes up where the i-th 16 bits are large enough."""
    zeros, ones = [torch.zeros(1, dtype=torch.int64)] * 4, [torch.full((1,), 0xFFFFFFFF)] * 4
    digits = [torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    assert philox(zeros, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(ones, (0xFFFFFFFF, 0xFFFFFFFF)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(digits, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    values = torch.full((512,), 0.25).index_fill(0, torch.tensor([0]), 127.0)
    offset = 2**36 + 8 * 5
    codes = quantize(values, torch.int8, 512, seed=SEED, offset=offset)[0]
    counters = torch.arange(offset // 8, offset // 8 + 64)
    words = philox([counters & 0xFFFFFFFF, counters >> 32, counters * 0, counters * 0], (0x76543210, 0xFEDCBA98))
    drawn = b"".join(int(word).to_bytes(4, "little") for four in zip(*words, strict=True) for word in four)
    expected = [int.from_bytes(drawn[2 * i : 2 * i + 2], "little") >= 0xC000 for i in range(512)]
    assert codes[1:].tolist() == expected[1:]


@pytest.mark.parametrize(
    "view",
    [lambda whole: whole[:, ::2], lambda whole: whole.T, lambda whole: whole[1:2].expand(7, -1)],
    ids=["steps", "columns", "one row"],
)
def test_strides_change_no_bit(view: object) -> None:
    assert callable(view)
    values = view(numbers(7, 200))
    strided, plain = (quantize(part, torch.int8, 128, seed=3) for part in (values, values.contiguous()))
    assert bits(*strided) == bits(*plain)
    apart = torch.stack([strided[0], strided[0]], 1)[:, 0], torch.stack([strided[1], strided[1]], 1)[:, 0]
    assert bits(dequantize(*apart, 128, torch.float32)) == bits(dequantize(*strided, 128, torch.float32))


def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    values = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    last = numbers(2048).bfloat16()
    values[-2048:] = last
    expected = quantize(last, torch.int8, 256, seed=3, offset=2**31 + 2048)
    with only_programs(-1):
        codes, scales = quantize(values, torch.int8, 256, seed=3)
        back = dequantize(codes, scales, 256, torch.bfloat16)
    assert bits(codes[-2048:], scales[-8:]) == bits(*expected)
    assert bits(back[-2048:]) == bits(dequantize(*expected, 256, torch.bfloat16))


@triton.jit
def _halve(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.int64,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update quantized values as an optimizer does."""
    row = tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found, scale = quantized(tl.load(values + place), seed, row.to(tl.int64) * BLOCK, MANTISSA, LOWEST, LARGEST, True)
    tl.store(codes + place, found.to(codes.dtype.element_ty))
    tl.store(scales + row, scale)
    tl.store(values + place, dequantized(found, scale, MANTISSA, LOWEST) / 2)


@ALL_FORMATS
def test_kernels_of_other_modules_call_these(format: torch.dtype) -> None:
    values = numbers(4, 128)
    expected = quantize(values, format, 128, seed=SEED)
    codes, scales = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    storage = torch.int8 if format == torch.int8 else torch.uint8
    _halve[(1,)](values, codes.view(storage), scales, 5, *FORMATS[format], 4, 128)
    expected = quantize(numbers(4, 128), format, 128, seed=5)
    assert bits(codes, scales) == bits(*expected)
    assert torch.equal(values.flatten(), dequantize(*expected, 128, torch.float32) / 2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float16 is not a format of codes; choose one of torch\.int8, "):
        quantize(numbers(4), torch.float16, 256)
    with pytest.raises(ValueError, match="blocks of 100 elements; choose a power of two from 128 to 2048"):
        quantize(numbers(4), torch.int8, 100)
    with pytest.raises(ValueError, match="an offset of 4: must be a multiple of 8"):
        quantize(numbers(4), torch.int8, 256, seed=1, offset=4)
    codes, scales = quantize(numbers(300), torch.int8, 256)
    with pytest.raises(ValueError, match="1 scales for 300 codes in blocks of 256"):
        dequantize(codes, scales[:1], 256, torch.float32)
