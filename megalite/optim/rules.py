"""Which rule updates which parameters, and what state it keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.elementwise import TorchRule
from megalite.optim.learning_rate import Rates
from megalite.optim.muon import Muon
from megalite.optim.shard import ParameterGroup, Shard
from megalite.parallel.mesh import ParallelMesh


class UpdateRule(Protocol):
    """Updates master weights and state from the gradients of the shards it was made for."""

    def update(self, rates: Rates, step: int) -> None:
        """`step` counts updates from 1. Every rank calls it: a rule may talk to other ranks."""


def state_names(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    """The tensors that are kept beside each parameter of a group."""
    if config.optimizer == "muon" and group.matrices:
        return ("momentum_buffer",)
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()
    return ("exp_avg", "exp_avg_sq")


def all_state_names(config: OptimizerConfig) -> set[str]:
    """Those of all groups together."""
    kinds = (ParameterGroup(decays=False, token_table=False, matrices=matrices) for matrices in (False, True))
    return {name for group in kinds for name in state_names(config, group)}


def make_rules(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    """The rules that together update all of the shards once."""
    runs = [run for shard in shards for run in shard.runs]
    if config.optimizer != "muon":
        return [TorchRule(runs, config)]
    return [Muon(shards, mesh, config), TorchRule([run for run in runs if not run.group.matrices], config)]
