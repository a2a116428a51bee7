"""Steps of one layout on more and more GPUs, which all become data-parallel ranks: with the same batch, and with one
that grows alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.planner.cost import Cost
from megalite.extras.planner.plan import Plan, Planner


@dataclass(frozen=True)
class Size:
    """Steps on a number of GPUs."""

    gpus: int
    same: Cost | None
    """Step with the same batch; None if the batch cannot be divided among so many."""
    grown: Cost
    """Step with a batch that grows with the GPUs."""


def sizes(planner: Planner, plan: Plan, first: int, last: int) -> list[Size]:
    """Return the steps of a plan's layout on `first`, twice as many, and so on, up to `last` GPUs.

    Raises:
        ConfigurationError: the layout is for more GPUs than all of these.
    """
    batch, found = plan.config.training.global_batch_size or 0, []
    gpus = first
    while gpus <= last:
        grown = _cost(planner, plan, gpus, batch * gpus // plan.gpus)
        if grown is not None:
            found.append(Size(gpus, _cost(planner, plan, gpus, batch), grown))
        gpus *= 2
    if not found:
        raise ConfigurationError(f"--scaling {first}..{last}: the layout ({plan.layout}) is for other numbers of GPUs")
    return found


def _cost(planner: Planner, plan: Plan, gpus: int, batch: int) -> Cost | None:
    training = replace(plan.config.training, global_batch_size=batch)
    try:
        return planner.with_gpus(gpus).plan(replace(plan.config, training=training)).step.cost
    except MegaliteError:
        return None


def serial_fraction(found: Sequence[tuple[int, float]]) -> float:
    """Return Amdahl's serial fraction s of steps with the same batch, by least squares.

    Of the time on the first number of GPUs, the share s stays and the rest shrinks: T / T0 = s + (1 - s) N0 / N.
    """
    (first, begin), *others = found
    pairs = [(1 - first / gpus, seconds / begin - first / gpus) for gpus, seconds in others]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def communication(cost: Cost) -> float:
    """Return the seconds of all messages that no computation hides."""
    return cost.tensor + cost.context + cost.expert + cost.pipeline + cost.data


def computation(cost: Cost) -> float:
    """Return the seconds of kernels and of the optimizer."""
    return cost.products + cost.attention + cost.elementwise + cost.launch + cost.optimizer
