"""Sizes of a run, from its configuration and its model on the meta device, beside what a script's own numbers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megalite.config import ModelConfig, RunConfig, resolve
from megalite.parallel.mesh import ParallelMesh
from megalite.training.builder import count_parameters, make_chunks, make_stages
from megalite.training.data import known_vocabulary


def sizes(config: RunConfig, started: int | None) -> Iterator[str]:
    """Yield lines with the sizes of a run.

    Args:
        config: the configuration as the flags give it.
        started: the number of ranks that a script starts; None if it does not say.

    Raises:
        ConfigurationError: the run cannot be on these ranks.
    """
    least = config.parallel.ranks_needed
    fits = started is not None and started % least == 0
    world_size = started if fits and started is not None else least
    config = resolve(config, world_size)
    model, training, parallel = config.model, config.training, config.parallel
    copies, length = parallel.data_parallel_size(world_size), config.data.seq_length
    vocabulary, source = known_vocabulary(config)
    model = replace(model, vocab_size=vocabulary)
    yield f"model: {_count(config, model):,} parameters, with {vocabulary:,} tokens ({source})"
    heads = f"{model.num_attention_heads} heads of {model.score_width}"
    yield f"network: {model.num_layers} layers; hidden {model.hidden_size} for {heads}"
    if started is None:
        yield f"ranks: {least} or a multiple, as the layout needs; the file does not say how many"
    elif fits:
        yield f"ranks: {started}, as the file says; the layout needs {least} or a multiple"
    else:
        yield f"ranks: the file starts {started}, but the layout needs {least} or a multiple; the rest is for {least}"
    held = [_held(config, model, world_size, stage) for stage in range(parallel.pipeline_model_parallel_size)]
    most = f" to {max(held):,}" if max(held) > min(held) else ""
    yield f"parameters per rank: {min(held):,}{most}, of {parallel.layout(world_size)}"
    batch = training.global_batch_size or 0
    steps = batch // (training.micro_batch_size * copies)
    yield f"global batch: {batch:,} = micro-batch {training.micro_batch_size} x {steps} x {copies} data-parallel ranks"
    yield f"tokens per step: {batch * length:,}"
    if training.train_iters or training.train_samples:
        samples = training.train_samples or batch * (training.train_iters or 0)
        yield f"training: {samples:,} samples, {samples * length:,} tokens, {-(-samples // batch):,} steps"


def _count(config: RunConfig, model: ModelConfig) -> int:
    """Return the number of parameters of the model, whatever the layout."""
    alone = replace(config, parallel=type(config.parallel)())
    mesh = ParallelMesh(device=torch.device("meta"))
    return count_parameters(make_chunks(alone, model, mesh, make_stages(alone)), mesh)


def _held(config: RunConfig, model: ModelConfig, world_size: int, stage: int) -> int:
    """Return the number of parameters that the first rank of a pipeline stage holds, before any sharding of ZeRO."""
    ranks = world_size // config.parallel.pipeline_model_parallel_size
    mesh = ParallelMesh(world_size=world_size, **config.parallel.mesh_sizes).at(stage * ranks)
    chunks = make_chunks(config, model, mesh, make_stages(config))
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
