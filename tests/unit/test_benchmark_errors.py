"""Numeric checks of the benchmarks: a result with NaN is wrong wherever it stands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import expert_layer, gpu_experts, gpu_operations, gpu_training, kernel_rivals, kernels
from benchmarks.errors import largest, relative

NAN = torch.tensor([1.0, math.nan])
"""Behind a number, from which max() takes the number."""


def test_what_is_not_finite_is_the_largest() -> None:
    assert largest([0.1, math.nan]) == largest([math.nan, 0.1]) == largest([-math.inf]) == math.inf
    assert largest([0.1, 0.2]) == 0.2
    assert largest([]) == 0.0


def test_two_zeros_do_not_differ() -> None:
    """A router that chooses one expert by a softmax over the chosen has such a gradient."""
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative(NAN, NAN))


def test_gradients_of_experts() -> None:
    class Layer:
        def gradients(self, kernels: expert_layer.Kernels) -> list[Tensor]:
            return [torch.ones(2), torch.ones(2) if kernels.to_reference else NAN]

    assert expert_layer.compare(Layer()) == math.inf  # type: ignore[arg-type]


def test_outputs_of_rivals() -> None:
    def two(second: Tensor) -> Any:
        return lambda *_: (torch.ones(2), second)

    assert kernel_rivals.difference(lambda _: two(torch.ones(2))(), two(NAN), [torch.ones(2)]) == math.inf


def test_gradients_of_a_rivals_loss() -> None:
    def wrong(logits: Tensor, labels: Tensor) -> Tensor:
        """The loss is right and its gradient is NaN."""
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        return loss + (math.nan * (logits - logits.detach()).float()).nan_to_num().sum()

    compared = kernels.of_loss({"liger": {"cross_entropy": wrong}}, 4, 50, "cpu")
    assert compared.differences["liger"]() == math.inf


def test_products_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = gpu_experts.grouped_product, list[int]()

    def last_wrong(*inputs: Any) -> Tensor:
        calls.append(1)
        return right(*inputs) * (math.nan if len(calls) == 2 * len(gpu_experts.COUNTS) else 1.0)

    monkeypatch.setattr(gpu_experts, "grouped_product", last_wrong)
    assert gpu_experts.check_grouped_products("cpu") == math.inf


def test_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_operations.ProductGradient.add_to

    def added_wrong(gradient: Any, target: Tensor, *, overwrite: bool) -> None:
        right(gradient, target, overwrite=overwrite)
        if not overwrite:
            target.fill_(math.nan)

    monkeypatch.setattr(gpu_operations.ProductGradient, "add_to", added_wrong)
    assert gpu_operations.check_weight_gradients("cpu") == math.inf


def test_losses_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics have NaN as a word."""

    def train(flags: str, processes: int, *, gpu: bool, deadline: float) -> list[dict[str, Any]]:
        return [{"lm_loss": 7.0, "grad_norm": 1.0}, {"lm_loss": "NaN" if gpu else 7.0, "grad_norm": 1.0}]

    monkeypatch.setattr(gpu_training, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert next(gpu_training.compare(math.inf))["largest relative difference"] == math.inf
