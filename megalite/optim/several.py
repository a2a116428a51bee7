"""Several optimizers in one run, by name: each has parameters, hyperparameters, a number of updates and a clip."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megalite.config.optimizer import OptimizerConfig
from megalite.optim import statistics
from megalite.optim.accumulator import StepCollective
from megalite.optim.buckets import Bucket, DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, StepResult, clipping, make_rules
from megalite.optim.update_rule import UpdateRule, all_state_names
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter


@dataclass(frozen=True)
class SeveralRates(Rates):
    """Rates of a step that several optimizers have; those of the first one are the step's own."""

    each: Mapping[str, Rates]
    """Rates by the name of the optimizer, of those that the step updates."""


def optimizer_of(parameter: Parameter) -> str:
    """Return the name of the optimizer that updates a parameter."""
    return parameter.sharding.pieces[0].tensor.optimizer


class SeveralOptimizers(Optimizer):
    """Optimizers that each have the buckets of their own parameters.

    A step updates those that `choose` has named: gradients of the others are neither computed nor reduced. Each has a
    norm and a clip of its own; they skip a step together.

    Attributes:
        updates: number of applied updates, by the name of the optimizer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: ParallelMesh,
        config: OptimizerConfig,
        options: DataParallel,
        *,
        configs: Mapping[str, OptimizerConfig],
        **rest: Any,
    ) -> None:
        """Allocate the state. `configs`: the hyperparameters by name; the others are the arguments of `Optimizer`."""
        self.configs = configs
        self._rules_of: dict[str, list[UpdateRule]] = {}
        super().__init__(buckets, mesh, config, options, **rest)
        self.updates = dict.fromkeys(configs, 0)
        self.choose(configs)

    def config_of(self, parameter: Parameter) -> OptimizerConfig:
        return self.configs[optimizer_of(parameter)]

    def _make_rules(self) -> list[UpdateRule]:
        for name, config in self.configs.items():
            shards = [shard for shard in self.shards if _name(shard.bucket) == name]
            self._rules_of[name] = make_rules(shards, self.mesh, config)
        return [rule for rules in self._rules_of.values() for rule in rules]

    @property
    def possible_state_kinds(self) -> set[str]:
        return super().possible_state_kinds.union(*map(all_state_names, self.configs.values()))

    def choose(self, names: Collection[str]) -> None:
        """Let the next steps update these optimizers only."""
        self.chosen = [name for name in self.configs if name in names]
        self.updated = [bucket for bucket in self.buckets if _name(bucket) in names]
        self._idle = [bucket for bucket in self.buckets if _name(bucket) not in names]
        self.rules = [rule for name in self.chosen for rule in self._rules_of[name]]

    @contextmanager
    def differentiated(self) -> Iterator[None]:
        """Let only the parameters of the chosen optimizers need gradients, within the block."""
        idle = [slot.parameter for bucket in self._idle for slot in bucket.slots]
        for parameter in idle:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in idle:
                parameter.requires_grad_(True)

    def _free_frozen(self) -> None:
        super()._free_frozen()
        for bucket in self._idle:
            bucket.free_parameters()

    def _norms(self) -> StepCollective[dict[str, float]]:
        return StepCollective("norm", self.mesh.world().ranks, partial(self._norms_of, self.updated))

    def _norms_of(self, buckets: Sequence[Bucket]) -> dict[str, float]:
        """Return the norms of the gradients by optimizer and parameter group, `NAME/GROUP`."""
        found = dict[str, float]()
        for name in self.chosen:
            owned = [(bucket, bucket.gradient_shard) for bucket in buckets if _name(bucket) == name]
            found |= {f"{name}/{group}": norm for group, norm in statistics.norms(owned, self.mesh).items()}
        return found

    def _apply_rules(self, rates: Rates, result: StepResult, loss_scale: float) -> None:
        assert isinstance(rates, SeveralRates)
        for name in self.chosen:
            self.updates[name] += 1
            factor = clipping(self.configs[name], norm_of(result, name)) / loss_scale
            for rule in self._rules_of[name]:
                rule.update(rates.each[name], self.updates[name], factor)


def norm_of(result: StepResult, name: str) -> float:
    """Return the norm of the gradients of an optimizer before clipping."""
    return math.hypot(*(norm for key, norm in result.gradient_norms.items() if key.rpartition("/")[0] == name))


def _name(bucket: Bucket) -> str:
    return optimizer_of(bucket.slots[0].parameter)
