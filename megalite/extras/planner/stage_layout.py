"""Contents of pipeline stages such that all take about as long, by the costs of the parts or by a measured step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean

from megalite.config import RunConfig
from megalite.config.pipeline_layout import AUTO, virtual_stages
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.dry_run import planned_kernels
from megalite.extras.planner.parts import Parts, part_records
from megalite.extras.planner.records import PartRecord
from megalite.modules.balance import balance
from megalite.pipeline.timeline import TimeLine, measured_durations
from megalite.pipeline.trace import read_trace
from megalite.training.data import known_vocabulary

_GPU = "H100-SXM"
_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class PartCosts:
    """Costs of the parts of a network with a micro-batch, forward and backward, in any unit."""

    embedding: float
    layers: tuple[float, ...]
    head: float


def priced(parts: Parts, config: RunConfig, prices: Prices) -> PartCosts:
    """Return the seconds of the parts on a cluster."""

    def seconds(part: PartRecord, *, of_layer: bool) -> float:
        return sum(each.total for each in prices.passes(part, config, of_layer=of_layer))

    layers = tuple(seconds(layer, of_layer=True) for layer in parts.layers)
    return PartCosts(seconds(parts.embedding, of_layer=False), layers, seconds(parts.head, of_layer=False))


def measured(time_line: TimeLine, layers: int) -> PartCosts:
    """Return the seconds of the parts, from a step whose stages had equal numbers of layers.

    Raises:
        ConfigurationError: the step does not tell what a layer takes.
    """
    stages = time_line.stages
    if stages.count < 3 or layers % stages.count:
        raise ConfigurationError(
            f"{_FLAG} {AUTO}:FILE: the measured step has {stages.count} stages of {layers} layers: measure one with 3 "
            "or more stages of equal numbers of layers (--profile-pipeline)"
        )
    duration = measured_durations(time_line, stages)
    seconds = [duration(stage, "F") + duration(stage, "B") for stage in range(stages.count)]
    middle = mean(seconds[1:-1])
    layer = middle * stages.count / layers
    return PartCosts(max(seconds[0] - middle, 0.0), (layer,) * layers, max(seconds[-1] - middle, 0.0))


@cache
def balanced(costs: PartCosts, stages: int) -> str:
    """Return the contents of each stage as letters, such that the slowest stage is as fast as possible."""
    letters = ["E", *"t" * len(costs.layers), "L"]
    parts = balance([costs.embedding, *costs.layers, costs.head], stages)
    *first, last = ["".join(letters[part.start : part.stop]) for part in parts]
    alike = ((_short(f"{stage}|"), len(list(group))) for stage, group in groupby(first))
    return "".join(stage if count == 1 else f"({stage})*{count}" for stage, count in alike) + _short(last)


def _short(letters: str) -> str:
    count = letters.count("t")
    return letters if count < 2 else letters.replace("t" * count, f"t*{count}")


def with_stages(config: RunConfig, world_size: int) -> RunConfig:
    """Return a run whose stages are written out, for --pipeline-model-parallel-layout auto or auto:FILE.

    FILE is a trace of --profile-pipeline. Without one, the costs are those that are predicted for a known GPU, so that
    all ranks get the same on any device: what parts take in proportion differs little between GPUs.

    Raises:
        ConfigurationError: the flags contradict each other, or the layers cannot be divided into these stages.
    """
    parallel, layers = config.parallel, config.model.num_layers
    file = (parallel.pipeline_model_parallel_layout or "").partition(":")[2]
    without = replace(parallel, pipeline_model_parallel_layout=None)
    count = parallel.pipeline_model_parallel_size * virtual_stages(config.model, without)
    if count > layers + 2:
        raise ConfigurationError(
            f"{_FLAG} {AUTO}: {count} stages are more than {layers} layers, the embedding and the loss: lower "
            "--pipeline-model-parallel-size or the stages per rank"
        )

    def with_letters(costs: PartCosts) -> RunConfig:
        changed = replace(
            without,
            pipeline_model_parallel_layout=balanced(costs, count),
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
        return replace(config, parallel=changed)

    if file:
        return with_letters(measured(read_trace(Path(file)), layers))
    known = resolve(with_letters(PartCosts(0.0, (1.0,) * layers, 0.0)), world_size)  # whatever else may be wrong
    known = replace(known, model=replace(known.model, vocab_size=known_vocabulary(config)[0]))
    with planned_kernels(config.kernels):
        return with_letters(priced(part_records(known), known, Prices(find_cluster(_GPU))))
