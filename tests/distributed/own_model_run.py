"""Runs of cells of own_model.py on a rank: by megalite, and by torch's own ways of training on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megalite
from megalite.errors import MegaliteError
from megalite.optim.buckets import ParameterBucket
from tests.distributed.layout_run import Held, held, held_states, whole_gradients
from tests.distributed.own_model import (
    EVALUATED,
    LENGTH,
    MODELS,
    STEPS,
    TRAINED,
    VOCABULARY,
    Cell,
    Model,
    Samples,
    Sums,
    Values,
    built,
    micro_batches,
    optimizer_of,
    total,
)
from tests.harness.unsharded import unsharded_parameters


@dataclass(frozen=True)
class OfRank:
    """Result of a run on one rank."""

    losses: list[dict[str, float]]
    norms: list[float]
    gradients: list[Held]
    parameters: list[Held]
    buffers: list[Held]


def run_cells(cells: Sequence[Cell]) -> list[OfRank]:
    return [run_cell(cell) for cell in cells]


def run_cell(cell: Cell, steps: int = STEPS, **options: Any) -> OfRank:
    run = cell.trainer(**options)
    trainer = run._trainer
    names = [term.name for term in trainer.terms]
    losses, norms, gradients = [], [], list[Held]()
    while run.iteration < steps:
        record = run.step()
        losses.append({name: record[name] for name in names})
        norms.append(record["grad_norm"])
        if run.iteration == 1:
            gradients = whole_gradients(trainer.network, run.mesh, trainer.optimizer.buckets)
    with unsharded_parameters(trainer.optimizer):
        parameters = held(trainer.network, run.mesh, lambda parameter: parameter)
    buffers = held_states(trainer.network, run.mesh)
    run.close()
    return OfRank(losses, norms, gradients, parameters, buffers)


class _Network(nn.Module):
    """Layers of a model as one module, whose forward returns the sums of the loss."""

    def __init__(self, model: Model, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self._model, self.layers = model, nn.ModuleList(layers)

    def forward(self, values: Values) -> Sums:
        return self._model.sums(list(self.layers), values)


def by_torch(cell: Cell, steps: int = STEPS) -> list[dict[str, float]]:
    """Train by DDP or, under ZeRO 3, by fully_shard; returns the means of the terms of the loss."""
    model, layers = MODELS[cell.model], built(cell.model)
    network = _Network(model, layers)
    if cell.zero == 3:
        ranks = (cell.instances, cell.dp // cell.instances)
        mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("replicas", "shards"))
        mesh = mesh if cell.instances > 1 else mesh["shards"]
        for layer in layers if cell.model in ("conv", "vit") else ():
            if any(p.requires_grad for p in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        wrapped: Any = fully_shard(network, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(network)
    optimizer, losses = optimizer_of(cell, [p for p in wrapped.parameters() if p.requires_grad]), []
    for step in range(steps):
        optimizer.zero_grad()
        every = list(micro_batches(cell, step))
        counts, sums = (
            total([model.counts(values) for _, values in every]),
            dict.fromkeys(model.counts(every[0][1]), 0.0),
        )
        own = [values for rank, values in every if rank == dist.get_rank()]
        for number, values in enumerate(own):
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = number == len(own) - 1
            found = wrapped(values)
            (model.loss(found, counts) * cell.dp).backward()  # torch averages gradients over ranks
            sums = {name: sums[name] + each.item() for name, each in found.items()}
        if cell.clip:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), cell.clip)
        optimizer.step()
        whole = torch.tensor(list(sums.values()), dtype=torch.float64)
        dist.all_reduce(whole)
        losses.append({name: each / counts[name] for name, each in zip(sums, whole.tolist(), strict=True)})
    return losses


def frozen_bytes(cell: Cell) -> tuple[int, int, float, int]:
    """Return the bytes of frozen parameters on this rank: of all, of its slices, and those that are gathered, the most
    during a step and an evaluation, in multiples of the largest block, and afterwards.
    """
    run = cell.trainer(valid_dataset=EVALUATED)
    buckets = run._trainer.optimizer.frozen
    gather, whole = ParameterBucket.begin_parameter_gather, list[int]()

    def watched(bucket: ParameterBucket) -> None:
        gather(bucket)
        whole.append(sum(each.parameters.untyped_storage().size() for each in buckets))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterBucket, "begin_parameter_gather", watched)
        run.step()
        after_step = sum(each.parameters.untyped_storage().size() for each in buckets)
        run.evaluate()
    afterwards = after_step + sum(each.parameters.untyped_storage().size() for each in buckets)
    own = sum(each.parameter_shard.untyped_storage().size() for each in buckets)
    run.close()
    every = sum(slot.parameter.nbytes for each in buckets for slot in each.slots)
    return every, own, max(whole) / max(each.parameters.nbytes for each in buckets), afterwards


@dataclass(frozen=True)
class Part:
    """Part of a run that was saved and continued: where it began and ended, on one rank."""

    began: list[Held]
    ended: list[Held]
    """Parameters and buffers."""
    losses: list[dict[str, float]]


def part_of_run(cell: Cell, steps: int, **options: Any) -> Part:
    """Train up to a step of the run, save, and end."""
    run = cell.trainer(**options)
    trainer, losses = run._trainer, list[dict[str, float]]()

    def tensors() -> list[Held]:
        with unsharded_parameters(trainer.optimizer):
            parameters = held(trainer.network, run.mesh, lambda parameter: parameter)
        return parameters + held_states(trainer.network, run.mesh)

    began = tensors()
    for batch in run.batches(steps=steps):
        record = run.step(batch)
        losses.append({term.name: record[term.name] for term in trainer.terms})
    ended = tensors()
    run.close()
    return Part(began, ended, losses)


def evaluated(cell: Cell, **options: Any) -> dict[str, float]:
    run = cell.trainer(**options)
    run.step()
    found = run.evaluate()
    run.close()
    return found


def evaluated_over(cell: Cell, sizes: Sequence[int], **options: Any) -> list[dict[str, float]]:
    """Evaluate the weights of the start over datasets of these sizes: over the first one as the run's own."""
    own, *others = (Samples(size, first=1000) for size in sizes)
    run = cell.trainer(valid_dataset=own, **options)
    found = [run.evaluate(), *map(run.evaluate, others)]
    run.step()
    run.close()
    return found


def evaluated_gpt(micro_batch_size: int, **layout: Any) -> dict[str, float]:
    """Evaluate a GPT over eleven samples."""
    config = megalite.GPTConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH
    )
    with megalite.Trainer(
        config,
        seq_length=LENGTH,
        micro_batch_size=micro_batch_size,
        optimizer=megalite.AdamW(lr=0.0),
        layout=megalite.Layout(**layout),
        precision="fp64",
        quiet=True,
        watchdog=False,
    ) as run:
        return run.evaluate([{"tokens": sample["tokens"]} for sample in map(TRAINED.__getitem__, range(11))])


def message_of(cell: Cell, *, other: int | None = None, raises: bool = False, **options: Any) -> str:
    """Return the message of the error that a run ends with, on this rank.

    Args:
        other: a rank whose buffers differ.
        raises: raise the error, since other ranks do not meet it and wait for this one.
    """
    if other == dist.get_rank():
        cell = replace(cell, spoiled=True)
    try:
        with cell.trainer(**options) as run:
            run.step()
            return ""
    except MegaliteError as error:
        if raises:
            raise
        return str(error)
