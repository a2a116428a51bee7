"""Division of a network's weights into files, one per rank of a layout. No process of that layout needs to run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megalite.checkpoint import Contents, Plan
from megalite.checkpoint.manifest import is_optimizer_state
from megalite.config import ModelConfig, OptimizerConfig, ParallelConfig
from megalite.config.pipeline_layout import stage_layers, virtual_stages
from megalite.config.validate_model import uneven_widths
from megalite.errors import ConfigurationError
from megalite.model.gpt import make_chunks
from megalite.optim.buckets import DataParallel
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from megalite.pipeline.stages import Stages


def weights_of_ranks(model: ModelConfig, parallel: ParallelConfig) -> Iterator[list[tuple[str, Box]]]:
    """Yield for each rank the boxes of weights and modules' state that it would save.

    The number of ranks is the smallest one that the layout allows. The model of each rank is built on the meta device.
    Raises ConfigurationError if the model cannot be divided in this way.
    """
    check_divides(model, parallel)
    parts = stage_layers(model, parallel)
    stages = Stages(parallel.pipeline_model_parallel_size, virtual_stages(model, parallel))
    size = parallel.ranks_needed
    world = ParallelMesh(world_size=size, **parallel.mesh_sizes)

    def contents_at(mesh: ParallelMesh) -> Contents:
        held = [parts[stage] for stage in stages.of_rank(mesh.coordinate("pp"))]
        ranks = mesh.ranks("pp")
        chunks = make_chunks(model, mesh, held, tuple(ranks[end] for end in stages.ends))
        return Contents.of(chunks, mesh, DataParallel(torch.float32))

    plan = Plan(world, contents_at, OptimizerConfig(lr=0.0), zero_stage=0, instances=1)
    for rank in range(size):
        yield [(part.name, part.box) for part in plan.saved(rank) if not is_optimizer_state(part.name)]


def check_divides(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigurationError if the model cannot be divided equally among the ranks."""
    if parallel.pipeline_model_parallel_size < 1:
        raise ConfigurationError("--pipeline-model-parallel-size must be at least 1")
    if problems := uneven_widths(model, parallel.tensor_model_parallel_size):
        raise ConfigurationError("\n".join(problems))
