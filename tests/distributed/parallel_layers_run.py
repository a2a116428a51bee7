"""Runs of the models of parallel_model.py on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megalite
from tests.distributed.layout_run import Held, held, whole_gradients
from tests.distributed.own_model_run import OfRank
from tests.distributed.parallel_model import STEPS, samples, trainer
from tests.harness.unsharded import unsharded_parameters


def run(model: str, optimizer: str, layout: Mapping[str, Any], steps: int = STEPS, **options: Any) -> OfRank:
    """Train up to a step, from the newest checkpoint in the option `save`, and save there."""
    run = trainer(model, optimizer, layout, **options)
    inner = run._trainer
    names = [term.name for term in inner.terms]
    losses, norms, gradients = [], [], list[Held]()
    while run.iteration < steps:
        record = run.step()
        losses.append({name: record[name] for name in names})
        norms.append(record["grad_norm"])
        if run.iteration == 1:
            gradients = whole_gradients(inner.network, run.mesh, inner.optimizer.buckets)
    if "save" in options:
        run.save()
    with unsharded_parameters(inner.optimizer):
        parameters = held(inner.network, run.mesh, lambda parameter: parameter)
    run.close()
    return OfRank(losses, norms, gradients, parameters, [])


def evaluated(model: str, layout: Mapping[str, Any]) -> dict[str, float]:
    run = trainer(model, "sgd", layout)
    found = run.evaluate(samples())
    run.close()
    return found


def without_own_initial_values(model: str, layout: Mapping[str, Any]) -> list[Held]:
    run = trainer(model, "sgd", layout, initial=None)
    found = held(run._trainer.network, run.mesh, lambda parameter: parameter)
    run.close()
    return found


def refusal(model: str, layout: Mapping[str, Any]) -> str:
    try:
        trainer(model, "sgd", layout).close()
    except megalite.MegaliteError as error:
        return str(error)
    return "nothing was refused"
