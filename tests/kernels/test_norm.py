"""The norms' kernels, forward and backward, against torch's norms in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.norm import layer_norm, rms_norm
from tests.kernels.interpreter import only_programs

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
EPSILON = 1e-5
# one row, several to a tile, more tiles than programs, a power of two and not, columns that need several passes
SHAPES = [(1, 64), (5, 41), (2, 3, 1000), (200, 128), (5, 20000)]


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool, weight: torch.dtype | None = None
) -> list[Tensor]:
    """Input, weight and, with a bias, bias."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = [torch.randn(shape, generator=generator).add_(0.5).to(dtype)]
    found += [torch.randn(shape[-1], generator=generator).to(weight or dtype) for _ in range(1 + bias)]
    return [tensor.requires_grad_() for tensor in found]


def norm(parts: list[Tensor]) -> Tensor:
    return rms_norm(*parts, EPSILON) if len(parts) == 2 else layer_norm(*parts, EPSILON)


def exact(parts: list[Tensor]) -> Tensor:
    shape = parts[1].shape
    if len(parts) == 2:
        return F.rms_norm(parts[0], shape, parts[1], EPSILON)
    return F.layer_norm(parts[0], shape, *parts[1:], EPSILON)


def with_gradients(function: Callable[[list[Tensor]], Tensor], parts: list[Tensor], gradient: Tensor) -> list[Tensor]:
    output = function(parts)
    return [output, *torch.autograd.grad(output, parts, gradient)]


def check(parts: list[Tensor]) -> None:
    gradient = torch.randn(parts[0].shape, generator=torch.Generator().manual_seed(3)).to(parts[0].dtype)
    found = with_gradients(norm, parts, gradient)
    wide = [part.detach().double().requires_grad_() for part in parts]
    expected = with_gradients(exact, wide, gradient.double())
    for ours, part, theirs in zip(found, [parts[0], *parts], expected, strict=True):
        assert ours.dtype == part.dtype
        assert (ours.double() - theirs).norm() <= TOLERANCE[ours.dtype] * theirs.norm()


@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_output_and_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    check(inputs(shape, dtype, bias=bias))


@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
def test_a_weight_may_be_wider_than_the_input(bias: bool) -> None:
    check(inputs((6, 96), torch.bfloat16, bias=bias, weight=torch.float32))


@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[:, :, :24],  # rows stand apart
        lambda whole: whole[::2, 1],  # likewise, and begin inside
        lambda whole: whole.transpose(0, 1),  # no two dimensions are one
        lambda whole: whole.transpose(0, 2),  # the elements of a row stand apart
        lambda whole: whole[:1, :1].expand(4, 3, 40),  # rows that are one
        lambda whole: whole[:, :, :1].expand(4, 3, 40),  # elements that are one
    ],
    ids=["slice", "steps", "swapped", "columns", "one row", "one element"],
)
def test_strides_change_no_bit(view: Callable[[Tensor], Tensor], bias: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    input, gradient = (view(torch.randn(4, 3, 40, generator=generator)) for _ in range(2))
    others = inputs((input.shape[-1],), torch.float32, bias=bias)[1:]
    strided = with_gradients(norm, [input.detach().requires_grad_(), *others], gradient)
    plain = with_gradients(norm, [input.detach().contiguous().requires_grad_(), *others], gradient.contiguous())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(strided, plain, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("width", [48, 9000])
def test_no_tokens_have_no_gradient(width: int, bias: bool) -> None:
    parts = inputs((2, 0, width), torch.bfloat16, bias=bias)
    output, *gradients = with_gradients(norm, parts, torch.empty_like(parts[0]))
    assert output.shape == gradients[0].shape == (2, 0, width)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients[1:])


def test_what_needs_no_gradient_changes_nothing() -> None:
    parts = inputs((3, 40), torch.float32, bias=True)
    whole = with_gradients(norm, parts, torch.ones_like(parts[0]))
    parts[1].requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(norm(parts), whole[0])
    output = norm(parts)
    for _ in range(2):
        found = torch.autograd.grad(output, [parts[0], parts[2]], torch.ones_like(output), retain_graph=True)
        assert torch.equal(found[0], whole[1])
        assert torch.equal(found[1], whole[3])


@pytest.mark.parametrize("bias", [False, True], ids=["rms_norm", "layer_norm"])
def test_rows_lie_beyond_2_to_the_31_elements(bias: bool) -> None:
    """Memory is taken only where it is touched: three rows of inputs, one of the outputs."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    stride = 2**30 + 64
    far = [torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1)) for _ in range(2)]
    parts = inputs((3, 64), torch.bfloat16, bias=bias)
    near = [parts[0].detach(), torch.ones_like(parts[0])]
    for distant, close in zip(far, near, strict=True):
        distant.copy_(close)
    expected = with_gradients(norm, parts, near[1])
    found = with_gradients(norm, [far[0].requires_grad_(), *parts[1:]], far[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    row = parts[0].detach()[:1]
    rows = 2**31 // 64 + 16
    with torch.no_grad():
        few = norm([row, *parts[1:]])
        with only_programs(-1):
            many = norm([row.expand(rows, 64), *parts[1:]])
    assert torch.equal(many[-1], few[0])
