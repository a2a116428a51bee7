"""Measured seconds of pipeline ranks, for `--pipeline-model-parallel-layout auto:FILE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.pipeline_layout import layers_of_letters, shape
from megalite.errors import ConfigurationError
from megalite.extras.planner.split import PartCosts, rank_costs
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine, measured_durations
from megalite.pipeline.trace import LONGEST, MOST_MARKS, parse_trace
from megalite.small_files import read_json, reason, shown

_FLAG = "--pipeline-model-parallel-layout auto:"


@dataclass(frozen=True)
class MeasuredRanks:
    """Seconds that the ranks of a pipeline took, with what they had then."""

    seconds: tuple[float, ...]
    """Seconds of each rank with a micro-batch, forward and backward, in all its stages."""
    stages: Stages
    layers: tuple[int, ...]
    """Number of layers of each stage."""

    def factors(self, costs: PartCosts) -> list[float]:
        """Return the seconds of each rank for a unit of the costs, which are the same on all ranks."""
        modelled = rank_costs([costs] * self.stages.ranks, self.stages, self.layers)
        return [seconds / cost for seconds, cost in zip(self.seconds, modelled, strict=True)]


def read_measured_ranks(path: Path, model: ModelConfig, parallel: ParallelConfig) -> MeasuredRanks:
    """Read a trace of --profile-pipeline, or a JSON file with `seconds` of the ranks and their `layout`.

    Raises:
        ConfigurationError: it is neither, or does not fit the network and the pipeline; the message names the file.
    """
    try:
        found = read_json(path, most_marks=MOST_MARKS)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{_FLAG}{path} cannot be read: {reason(error)}") from None
    if isinstance(found, dict) and "seconds" in found:
        measured = _of_seconds(path, found, model, parallel)
    else:
        measured = _of_trace(path, parse_trace(path, found), model)
    ranks = parallel.pipeline_model_parallel_size
    if measured.stages.ranks != ranks:
        raise ConfigurationError(
            f"{_FLAG}{path} has seconds of {measured.stages.ranks} pipeline ranks, but "
            f"--pipeline-model-parallel-size is {ranks}: measure as many"
        )
    for rank, seconds in enumerate(measured.seconds):
        if not 0 < seconds < LONGEST:
            raise ConfigurationError(f"{_FLAG}{path}: rank {rank} took {seconds} seconds: give a number above 0")
    for rank in range(ranks):
        own = measured.stages.of_rank(rank)
        if not (any(measured.layers[stage] for stage in own) or {0, measured.stages.count - 1} & set(own)):
            raise ConfigurationError(
                f"{_FLAG}{path}: rank {rank} had nothing to do: measure ranks that all have layers"
            )
    return measured


def _of_seconds(path: Path, found: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> MeasuredRanks:
    """Read the small form, with the seconds of each rank and the layout as letters."""
    seconds, layout = found["seconds"], found.get("layout")
    if found.keys() - {"seconds", "layout"} or not isinstance(layout, str):
        raise ConfigurationError(f'{_FLAG}{path}: give seconds and layout, such as "Ett|ttL", and no other key')
    if not isinstance(seconds, list) or not seconds or not all(type(each) in (int, float) for each in seconds):
        raise ConfigurationError(f"{_FLAG}{path}: seconds is {shown(seconds)}: give a number for each pipeline rank")
    try:
        layers = layers_of_letters(layout, model)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_FLAG}{path}: its layout is not one of this network: {error}") from None
    if len(layers) % len(seconds):
        raise ConfigurationError(
            f"{_FLAG}{path}: its layout has {len(layers)} stages, which cannot be divided evenly among the "
            f"{len(seconds)} ranks of its seconds"
        )
    stages = Stages(len(seconds), len(layers) // len(seconds), shape(parallel).v_shaped)
    return MeasuredRanks(tuple(map(float, seconds)), stages, tuple(layers))


def _of_trace(path: Path, time_line: TimeLine, model: ModelConfig) -> MeasuredRanks:
    """Add up the median seconds of each rank's stages."""
    stages = time_line.stages
    if stages.v_shaped and stages.chunks != 2:
        raise ConfigurationError(
            f"{_FLAG}{path}: no schedule has {stages.chunks} stages per rank in a V: measure a step"
        )
    if not time_line.in_seconds:
        raise ConfigurationError(f"{_FLAG}{path} has assumed times: give a step that --profile-pipeline measured")
    layers = _layers(path, time_line.blocks, stages.count, model)
    duration = measured_durations(time_line, stages)
    seconds = tuple(
        sum(duration(stage, "F") + duration(stage, "B") for stage in stages.of_rank(rank))
        for rank in range(stages.ranks)
    )
    return MeasuredRanks(seconds, stages, layers)


def _layers(path: Path, blocks: Sequence[int], stages: int, model: ModelConfig) -> tuple[int, ...]:
    """Return the number of layers of each stage from its blocks; they are equal in a trace that does not tell."""
    num_layers = model.num_layers
    if not blocks and num_layers % stages == 0:
        return (num_layers // stages,) * stages
    layers = [*blocks]
    if layers:
        layers[0] -= 1
        layers[-1] -= 3 + model.own_depths if model.depths else 1  # depths stand between the final norm and the output
    if sum(layers) != num_layers or min(layers, default=0) < 0:
        had = f"{sum(layers)} layers" if layers else f"an unknown number of layers in each of its {stages} stages"
        raise ConfigurationError(
            f"{_FLAG}{path} was measured with {had}, but --num-layers is {num_layers}: measure this network"
        )
    return tuple(layers)
