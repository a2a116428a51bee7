"""Comparisons with one stated tolerance, and messages that show the difference."""

from __future__ import annotations

import torch

RELATIVE = 1e-10  # of float64 results that differ only in the order of summation


def assert_gradient_close(
    actual: torch.Tensor, expected: torch.Tensor, global_norm: float, name: str = "", relative: float = RELATIVE
) -> None:
    """Assert ‖actual − expected‖ ≤ relative · max(‖expected‖, 1e-3 · global_norm).

    Some gradients are zero except for rounding (for example a key's bias). They are compared relative to the norm of
    all gradients together.
    """
    _assert_distance(actual, expected, relative, 1e-3 * global_norm, name or "gradient")


def assert_parameter_close(
    actual: torch.Tensor, expected: torch.Tensor, learning_rate: float, name: str = "", relative: float = RELATIVE
) -> None:
    """Assert ‖actual − expected‖ ≤ relative · max(‖expected‖, learning_rate · √n), with n elements.

    The second term is the length of one Adam step. Parameters that started at zero are compared relative to it.
    """
    _assert_distance(actual, expected, relative, learning_rate * expected.numel() ** 0.5, name or "parameter")


def assert_number_close(actual: float, expected: float, name: str = "", relative: float = RELATIVE) -> None:
    """Assert |actual − expected| ≤ relative · |expected|."""
    distance, bound = abs(actual - expected), relative * abs(expected)
    assert distance <= bound, f"{name or 'number'}: {actual!r} is not {expected!r}: off by {distance:.3g} > {bound:.3g}"


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, name: str = "") -> None:
    """Assert that `actual` differs from the float64 result by one rounding to its dtype, and by almost nothing more.

    A second rounding to bf16 or fp16 anywhere in the computation would add about 40 %.
    """
    rounding = torch.linalg.vector_norm(exact.to(actual.dtype).double() - exact).item()
    distance = torch.linalg.vector_norm(actual.detach().double() - exact).item()
    allowed = 1.1 * rounding + 1e-6 * torch.linalg.vector_norm(exact).item()
    assert distance <= allowed, f"{name or 'tensor'}: off by {distance:.3g}, where one rounding is {rounding:.3g}"


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Assert the same shape, dtype and bits: 0.0 is not -0.0, and a NaN equals only the same NaN."""
    name = name or "tensor"
    _assert_same_kind(actual, expected, name)
    differs = (_bits(actual) != _bits(expected)).any(dim=1)
    count = int(differs.sum())
    if not count:
        return
    flat_index = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), expected.shape))
    ours, theirs = actual.reshape(-1)[flat_index].item(), expected.reshape(-1)[flat_index].item()
    furthest = (actual.double() - expected.double()).abs().max().item()
    raise AssertionError(
        f"{name}: {count} of {expected.numel()} elements differ; the first at {index}: {ours!r}, expected {theirs!r}; "
        f"the largest difference is {furthest:.3g}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, `[elements, bytes]`."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _assert_same_kind(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"


def _assert_distance(
    actual: torch.Tensor, expected: torch.Tensor, relative: float, least_scale: float, name: str
) -> None:
    _assert_same_kind(actual, expected, name)
    difference = actual.detach().double() - expected.detach().double()
    norm = torch.linalg.vector_norm(expected.detach().double()).item()
    distance = torch.linalg.vector_norm(difference).item()
    scale = max(norm, least_scale)
    if distance <= relative * scale:  # false for a NaN
        return
    ratio = f"{distance / scale:.3g} > {relative:.3g} of {scale:.6g}" if scale else f"{distance:.3g}, expected zeros"
    worst = int(difference.abs().argmax())
    raise AssertionError(
        f"{name}: off by {ratio} (norm {norm:.6g}); the furthest element, {worst} of {expected.numel()}: "
        f"{actual.reshape(-1)[worst].item()!r}, expected {expected.reshape(-1)[worst].item()!r}"
    )
