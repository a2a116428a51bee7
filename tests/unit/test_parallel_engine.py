"""Schedules as data, and the engine that executes them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from megalite.pipeline import engine
from megalite.pipeline.schedules import Action, forward_only, no_pipelining
from megalite.pipeline.stages import Stages


@pytest.mark.parametrize("micro_batches", [0, 1, 2, 5])
def test_without_pipelining_each_micro_batch_goes_forward_and_back(micro_batches: int) -> None:
    actions = [action for action in no_pipelining(micro_batches) if action.kind != "R"]
    assert [action.micro_batch for action in actions] == [m for m in range(micro_batches) for _ in "FB"]
    assert "".join(action.kind for action in actions) == "FB" * micro_batches
    assert forward_only(Stages(), 0, micro_batches, 1) == [Action("F", m) for m in range(micro_batches)]


class Stage(torch.nn.Module):
    """(weight * x).sum(), with a note of what is alive when a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.activations: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        gc.collect()
        self.alive.append(sum(reference() is not None for reference in self.activations))
        product = self.weight * x
        self.activations.append(weakref.ref(product))
        return product.square().sum()


MICRO_BATCHES = [torch.tensor([1.0, 0.5]), torch.tensor([3.0, -1.0]), torch.tensor([0.0, 2.0])]


def test_the_sum_of_losses_is_differentiated_at_the_given_scale() -> None:
    stage = Stage()
    total = engine.run(no_pipelining(3), stage, MICRO_BATCHES, factor=0.25)
    loss = sum((stage.weight.detach() * x).square().sum().item() for x in MICRO_BATCHES)
    assert total.item() == loss
    assert total.dtype == torch.float64
    assert not total.requires_grad
    assert stage.weight.grad is not None
    torch.testing.assert_close(stage.weight.grad, 0.25 * 2 * stage.weight.detach() * sum(x**2 for x in MICRO_BATCHES))


def test_one_micro_batchs_activations_live_at_a_time() -> None:
    stage = Stage()
    engine.run(no_pipelining(3), stage, MICRO_BATCHES, factor=1.0)
    assert stage.alive == [0, 0, 0]


def test_forward_alone_keeps_no_graph() -> None:
    stage = Stage()
    total = engine.run(forward_only(Stages(), 0, 3, 1), stage, MICRO_BATCHES, factor=1.0)
    assert total.item() > 0
    assert stage.weight.grad is None
    assert stage.alive == [0, 0, 0]


def test_any_order_in_which_a_forward_precedes_its_backward_is_executed() -> None:
    stage = Stage()
    order = [Action(kind, m) for kind, m in ("F1", "F0", "B0", "F2", "B2", "B1")]
    order = [Action(action.kind, int(action.micro_batch)) for action in order]
    engine.run(order, stage, MICRO_BATCHES, factor=1.0)
    other = Stage()
    engine.run(no_pipelining(3), other, MICRO_BATCHES, factor=1.0)
    torch.testing.assert_close(stage.weight.grad, other.weight.grad)


@pytest.mark.parametrize("reduce_each", [False, True])
def test_reductions_are_actions_behind_the_backward_that_completes_them(reduce_each: bool) -> None:
    stage, seen, counts = Stage(), [], []
    actions = no_pipelining(3, reduce_each=reduce_each)

    def reduce(micro_batches: int) -> None:
        counts.append(micro_batches)
        seen.append(stage.weight.grad.clone())

    engine.run(actions, stage, MICRO_BATCHES, 1.0, reduce)
    assert counts == ([1, 2, 3] if reduce_each else [3])
    order = "".join(action.kind for action in actions)
    assert order == ("FBRFBRFBR" if reduce_each else "FBFBFBR")
    done = [2 * stage.weight.detach() * sum(x**2 for x in MICRO_BATCHES[:count]) for count in (1, 2, 3)]
    torch.testing.assert_close(seen, done if reduce_each else done[-1:])


def test_a_schedule_without_forward_has_no_loss() -> None:
    with pytest.raises(ValueError, match="no loss"):
        engine.run([], Stage(), MICRO_BATCHES, factor=1.0)
