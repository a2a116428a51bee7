"""State that update rules keep beside the parameters: checkpoints follow, by name and value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import ParameterGroup
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.state import State

OwnState = Callable[[OptimizerConfig, Parameter, ParallelMesh], State | None]
"""Makes the state that a rule keeps for a parameter in a shape of its own, on the mesh's device; None if there is none.

A pure function, so that any rank knows the state of another. Its logical tensors have the names of the weight's, under
which they are saved. All ranks of a shard group keep the whole state: the rule sums what each rank's slice adds to a
row or a column over the group, and over the ranks that share that row or column.
"""


@dataclass(frozen=True)
class Kept:
    """State that a rule keeps."""

    flat: Callable[[OptimizerConfig, ParameterGroup], tuple[str, ...]]
    """Names of what has a number for each element of a group's parameters, on the shards as these are."""
    own: Mapping[str, OwnState] = field(default_factory=dict)
    """State of other shapes, by name. (The rule that tests/distributed/test_checkpoint_state.py makes has some.)"""


def _moments(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _momentum(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()


def _of_muon(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    return ("momentum_buffer",) if group.matrices else _moments(config, group)


KEPT: dict[str, Kept] = {"adam": Kept(_moments), "sgd": Kept(_momentum), "muon": Kept(_of_muon)}
"""State that is kept, by --optimizer."""


def state_names(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    """The flat tensors that are kept beside each parameter of a group."""
    return KEPT[config.optimizer].flat(config, group)


def own_states(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> dict[str, State]:
    """Make what is kept of a parameter in shapes of its own, by name."""
    made = {name: make(config, parameter, mesh) for name, make in KEPT[config.optimizer].own.items()}
    return {name: state for name, state in made.items() if state is not None}


def all_state_names(config: OptimizerConfig) -> set[str]:
    """Return the names of all groups' states, of all shapes."""
    kinds = (
        ParameterGroup(weight_decay=False, is_embedding_or_output=False, matrices=matrices)
        for matrices in (False, True)
    )
    return {*(name for group in kinds for name in state_names(config, group)), *KEPT[config.optimizer].own}
