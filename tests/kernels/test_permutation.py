"""Rows sorted by group and back, kernel and reference, against lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite_kernels.implementation import Kernels, use
from megalite_kernels.permutation import group_rows, permute, unpermute
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs

IMPLEMENTATIONS = pytest.mark.parametrize("choice", ["triton", "reference"])
SHAPES = [(1, 1, 1, 8), (13, 2, 4, 64), (40, 3, 5, 80), (3, 2, 4, 8200)]  # tokens, choices, groups, width


def groups_of(tokens: int, choices: int, groups: int, missing: float = 0.2) -> Tensor:
    """Draw different groups for each token, and no group for some of its choices."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.rand(tokens, groups, generator=generator).argsort(dim=1)[:, :choices]
    return torch.where(torch.rand(tokens, choices, generator=generator) < missing, -1, drawn)


def rows_of(groups: Tensor, count: int) -> list[tuple[int, int]]:
    """Return token and choice of each permuted row."""
    places = [(int(group), token, choice) for (token, choice), group in _items(groups) if group >= 0]
    return [(token, choice) for _, token, choice in sorted(places)]


def _items(groups: Tensor) -> list[tuple[tuple[int, int], int]]:
    return [((token, choice), value) for token, row in enumerate(groups.tolist()) for choice, value in enumerate(row)]


@pytest.mark.parametrize(
    ("dtype", "shape", "choice"),
    cells(
        named([torch.float32, torch.bfloat16], lambda dtype: str(dtype)[6:]),
        named(SHAPES),
        named(["triton", "reference"]),
        kept=lambda dtype, shape, choice: (dtype + shape + choice) % 2 == 0,
    ),
)
def test_rows_go_to_their_groups_and_back(dtype: torch.dtype, shape: tuple[int, ...], choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    tokens, choices, count, width = shape
    groups = groups_of(tokens, choices, count)
    expected = rows_of(groups, count)
    generator = torch.Generator().manual_seed(2)
    input = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    permutation = group_rows(groups, count, rows=len(expected))
    assert permutation.ends.tolist() == [
        int((groups.flatten() <= last).sum() - (groups < 0).sum()) for last in range(count)
    ]
    rows = permute(input, permutation)
    assert torch.equal(rows, torch.stack([input[token] for token, _ in expected]) if expected else rows[:0])
    results = torch.randn(rows.shape, generator=generator).to(dtype).requires_grad_()
    total = unpermute(results, permutation)
    sums = torch.zeros(tokens, width)
    for token in range(tokens):  # in the order of choices, as the sum of floats depends on it
        for row in sorted(
            (place for place in range(len(expected)) if expected[place][0] == token), key=expected.__getitem__
        ):
            sums[token] += results[row].float()
    assert torch.equal(total, sums.to(dtype))
    (back,) = torch.autograd.grad(rows, input, results.detach())
    assert torch.equal(back, total)
    (out,) = torch.autograd.grad(total, results, input.detach())
    assert torch.equal(out, rows)


@IMPLEMENTATIONS
def test_groups_are_padded_to_a_capacity(choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    groups = groups_of(9, 2, 3)
    input = torch.randn(9, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
    plain, padded = group_rows(groups, 3), group_rows(groups, 3, capacity=9)
    assert padded.ends.tolist() == [9, 18, 27]
    rows, begin = permute(input, padded), 0
    for group, end in enumerate(plain.ends.tolist()):
        own = rows[9 * group : 9 * (group + 1)]
        assert torch.equal(own[: end - begin], permute(input, plain)[begin:end])
        assert not own[end - begin :].any()
        begin = end
    assert torch.equal(unpermute(rows, padded), unpermute(permute(input, plain), plain))


@IMPLEMENTATIONS
def test_groups_and_tokens_may_be_empty(choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    nothing = group_rows(torch.full((4, 2), -1), 3)
    assert nothing.ends.tolist() == [0, 0, 0]
    input = torch.ones(4, 8, requires_grad=True)
    rows = permute(input, nothing)
    assert rows.shape == (0, 8)
    unpermute(rows, nothing).sum().backward()
    assert torch.equal(input.grad, torch.zeros(4, 8))  # type: ignore[arg-type]
    nobody = group_rows(torch.empty(0, 2, dtype=torch.int64), 3)
    assert permute(torch.empty(0, 8), nobody).shape == (0, 8)
    assert unpermute(torch.empty(0, 8), nobody).shape == (0, 8)


def test_gradients_have_gradients() -> None:
    use(Kernels("reference"))
    permutation = group_rows(groups_of(5, 2, 3), 3)
    input = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda own: unpermute(permute(own, permutation).square(), permutation), input)


def test_rows_lie_beyond_2_to_the_31_elements() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    width, last = 4096, 2**31 // 4096 + 3
    far = torch.empty(last + 1, width, dtype=torch.bfloat16)
    far[-1] = 3.0
    permutation = group_rows(torch.zeros(1, 1, dtype=torch.int64), 1, rows=1)._replace(tokens=torch.tensor([last]))
    assert torch.equal(permute(far, permutation), far[-1:])
    many = permutation._replace(tokens=torch.zeros(last + 1, dtype=torch.int64))
    with only_programs(-1):
        assert torch.equal(permute(far[-1:], many)[-1], far[-1])
