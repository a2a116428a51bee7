"""The activations' kernels, forward and backward, against torch's functions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.activation import (
    activation,
    exact_geglu,
    exact_gelu,
    geglu,
    gelu,
    quick_geglu,
    squared_relu,
    swiglu,
)
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs
from tests.kernels.strides import VIEWS

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
Function = Callable[..., Tensor]


def _gated(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: gate(gate_up[..., : gate_up.shape[-1] // 2]) * gate_up[..., gate_up.shape[-1] // 2 :]


def _tanh_gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def limited_swiglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    return activation("swiglu", limit=2.5)(gate_up, bias)


def limited_quick_geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    return activation("quick_geglu", limit=1.5, offset=1.0)(gate_up, bias)


def _quick_gelu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(1.702 * input)


def _limited(gate: Callable[[Tensor], Tensor], limit: float, offset: float) -> Callable[[Tensor], Tensor]:
    """Clamps, by which a number at the limit itself has a gradient: torch's own say so only before 2.14."""

    def cut(values: Tensor, least: float) -> Tensor:
        return values.where(values <= limit, limit).where(values >= least, least)

    def function(gate_up: Tensor) -> Tensor:
        gates, ups = gate_up.tensor_split(2, dim=-1)
        return gate(cut(gates, -math.inf)) * (cut(ups, -limit) + offset)

    return function


EXACT: dict[Function, Callable[[Tensor], Tensor]] = {
    gelu: _tanh_gelu,
    exact_gelu: F.gelu,
    squared_relu: lambda input: F.relu(input) ** 2,
    swiglu: _gated(F.silu),
    geglu: _gated(_tanh_gelu),
    exact_geglu: _gated(F.gelu),
    quick_geglu: _gated(_quick_gelu),
    limited_swiglu: _limited(F.silu, 2.5, 0.0),
    limited_quick_geglu: _limited(_quick_gelu, 1.5, 1.0),
}
GATED = (swiglu, geglu, exact_geglu, quick_geglu, limited_swiglu, limited_quick_geglu)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # NumPy's, of the interpreter
each_function = pytest.mark.parametrize("function", EXACT, ids=lambda function: function.__name__)
BIAS = {"": False, "bias": True}
with_and_without_bias = pytest.mark.parametrize("bias", BIAS.values(), ids=BIAS)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool) -> list[Tensor]:
    """Also numbers at which the functions are all but flat."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = [torch.randn(shape, generator=generator).mul_(3.0).to(dtype)]
    found += [torch.randn(shape[-1], generator=generator).to(dtype)] * bias
    return [tensor.requires_grad_() for tensor in found]


def with_gradients(function: Function, parts: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    output = function(*parts)
    return [output, *torch.autograd.grad(output, parts, gradient)]


def gradient_of(function: Function, input: Tensor) -> Tensor:
    shape = (*input.shape[:-1], input.shape[-1] // (1 + (function in GATED)))
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(input.dtype)


# one row, several to a tile, more tiles than programs, a power of two and not, columns of several programs
@pytest.mark.parametrize(
    ("dtype", "shape", "bias", "function"),
    cells(
        named([*TOLERANCE], lambda dtype: str(dtype)[6:]),
        named([(1, 64), (5, 82), (2, 3, 1000), (3, 8200)]),
        BIAS,
        named([*EXACT], lambda function: function.__name__),
        kept=lambda dtype, shape, bias, function: ((shape + function) % 3, (shape + function) % 2) == (dtype, bias),
    ),
)
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool, function: Function
) -> None:
    parts = inputs(shape, dtype, bias=bias)
    gradient = gradient_of(function, parts[0])
    found = with_gradients(function, parts, gradient)
    wide = [part.detach().double().requires_grad_() for part in parts]
    expected = with_gradients(lambda *own: EXACT[function](sum(own)), wide, gradient.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


def test_what_is_no_number_shows() -> None:
    """A relu by a maximum would hide it."""
    parts = [torch.ones(3, 16), torch.zeros(16)]
    parts[0][1, 2], parts[1][2] = torch.inf, -torch.inf  # the interpreter takes no input of NaN
    output, gradient, _ = with_gradients(squared_relu, [part.requires_grad_() for part in parts], torch.ones(3, 16))
    assert output.isnan().nonzero().tolist() == gradient.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("view", "function", "bias"),
    cells(
        VIEWS,
        named([gelu, swiglu], lambda function: function.__name__),
        BIAS,
        kept=lambda view, function, bias: (view + function + bias) % 2 == 0,
    ),
)
def test_strides_change_no_bit(view: Callable[[Tensor], Tensor], function: Function, bias: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    input, gradient = (view(torch.randn(4, 3, 40, generator=generator)) for _ in range(2))
    if function in GATED:
        gradient = gradient[..., : input.shape[-1] // 2]
    biases = inputs(input.shape[-1:], torch.float32, bias=True)[:bias]
    strided = with_gradients(function, [input.detach().requires_grad_(), *biases], gradient)
    plain = with_gradients(function, [input.detach().contiguous().requires_grad_(), *biases], gradient.contiguous())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(strided, plain, strict=True))


@with_and_without_bias
@each_function
def test_no_tokens_have_no_gradient(function: Function, bias: bool) -> None:
    parts = inputs((2, 0, 48), torch.bfloat16, bias=bias)
    output, *gradients = with_gradients(function, parts, gradient_of(function, parts[0]))
    assert output.shape == gradient_of(function, parts[0]).shape
    assert gradients[0].shape == (2, 0, 48)
    assert not bias or torch.equal(gradients[1], torch.zeros(48, dtype=torch.bfloat16))


@each_function
def test_what_needs_no_gradient_changes_nothing(function: Function) -> None:
    parts = inputs((5, 40), torch.float32, bias=True)
    gradient = gradient_of(function, parts[0])
    whole = with_gradients(function, parts, gradient)
    with torch.no_grad():
        assert torch.equal(function(*parts), whole[0])
    for needed in range(2):
        for number, part in enumerate(parts):
            part.requires_grad_(number == needed)
        output = function(*parts)
        for _ in range(2):
            (found,) = torch.autograd.grad(output, parts[needed], gradient, retain_graph=True)
            assert torch.equal(found, whole[1 + needed])


@pytest.mark.parametrize("function", [gelu, swiglu], ids=lambda function: function.__name__)
def test_rows_lie_beyond_2_to_the_31_elements(function: Function) -> None:
    """Memory is taken only where it is touched: three rows of inputs, one of the outputs."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    stride = 2**30 + 64
    parts = inputs((3, 64), torch.bfloat16, bias=True)
    near = [parts[0].detach(), gradient_of(function, parts[0])]
    far = [
        torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided(close.shape, (stride, 1)).copy_(close)
        for close in near
    ]
    expected = with_gradients(function, parts, near[1])
    found = with_gradients(function, [far[0].requires_grad_(), parts[1]], far[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    row = parts[0].detach()[:1]
    with torch.no_grad():
        few = function(row, parts[1])
        rows = 2**31 // few.shape[-1] + 40
        with only_programs(-1):
            many = function(row.expand(rows, 64), parts[1])
    assert torch.equal(many[-1], few[0])
