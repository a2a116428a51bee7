"""The rotation's kernel, forward and backward, against complex numbers in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite_kernels.rotary import rotary_embedding
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# positions, batch, heads of queries and of keys, channels and how many of them are rotated
SHAPES = [
    (1, 1, 1, 1, 2, 2),
    (37, 2, 4, 2, 64, 64),
    (5, 3, 5, 1, 80, 80),
    (7, 1, 3, 3, 96, 24),
    (3, 2, 2, 1, 256, 128),
    (9, 2, 3, 2, 50, 14),
    (17, 1, 8, 2, 128, 128),
]
INTERLEAVED = {"halves": False, "neighbours": True}
PAIRINGS = pytest.mark.parametrize("interleaved", INTERLEAVED.values(), ids=INTERLEAVED)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda whole: whole[:, :, :3, :24],  # heads stand apart
    "steps": lambda whole: whole[::2, 1:],
    "batch first": lambda whole: whole.transpose(0, 1),
    "heads first": lambda whole: whole.transpose(0, 2),
    "columns": lambda whole: whole.transpose(2, 3)[..., :4],  # the channels of a head stand apart
    "one head": lambda whole: whole[:1, :, :1].expand(4, 4, 4, 32),
    "one channel": lambda whole: whole[..., :1].expand(4, 4, 4, 32),
}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(positions: int, batch: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Return tables of unordered positions, with an amplitude like YaRN's."""
    angles = 10 * numbers(positions, batch, 1, pairs, seed=2)
    return 1.1 * angles.cos(), 1.1 * angles.sin()


def projected(
    positions: int, batch: int, heads: int, groups: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Queries and keys as views of one projection, as attention has them, and not contiguous."""
    whole = numbers(positions, batch, (heads + 2 * groups) * width).to(dtype)
    query, key_value = whole.split([heads * width, 2 * groups * width], dim=-1)
    key = key_value.unflatten(-1, (groups, 2, width))[..., 0, :]
    return query.unflatten(-1, (heads, width)).requires_grad_(), key.requires_grad_()


def exact(heads: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    pairs, turn = cosine.shape[-1], torch.complex(cosine.double(), sine.double())
    wide = heads.double()
    rotated = wide[..., : 2 * pairs].unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    first, second = rotated.unbind(-1 if interleaved else -2)
    plane = torch.complex(first, second) * turn
    turned = torch.stack((plane.real, plane.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, wide[..., 2 * pairs :]), -1)


def with_gradients(
    function: Callable[..., tuple[Tensor, Tensor]], parts: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> list[Tensor]:
    outputs = function(*parts)
    return [*outputs, *torch.autograd.grad(outputs, parts[:2], gradients)]


def permuted(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the memory order of attention: heads before positions."""
    found = [numbers(*part.permute(1, 2, 0, 3).shape, seed=3 + i) for i, part in enumerate(parts)]
    return tuple(value.permute(2, 0, 1, 3).to(part.dtype) for value, part in zip(found, parts, strict=True))


def rotate(interleaved: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *parts: rotary_embedding(*parts, interleaved=interleaved)


@pytest.mark.parametrize(
    ("dtype", "shape", "interleaved"),
    cells(
        named([*TOLERANCE], lambda dtype: str(dtype)[6:]),
        named(SHAPES),
        INTERLEAVED,
        kept=lambda dtype, shape, interleaved: (shape + interleaved) % 3 == dtype,
    ),
)
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, shape: tuple[int, ...], interleaved: bool
) -> None:
    positions, batch, _, _, width, rotated = shape
    parts = projected(*shape[:4], width, dtype)
    turns = tables(positions, batch, rotated // 2)
    gradients = permuted(*parts)
    found = with_gradients(rotate(interleaved), (*parts, *turns), gradients)
    wide = [part.detach().double().requires_grad_() for part in parts]

    def expected(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return exact(query, *turns, interleaved), exact(key, *turns, interleaved)

    exactly = with_gradients(expected, tuple(wide), tuple(gradient.double() for gradient in gradients))
    for ours, theirs in zip(found, exactly, strict=True):
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()
        assert torch.equal(ours[..., rotated:].double(), theirs[..., rotated:])


@PAIRINGS
def test_float64_is_as_exact(interleaved: bool) -> None:
    parts, turns = [part.double() for part in projected(3, 2, 4, 2, 10)], [t.double() for t in tables(3, 2, 3)]
    for ours, part in zip(rotary_embedding(*parts, *turns, interleaved=interleaved), parts, strict=True):
        assert torch.allclose(ours, exact(part, *turns, interleaved), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize(
    ("view", "interleaved"),
    cells(VIEWS, INTERLEAVED, kept=lambda view, interleaved: (view, interleaved) in ((0, 0), (3, 1))),
)
def test_strides_change_no_bit(view: Callable[[Tensor], Tensor], interleaved: bool) -> None:
    query, key, *gradients = (view(numbers(4, 4, 4, 32, seed=seed)) for seed in range(4))
    turns = tables(query.shape[0], query.shape[1], 2)
    strided = [part.detach().requires_grad_() for part in (query, key)]
    plain = [part.detach().contiguous().requires_grad_() for part in (query, key)]
    ours = with_gradients(rotate(interleaved), (*strided, *turns), tuple(gradients))
    contiguous = tuple(gradient.contiguous() for gradient in gradients)
    theirs = with_gradients(rotate(interleaved), (*plain, *turns), contiguous)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@PAIRINGS
def test_tables_are_read_as_they_are(interleaved: bool) -> None:
    """One for the whole batch, by size or by stride, transposed as from positions, or unlike one another."""
    parts, turns = projected(5, 3, 2, 1, 12), tables(5, 1, 3)
    whole = [table.expand(5, 3, 1, 3).contiguous() for table in turns]
    expected = rotary_embedding(*parts, *whole, interleaved=interleaved)
    apart = [torch.stack([table] * 2, -1)[..., 0] for table in whole]
    turned = [table.transpose(0, 1).contiguous().transpose(0, 1) for table in whole]
    slices = [torch.cat([table, table[..., :1]], -1)[..., :3] for table in whole]
    for others in (turns, [t.expand(5, 3, 1, 3) for t in turns], turned, apart, slices, [turned[0], turns[1]]):
        found = rotary_embedding(*parts, *others, interleaved=interleaved)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)], ids=str)
def test_nothing_has_no_gradient(shape: tuple[int, ...]) -> None:
    parts = [torch.empty(shape).requires_grad_() for _ in range(2)]
    for found in with_gradients(rotate(False), (*parts, *tables(*shape[:2], 2)), tuple(map(torch.ones_like, parts))):
        assert found.shape == shape


def test_what_needs_no_gradient_changes_nothing() -> None:
    parts, turns = projected(5, 2, 3, 1, 12), tables(5, 2, 4)
    gradients = permuted(*parts)
    whole = with_gradients(rotate(False), (*parts, *turns), gradients)
    with torch.no_grad():
        assert torch.equal(rotary_embedding(*parts, *turns, interleaved=False)[1], whole[1])
    for i in range(2):
        for j, part in enumerate(parts):
            part.requires_grad_(i == j)
        output = rotary_embedding(*parts, *turns, interleaved=False)[i]
        for _ in range(2):
            (found,) = torch.autograd.grad(output, parts[i], gradients[i], retain_graph=True)
            assert torch.equal(found, whole[2 + i])


@PAIRINGS
def test_heads_lie_beyond_2_to_the_31_elements(interleaved: bool) -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    stride, near, turns = 2**30 + 64, numbers(3, 1, 2, 16).bfloat16(), tables(3, 1, 8)
    far = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 1, 2, 16), (stride, 0, 16, 1))
    far.copy_(near)
    for ours, theirs in zip(*(rotate(interleaved)(part, part, *turns) for part in (far, near)), strict=True):
        assert torch.equal(ours, theirs)
    positions = 2**31 // 32 + 16
    whole = near[:1].expand(positions, 1, 2, 16)
    tables_of_all = [table[:1].expand(positions, 1, 1, 8) for table in turns]
    with only_programs(-1):
        _, many = rotate(interleaved)(whole[:, :, :1], whole, *tables_of_all)
    assert torch.equal(many[-1], rotate(interleaved)(near[:1], near[:1], turns[0][:1], turns[1][:1])[1][0])
