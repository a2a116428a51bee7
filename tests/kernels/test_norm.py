"""The norms' kernels, forward and backward, against torch's norms in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import norm as kernels
from megalite_kernels.implementation import Kernels, use
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs
from tests.kernels.strides import VIEWS

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
EPSILON = 1e-5
# one row, several to a tile, more tiles than programs, a power of two and not, columns that need several passes
SHAPES = [(1, 64), (5, 41), (2, 3, 1000), (200, 128), (5, 20000)]
Function = Callable[..., Tensor | tuple[Tensor, Tensor]]


def rms_norm(input: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    return kernels.norm(input, weight, None, epsilon)


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensor:
    return kernels.norm(input, weight, bias, epsilon)


def residual_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    return kernels.residual_norm(input, residual, weight, None, epsilon)


def residual_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    return kernels.residual_norm(input, residual, weight, bias, epsilon)


NORMS: list[Function] = [rms_norm, layer_norm, residual_rms_norm, residual_layer_norm]
RESIDUAL = NORMS[2:]
each_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
each_residual_norm = pytest.mark.parametrize("norm", RESIDUAL, ids=lambda norm: norm.__name__)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, norm: Function, weight: torch.dtype | None = None
) -> list[Tensor]:
    """Input, a residual where the norm has one, weight, and the bias of a LayerNorm."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = [torch.randn(shape, generator=generator).add_(0.5).to(dtype) for _ in range(1 + (norm in RESIDUAL))]
    vectors = 2 if norm in (layer_norm, residual_layer_norm) else 1
    found += [torch.randn(shape[-1], generator=generator).to(weight or dtype) for _ in range(vectors)]
    return [tensor.requires_grad_() for tensor in found]


def exact(norm: Function, dtype: torch.dtype, *parts: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Exact but for the sum, which is rounded to the dtype."""
    total, *weights = (parts[0] + parts[1], *parts[2:]) if norm in RESIDUAL else parts
    with torch.no_grad():
        total.copy_(total.to(dtype))
    function = F.layer_norm if norm in (layer_norm, residual_layer_norm) else F.rms_norm
    output = function(total, total.shape[-1:], *weights, epsilon)
    return (output, total) if norm in RESIDUAL else (output,)


def outputs(norm: Function, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = norm(*parts, epsilon=EPSILON)
    return (found,) if isinstance(found, Tensor) else found


def with_gradients(norm: Function, parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all parts; `gradients` are those of the first outputs, the others have none."""
    found = outputs(norm, parts)
    return [*found, *torch.autograd.grad(found[: len(gradients)], parts, gradients, allow_unused=True)]


def gradients_of(parts: Sequence[Tensor], norm: Function) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = 1 + (norm in RESIDUAL)
    return [torch.randn(parts[0].shape, generator=generator).to(parts[0].dtype) for _ in range(count)]


def check(norm: Function, parts: list[Tensor]) -> None:
    gradients = gradients_of(parts, norm)
    found = with_gradients(norm, parts, gradients)
    wide = [part.detach().double().requires_grad_() for part in parts]
    expected = with_gradients(partial(exact, norm, parts[0].dtype), wide, [gradient.double() for gradient in gradients])
    likes = [parts[0]] * len(gradients) + parts
    for ours, like, theirs in zip(found, likes, expected, strict=True):
        assert ours.dtype == like.dtype
        assert (ours.double() - theirs).norm() <= TOLERANCE[ours.dtype] * theirs.norm()


@pytest.mark.parametrize(
    ("dtype", "shape", "norm"),
    cells(
        named([*TOLERANCE], lambda dtype: str(dtype)[6:]),
        named(SHAPES),
        named(NORMS, lambda norm: norm.__name__),
        kept=lambda dtype, shape, norm: (shape + norm) % 3 == dtype and (shape < len(SHAPES) - 1 or norm == 3),
    ),
)
def test_output_and_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...], norm: Function) -> None:
    check(norm, inputs(shape, dtype, norm))


@each_norm
def test_a_weight_may_be_wider_than_the_input(norm: Function) -> None:
    check(norm, inputs((6, 96), torch.bfloat16, norm, weight=torch.float32))


@pytest.mark.parametrize(
    ("view", "norm"),
    cells(VIEWS, named(NORMS, lambda norm: norm.__name__), kept=lambda view, norm: (view + norm) % 2 == 0),
)
def test_strides_change_no_bit(view: Callable[[Tensor], Tensor], norm: Function) -> None:
    generator = torch.Generator().manual_seed(4)
    count = 1 + (norm in RESIDUAL)
    strided, gradients = ([view(torch.randn(4, 3, 40, generator=generator)) for _ in range(count)] for _ in range(2))
    others = inputs(strided[0].shape[-1:], torch.float32, norm)[count:]
    found = with_gradients(norm, [*(part.detach().requires_grad_() for part in strided), *others], gradients)
    plain = [*(part.contiguous().requires_grad_() for part in strided), *others]
    expected = with_gradients(norm, plain, [gradient.contiguous() for gradient in gradients])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@each_norm
@pytest.mark.parametrize("width", [48, 9000])
def test_no_tokens_have_no_gradient(width: int, norm: Function) -> None:
    parts = inputs((2, 0, width), torch.bfloat16, norm)
    found = with_gradients(norm, parts, gradients_of(parts, norm))
    for part in found:
        assert part.shape == (2, 0, width) or torch.equal(part, torch.zeros(width, dtype=torch.bfloat16))
    assert [part.dim() for part in found].count(1) == len(parts) - 1 - (norm in RESIDUAL)


def test_what_needs_no_gradient_changes_nothing() -> None:
    parts = inputs((3, 40), torch.float32, layer_norm)
    whole = with_gradients(layer_norm, parts, [torch.ones_like(parts[0])])
    parts[1].requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(outputs(layer_norm, parts)[0], whole[0])
    (output,) = outputs(layer_norm, parts)
    for _ in range(2):
        found = torch.autograd.grad(output, [parts[0], parts[2]], torch.ones_like(output), retain_graph=True)
        assert torch.equal(found[0], whole[1])
        assert torch.equal(found[1], whole[3])


@each_residual_norm
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_the_fused_addition_changes_no_bit(dtype: torch.dtype, norm: Function) -> None:
    parts = inputs((7, 72), dtype, norm)
    fused = with_gradients(norm, parts, gradients_of(parts, norm))
    use(Kernels("triton", to_reference=("residual_norm",)))
    apart = with_gradients(norm, parts, gradients_of(parts, norm))
    assert type(outputs(norm, parts)[1].grad_fn).__name__ == "AddBackward0"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused, apart, strict=True))


@each_residual_norm
def test_one_output_alone_has_a_gradient(norm: Function) -> None:
    parts = inputs((6, 40), torch.float32, norm)
    gradients = gradients_of(parts, norm)
    normed, total = outputs(norm, parts)
    of_total = torch.autograd.grad(total, parts, gradients[1], retain_graph=True, allow_unused=True)
    assert all(torch.equal(of_total[i], gradients[1]) for i in range(2))
    assert all(gradient is None for gradient in of_total[2:])
    found = torch.autograd.grad(normed, parts, gradients[0])
    expected = with_gradients(norm, parts, [gradients[0], torch.zeros_like(total)])[2:]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert torch.equal(found[0], found[1])


@each_norm
def test_rows_lie_beyond_2_to_the_31_elements(norm: Function) -> None:
    """Memory is taken only where it is touched: three rows of inputs, one of the outputs."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    stride, count = 2**30 + 64, 1 + (norm in RESIDUAL)
    parts = inputs((3, 64), torch.bfloat16, norm)
    near = [part.detach() for part in parts[:count]] + [torch.ones_like(parts[0])] * count
    far = [torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1)) for _ in near]
    for distant, close in zip(far, near, strict=True):
        distant.copy_(close)
    expected = with_gradients(norm, parts, near[count:])
    found = with_gradients(norm, [*(part.requires_grad_() for part in far[:count]), *parts[count:]], far[count:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    few = [part.detach()[:1] for part in parts[:count]]
    rows = 2**31 // 64 + 16
    with torch.no_grad():
        once = outputs(norm, [*few, *parts[count:]])
        with only_programs(-1):
            often = outputs(norm, [*(part.expand(rows, 64) for part in few), *parts[count:]])
    assert all(torch.equal(many[-1], one[0]) for many, one in zip(often, once, strict=True))
