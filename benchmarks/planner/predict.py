"""Predictions of published runs: the records of their networks, once for each that differs, and the steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from benchmarks.planner.published import Run
from megalite.config.parallel import ParallelConfig
from megalite.extras.planner.cluster import Cluster, Stack
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.dry_run import planned_kernels
from megalite.extras.planner.parts import Parts, part_records
from megalite.extras.planner.step import Step

_LAYERS = 3  # as many as an equal one, in the middle, is recorded from
_records: dict[Hashable, Parts] = {}


def parts_key(run: Run) -> Hashable:
    """Return what the records of a run's parts depend on."""
    config = run.config
    model, sizes = config.model, config.parallel.mesh_sizes
    if len(set(model.layers)) == 1:
        model = replace(model, num_layers=_LAYERS)
    training = replace(config.training, global_batch_size=config.training.micro_batch_size)
    return (
        *(model, config.data.seq_length, training, config.kernels),
        *(size for axis, size in sizes.items() if axis != "pipeline_parallel_size"),
        *(config.parallel.sequence_parallel, config.parallel.cp_comm_type),
    )


def parts_of(run: Run) -> Parts:
    """Return the records of a run's parts."""
    key = parts_key(run)
    if key not in _records:
        model = key[0]  # type: ignore[index]
        parallel = replace(
            ParallelConfig(),
            tensor_model_parallel_size=run.config.parallel.tensor_model_parallel_size,
            context_parallel_size=run.config.parallel.context_parallel_size,
            expert_model_parallel_size=run.config.parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=run.config.parallel.expert_tensor_parallel_size,
            sequence_parallel=run.config.parallel.sequence_parallel,
        )
        config = replace(run.config, model=model, parallel=parallel)
        with planned_kernels(config.kernels):
            _records[key] = part_records(config)
    found = _records[key]
    layers = run.config.model.num_layers
    return found if len(found.layers) == layers else replace(found, layers=found.layers[-1:] * layers)


def step_of(run: Run, cluster: Cluster, stack: Stack) -> Step:
    """Return the step of a run on a cluster, by a program."""
    return Step(run.config, run.world_size, parts_of(run), Prices(cluster, stack))
