"""Functions of ranks for converted models, without any import of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import load_weights
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.conversion.huggingface import open_huggingface
from megalite.inference.network import logits, make_network
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.resume import saved_fields
from tests.harness.gpt_trainer import gpt_trainer


def mesh_of(tp: int, pp: int) -> ParallelMesh:
    rank, world = 0, 1
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return ParallelMesh(rank=rank, world_size=world, tensor_parallel_size=tp, pipeline_parallel_size=pp)


def logits_of(folder: Path, tokens: Tensor, tp: int, pp: int) -> Tensor:
    """Return logits [batch, sequence, vocabulary] of tokens [batch, sequence]; each rank reads only its own shard."""
    mesh = mesh_of(tp, pp)
    opened = open_huggingface(folder)
    network = make_network(opened.config, mesh, torch.float32)
    load_weights(opened.source, opened.what, network.stage, None, mesh)
    return logits(network, tokens)


def train(arguments: Sequence[str], tp: int, pp: int, steps: int) -> list[float]:
    """Train as `pretrain_gpt.py` does for some steps, from the folder that --load converts to a checkpoint; return the
    losses."""
    mesh = mesh_of(tp, pp)
    layout = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    config = resolve(parse_arguments([*arguments, *layout], saved_fields).config, mesh.world_size)
    assert config.checkpoint.load is not None
    directory = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    trainer = gpt_trainer(config, open_data(config), mesh, directory)
    trainer.load_model(open_huggingface(Path(config.checkpoint.load)))
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(steps)]
    with Display(trainer.iterations, 1, start_iteration=0, enabled=False) as display:
        trainer.save(display, last=True)
    return losses


def batches(arguments: Sequence[str], batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and labels, both [batch, sequence], of each step of such a run."""
    config = resolve(parse_arguments(arguments, saved_fields).config, 1)
    samples = open_data(config).train
    steps = config.training.train_iters or 0
    return [
        tuple(  # type: ignore[misc]
            torch.stack([torch.as_tensor(samples[step * batch_size + row][field]) for row in range(batch_size)])
            for field in ("tokens", "labels")
        )
        for step in range(steps)
    ]
