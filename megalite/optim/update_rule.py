"""Base class of update rules, and the state that each --optimizer keeps: checkpoints follow, by name and value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.state import State


class UpdateRule(ABC):
    """Updates parameters, master weights and state from the gradients of the shards it was made for."""

    @abstractmethod
    def update(self, rates: Rates, step: int, factor: float) -> None:
        """`step` counts updates from 1; the gradients are to be multiplied by `factor`, in place or not.

        Every rank calls it: a rule may communicate with other ranks.
        """

    def collectives(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """List an update's collectives with other ranks, in order: names and ranks."""
        return ()


OwnState = Callable[[OptimizerConfig, Parameter, ParallelMesh], State | None]
"""Makes the state that a rule keeps for a parameter in a shape of its own, on the mesh's device; None if there is none.

A pure function, so that any rank knows the state of another. Its logical tensors have the names of the weight's, under
which they are saved. All ranks of a shard group keep the full state: the rule sums what each rank's slice adds to a
row or a column over the group, and over the ranks that share that row or column.
"""


@dataclass(frozen=True)
class RuleState:
    """State that a rule keeps."""

    flat: Callable[[OptimizerConfig, ParameterGroup], tuple[str, ...]]
    """Names of the state with one number per element of a group's parameters, sharded as these are."""
    own: Mapping[str, OwnState] = field(default_factory=dict)
    """State of other shapes, by name. (The rule that tests/distributed/test_checkpoint_state.py makes has some.)"""


def _moments(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _momentum(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()


def _of_muon(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("momentum_buffer",) if group.matrices else _moments(config, group)


RULE_STATE: dict[str, RuleState] = {
    "adam": RuleState(_moments),
    "sgd": RuleState(_momentum),
    "muon": RuleState(_of_muon),
}
"""State by --optimizer."""


def state_names(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    """The names of the flat state of a group's parameters."""
    return RULE_STATE[config.optimizer].flat(config, group)


def own_states(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> dict[str, State]:
    """Make a parameter's state of other shapes, by name."""
    made = {name: make(config, parameter, mesh) for name, make in RULE_STATE[config.optimizer].own.items()}
    return {name: state for name, state in made.items() if state is not None}


def all_state_names(config: OptimizerConfig) -> set[str]:
    """Return the names of all groups' states, of all shapes."""
    names = set(RULE_STATE[config.optimizer].own)
    for matrices in (False, True):
        names.update(state_names(config, ParameterGroup(False, False, matrices)))
    return names
