"""Seconds of the parts of a network with a micro-batch, on a cluster and on each pipeline rank's devices."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import RunConfig
from megalite.config.low_precision import LowPrecisionConfig
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.device_classes import classes_of
from megalite.extras.planner.dry_run import planned_kernels
from megalite.extras.planner.parts import Parts, part_records
from megalite.extras.planner.records import PartRecord
from megalite.extras.planner.split import PartCosts


def priced(parts: Parts, config: RunConfig, prices: Prices) -> PartCosts:
    """Return the seconds of the parts on a cluster."""

    def seconds(part: PartRecord, *, of_layer: bool) -> float:
        return sum(each.total for each in prices.passes(part, config, of_layer=of_layer))

    layers = tuple(seconds(layer, of_layer=True) for layer in parts.layers)
    return PartCosts(seconds(parts.embedding, of_layer=False), layers, seconds(parts.head, of_layer=False))


def unrounded(config: RunConfig) -> RunConfig:
    """Return a run whose products are those of the weights' dtype, which all devices have."""
    return replace(config, low_precision=LowPrecisionConfig())


def class_costs(config: RunConfig) -> list[PartCosts]:
    """Return the seconds of the parts on each pipeline rank: those of the slowest class there, with its flags.

    `config`: a resolved run with its vocabulary.
    """
    classes, costs = classes_of(config.parallel), {}
    for one in classes.classes:
        own: RunConfig = one.on(config)
        with planned_kernels(own.kernels, of_gpu=not one.cluster.gpu.is_cpu):
            costs[one.name] = priced(part_records(unrounded(own)), own, Prices(one.cluster))
    ranks = range(config.parallel.pipeline_model_parallel_size)
    of_ranks = (classes.of_pipeline_rank(rank, config.parallel) for rank in ranks)
    return [PartCosts.highest([costs[one.name] for one in found]) for found in of_ranks]
