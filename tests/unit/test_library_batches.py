"""Batches of any form, as a program's collate function makes them, and what the loss gets of them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite

Pair = namedtuple("Pair", "point target")
POINTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
SAMPLES = [(point, point.sum()) for point in POINTS]


@dataclass
class Fields:
    point: Tensor
    target: Tensor


def first_loss(module: nn.Module, loss: Callable[..., Any], collate: Any = None, **settings: Any) -> float:
    """Return the loss of the first step, on all samples in two micro-batches."""
    with megalite.Trainer(
        module,
        loss=loss,
        dataset=settings.pop("dataset", SAMPLES),
        collate=collate,
        micro_batch_size=4,
        global_batch_size=8,
        optimizer=megalite.SGD(lr=0.1),
        quiet=True,
        **settings,
    ) as run:
        found: float = run.step()["loss"]
        return found


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def expected() -> float:
    with torch.no_grad():
        return (linear()(POINTS)[:, 0] - POINTS.sum(1)).square().mean().item()


def stacked(rows: list[tuple[Tensor, Tensor]], dim: int = 0) -> tuple[Tensor, Tensor]:
    points, targets = zip(*rows, strict=True)
    return torch.stack(points, dim), torch.stack(targets)


class Named(nn.Linear):
    def forward(self, point: Tensor) -> Tensor:
        return super().forward(point)


BATCHES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "tuples": (stacked, lambda batch: batch[1]),
    "mappings": (
        lambda rows: dict(zip(("point", "target"), stacked(rows), strict=True)),
        lambda batch: batch["target"],
    ),
    "named tuples": (lambda rows: Pair(*stacked(rows)), lambda batch: batch.target),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_mean_over_samples_is_the_same_in_any_form_of_batch(kind: str) -> None:
    collate, target = BATCHES[kind]
    torch.manual_seed(1)
    found = first_loss(Named(3, 1), lambda outputs, batch: (outputs[:, 0] - target(batch)).square().mean(), collate)
    assert found == pytest.approx(expected(), rel=1e-6)


def test_a_mean_counts_samples_and_not_the_first_dimension() -> None:
    class Columns(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.t())

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return stacked(rows, dim=1)  # [coordinates, samples]

    torch.manual_seed(1)
    loss = first_loss(Columns(3, 1), lambda outputs, batch: (outputs[:, 0] - batch[1]).square().mean(), collate)
    assert loss == pytest.approx(expected(), rel=1e-6)


def test_a_dataclass_is_a_batch() -> None:
    class OfFields(nn.Linear):
        def forward(self, batch: Fields) -> Tensor:
            return super().forward(batch.point)

    torch.manual_seed(1)
    found = first_loss(
        OfFields(3, 1),
        lambda outputs, batch: (outputs[:, 0] - batch.target).square().mean(),
        lambda rows: Fields(*stacked(rows)),
    )
    assert found == pytest.approx(expected(), rel=1e-6)


def test_the_loss_gets_fields_that_are_not_rounded_to_the_precision_of_the_model() -> None:
    seen: list[Tensor] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        seen.append(batch[1])
        return (outputs[:, 0].float() - batch[1]).square().mean()

    samples = [(point, torch.tensor(1001.0)) for point in POINTS]
    first_loss(linear(), loss, dataset=samples, precision="bf16")
    assert {(values.dtype, values[0].item()) for values in seen} == {(torch.float32, 1001.0)}


def test_complex_buffers_keep_their_imaginary_part() -> None:
    class Turning(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

        def forward(self, point: Tensor) -> Tensor:
            return super().forward((point * self.turns).imag)

    torch.manual_seed(1)
    module = Turning()
    with torch.no_grad():
        wanted = module(POINTS).square().mean().item()
    assert first_loss(module, lambda outputs, batch: outputs.square().mean()) == pytest.approx(wanted, rel=1e-6)


def test_a_module_that_cannot_be_copied_is_named() -> None:
    module = linear()
    module.lock = Lock()  # type: ignore[assignment]
    with pytest.raises(megalite.MegaliteError, match="a module of Linear cannot be copied"):
        first_loss(module, lambda outputs, batch: outputs.mean())
