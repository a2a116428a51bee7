"""Cross entropy against torch's, on one rank; tests/distributed/test_collectives.py has the split vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.mesh import ParallelMesh
from megalite_kernels import cross_entropy

GROUP = ParallelMesh().world()
VOCABULARY, PADDED = 13, 16


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf logits [6, 5, PADDED] whose padding would win every softmax, labels, and weights of the tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, PADDED, generator=generator, dtype=torch.float64) * 3
    logits[..., VOCABULARY:] = 50.0
    labels = torch.randint(VOCABULARY, (6, 5), generator=generator)
    return logits.to(dtype).requires_grad_(), labels, torch.rand(6, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1 << 18, 3 * PADDED, 1])
def test_loss_and_gradient_are_torchs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_ELEMENTS", chunk)
    logits, labels, weights = inputs(torch.float64)
    expected = F.cross_entropy(logits[..., :VOCABULARY].flatten(0, 1), labels.flatten(), reduction="none").view(6, 5)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    losses = vocab_parallel_cross_entropy(logits * 1.0, labels, GROUP, VOCABULARY)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert not gradient[..., VOCABULARY:].any()


def test_elements_of_a_row_may_stand_apart() -> None:
    """A copy is made, and the gradient has the shape of what was given."""
    logits, labels, weights = inputs(torch.float64)
    expected = vocab_parallel_cross_entropy(logits * 1.0, labels, GROUP, VOCABULARY)
    apart = (logits * 1.0).transpose(0, 2).contiguous().transpose(0, 2)
    losses = vocab_parallel_cross_entropy(apart, labels, GROUP, VOCABULARY)
    gradients = (torch.autograd.grad((found * weights).sum(), logits)[0] for found in (losses, expected))
    assert torch.equal(losses, expected)
    assert torch.equal(*gradients)


def test_low_precision_logits_give_an_fp32_loss() -> None:
    logits, labels, weights = inputs(torch.bfloat16)
    wide = logits.detach().double().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits * 1.0, labels, GROUP, VOCABULARY)
    expected = vocab_parallel_cross_entropy(wide * 1.0, labels, GROUP, VOCABULARY)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((losses * weights.float()).sum(), logits)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), wide)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-8, atol=1e-4)


def test_the_logits_are_handed_over() -> None:
    """Backward writes into their storage; so leaves are refused, and a second backward."""
    leaf, labels, _ = inputs(torch.float64)
    with pytest.raises(RuntimeError, match="must be an intermediate result"):
        vocab_parallel_cross_entropy(leaf, labels, GROUP, VOCABULARY)
    logits = leaf * 1.0
    losses = vocab_parallel_cross_entropy(logits, labels, GROUP, VOCABULARY)
    logits.retain_grad()
    losses.sum().backward(retain_graph=True)
    assert logits.grad is not None
    assert torch.equal(logits.detach(), logits.grad)  # no second matrix of this size
    with pytest.raises(RuntimeError, match="overwritten by the first backward"):
        losses.sum().backward()
