"""Base class of update rules, and the state of each --optimizer. Checkpoints save this state by name and value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.factors import COLUMNS, ROWS, average_of_columns, average_of_rows
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.state import State


class UpdateRule(ABC):
    """Arithmetic of an optimizer: updates the parameters, master weights and state of shards from their gradients."""

    @abstractmethod
    def update(self, rates: Rates, step: int, factor: float) -> None:
        """Apply one update. Every rank calls this method, because a rule may communicate with other ranks.

        Args:
            rates: the learning rates and the weight decay.
            step: the number of the update, counted from 1.
            factor: a factor of the gradients. The rule may multiply them in place.
        """

    def collectives(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Return the names and ranks of the collectives of one update, in order."""
        return ()


OwnState = Callable[[OptimizerConfig, Parameter, ParallelMesh], State | None]
"""Function that makes a parameter's state of another shape, on the mesh's device, or returns None if there is none.

It must be pure, so that any rank can compute which state another rank has. The logical tensors of the state have the
names of the logical tensors of the weight, and are saved under them. The state is replicated on all ranks of a shard
group: the rule sums the contributions of the ranks' slices to a row or a column over the group, and over the ranks that
share this row or column.
"""


@dataclass(frozen=True)
class RuleState:
    """State of an update rule."""

    flat: Callable[[OptimizerConfig, ParameterGroup], tuple[str, ...]]
    """Names of the state with one number per element of a group's parameters. It is sharded as the parameters are."""
    own: Mapping[str, OwnState] = field(default_factory=dict)
    """Functions that make state of other shapes, by name (example: tests/distributed/test_checkpoint_state.py)."""


_MOMENTS, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
RULE_STATE: dict[str, RuleState] = {
    "adam": RuleState(lambda config, group: _MOMENTS),
    "sgd": RuleState(lambda config, group: _MOMENTUM if config.sgd_momentum > 0.0 else ()),
    "muon": RuleState(lambda config, group: _MOMENTUM if group.matrices else _MOMENTS),
    "lars": RuleState(lambda config, group: _MOMENTUM),
    "lamb": RuleState(lambda config, group: _MOMENTS),
    "lion": RuleState(lambda config, group: _MOMENTS[:1]),
    "adafactor": RuleState(
        lambda config, group: () if group.matrices else _MOMENTS[1:],
        {ROWS: average_of_rows, COLUMNS: average_of_columns},
    ),
}
"""State by --optimizer."""


def state_names(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    """Return the names of the flat state of a group's parameters."""
    return RULE_STATE[config.optimizer].flat(config, group)


def own_states(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> dict[str, State]:
    """Return a parameter's state of other shapes, by name. A frozen one has none."""
    if not parameter.requires_grad:
        return {}
    made = {name: make(config, parameter, mesh) for name, make in RULE_STATE[config.optimizer].own.items()}
    return {name: state for name, state in made.items() if state is not None}


def all_state_names(config: OptimizerConfig) -> set[str]:
    """Return the names of the state of all parameter groups, in all shapes."""
    names = set(RULE_STATE[config.optimizer].own)
    for matrices in (False, True):
        names.update(state_names(config, ParameterGroup(False, False, matrices)))
    return names
