"""Runs of the models of parallel_model.py on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megalite
from tests.distributed.layout_run import held, whole_gradients
from tests.distributed.own_model_run import OfRank
from tests.distributed.parallel_model import STEPS, trainer
from tests.harness.unsharded import unsharded_parameters


def run(
    model: str, optimizer: str, layout: Mapping[str, Any], options: Mapping[str, Any] | None = None, steps: int = STEPS
) -> OfRank:
    run = trainer(model, optimizer, layout, **(options or {}))
    inner = run._trainer
    names = [term.name for term in inner.terms]
    losses, norms, gradients = [], [], []
    while run.iteration < steps:
        record = run.step()
        losses.append({name: record[name] for name in names})
        norms.append(record["grad_norm"])
        if run.iteration == 1:
            gradients = whole_gradients(inner.network, run.mesh, inner.optimizer.buckets)
    if run.config.checkpoint.save is not None:
        run.save()
    with unsharded_parameters(inner.optimizer):
        parameters = held(inner.network, run.mesh, lambda parameter: parameter)
    run.close()
    return OfRank(losses, norms, gradients, parameters, [])


def evaluated(model: str, layout: Mapping[str, Any]) -> dict[str, float]:
    from tests.distributed.parallel_model import samples

    run = trainer(model, "sgd", layout)
    found = run.evaluate(samples())
    run.close()
    return found


def refusal(model: str, layout: Mapping[str, Any]) -> str:
    try:
        trainer(model, "sgd", layout).close()
    except megalite.MegaliteError as error:
        return str(error)
    return ""


def saved(model: str, optimizer: str, layout: Mapping[str, Any], directory: Path, steps: int) -> OfRank:
    return run(model, optimizer, layout, {"save": directory}, steps)
