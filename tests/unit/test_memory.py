"""Memory that the start of a run measures, for states that are not parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.optim import update_rule
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite.parallel.state import State
from megalite.tasks.memory import Memory, measured

MESH = ParallelMesh()
WEIGHT = LogicalTensor("weight", (4, 16), Constant(1.0), weight_decay=False)


def state(name: str, elements: int) -> State:
    tensor = LogicalTensor(name, (elements,), Constant(3.0), weight_decay=False)
    return State(replicated(MESH, tensor, grad_is_partial=False), torch.float32, MESH.device)


class Counting(nn.Module):
    """Module that counts its forwards in a state, as a router counts tokens, and keeps the product for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(replicated(MESH, WEIGHT, grad_is_partial=False), torch.float32, MESH.device)
        self.forwards = state("forwards", 16)

    def forward(self) -> Tensor:
        self.forwards.values.add_(1)
        return (self.weight * self.forwards.values).exp()


def made(network: Counting, monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    """Return an optimizer whose update rule has one number per row in addition to the moments."""
    rule = update_rule.RuleState(
        update_rule.RULE_STATE["adam"].flat, {"row": lambda config, parameter, mesh: state("row", 4)}
    )
    monkeypatch.setitem(update_rule.RULE_STATE, "adam", rule)
    return make_optimizer([network], MESH, OptimizerConfig(lr=0.1), DataParallel(torch.float32))


def test_a_forward_at_the_start_leaves_states_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Counting()
    optimizer = made(network, monkeypatch)
    measured(optimizer, [network, network])
    assert network.forwards.values.tolist() == [3.0] * 16


def test_states_of_modules_and_rules_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's state is not an activation, though backward reads it."""
    network = Counting()
    optimizer = made(network, monkeypatch)
    sizes = 4 * (64 + 16), 4 * 64, 4 * (2 * 64 + 4)
    assert measured(optimizer, [network]) == Memory(*sizes, activations=4 * 64)
