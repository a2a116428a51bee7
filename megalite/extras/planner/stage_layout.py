"""Contents of pipeline stages such that all take about as long, by the costs of the parts or by measured seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from megalite.config import ParallelConfig, RunConfig
from megalite.config.pipeline_layout import AUTO, schedule_name, shape, virtual_stages
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.dry_run import planned_kernels
from megalite.extras.planner.measured_ranks import MeasuredRanks, read_measured_ranks
from megalite.extras.planner.part_costs import class_costs, priced, unrounded
from megalite.extras.planner.parts import part_records
from megalite.extras.planner.split import PartCosts, letters, split, stage_costs
from megalite.modules.balance import balance
from megalite.pipeline.schedules import SCHEDULES, Kind, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.training.data import known_vocabulary

_GPU = "H100-SXM"
_FLAG = "--pipeline-model-parallel-layout"
_MOST_SIMULATED = 256
"""Most micro-batches of a simulated step."""


@cache
def balanced(costs: PartCosts, stages: int) -> str:
    """Return the contents of each stage as letters, such that the slowest stage is as fast as possible."""
    counts = [len(part) for part in balance([costs.embedding, *costs.layers, costs.head], stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return letters(counts)


def with_stages(config: RunConfig, world_size: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return a run whose stages are written out, for --pipeline-model-parallel-layout auto or auto:FILE, and notes.

    FILE has measured seconds of the pipeline ranks. Without one, the costs are those that are predicted for a known
    GPU, so that all ranks get the same on any device: what parts take in proportion differs little between GPUs.

    Raises:
        ConfigurationError: the flags contradict each other, or the layers cannot be divided into these stages.
    """
    parallel, layers = config.parallel, config.model.num_layers
    file = (parallel.pipeline_model_parallel_layout or "").partition(":")[2]
    without = replace(parallel, pipeline_model_parallel_layout=None)
    chunks = virtual_stages(config.model, without)
    count = parallel.pipeline_model_parallel_size * chunks
    if count > layers + 2:
        raise ConfigurationError(
            f"{_FLAG} {AUTO}: {count} stages are more than {layers} layers, the embedding and the loss: lower "
            "--pipeline-model-parallel-size or the stages per rank"
        )

    def with_letters(written: str) -> RunConfig:
        changed = replace(
            without,
            pipeline_model_parallel_layout=written,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
        return replace(config, parallel=changed)

    measured = read_measured_ranks(Path(file), config.model, without) if file else None
    stages = Stages(parallel.pipeline_model_parallel_size, chunks, shape(without).v_shaped)
    known = resolve(with_letters(balanced(PartCosts(0.0, (1.0,) * layers, 0.0), count)), world_size)
    known = replace(known, model=replace(known.model, vocab_size=known_vocabulary(config)[0]))
    if measured is None and parallel.device_classes is not None:
        return with_letters(letters(split(class_costs(known), stages))), ()
    with planned_kernels(config.kernels):
        costs = priced(part_records(unrounded(known)), known, Prices(find_cluster(_GPU)))
    if measured is None:
        return with_letters(balanced(costs, count)), ()
    of_ranks = [costs * factor for factor in measured.factors(costs)]
    found = split(of_ranks, stages)
    return with_letters(letters(found)), tuple(_notes(file, known, world_size, measured, of_ranks, stages, found))


def _notes(
    file: str,
    config: RunConfig,
    world_size: int,
    measured: MeasuredRanks,
    costs: Sequence[PartCosts],
    stages: Stages,
    layers: Sequence[int],
) -> Iterator[str]:
    """Yield what the split gains over the measured one. `costs`: seconds of the parts on each rank."""
    data_ranks = config.parallel.data_parallel_size(world_size)
    batch = config.training.global_batch_size or 1
    count = min(-(-batch // (config.training.micro_batch_size * data_ranks)), _MOST_SIMULATED)
    before = _seconds(stage_costs(costs, measured.stages, measured.layers), measured.stages, config.parallel, count)
    after = _seconds(stage_costs(costs, stages, layers), stages, config.parallel, count)
    slowest = max(range(stages.ranks), key=lambda rank: costs[rank].layers[0])
    times = costs[slowest].layers[0] / min(each.layers[0] for each in costs)
    yield (
        f"{_FLAG} {AUTO}:{file}: pipeline rank {slowest} takes {times:.2f} x the fastest one's time for a layer; the "
        f"passes of {count} micro-batches, simulated, take {after:.4g} s as {letters(layers)}, and {before:.4g} s as "
        f"{letters(measured.layers)}, which was measured"
    )


def _seconds(of_stages: Sequence[float], stages: Stages, parallel: ParallelConfig, micro_batches: int) -> float:
    """Return the seconds of a step's passes in a pipeline whose stages take these for forward and backward.

    A third is forward: of a pipeline in its steady state, the sum counts.
    """
    if stages.chunks > 1:
        name: str = "zb-v" if stages.v_shaped else "interleaved-1f1b"
    else:  # the measured step may have had fewer stages per rank than the schedule of the run needs
        name = schedule_name(1, parallel) if shape(parallel).chunks == 1 else "1f1b"
    shares: dict[Kind, float] = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    orders = orders_of(SCHEDULES[name], stages, micro_batches, group)
    spans = simulate(stages, orders, lambda stage, kind: of_stages[stage] * shares[kind])
    return max(rank[-1].end for rank in spans)
