"""Forward runs of a split model on a rank, with given initial weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.inference import generation
from megalite.inference.generation import generate, next_token_logits
from megalite.inference.loading import load_network, open_model
from megalite.inference.network import Network, logits, make_network, score_tokens
from megalite.inference.sampling import Sampling
from megalite.model.cache import StageCache
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import SEED, make_meshes, perturb_constants


def initialized_network(mesh: ParallelMesh, cell: Cell) -> Network:
    network = make_network(model_config(cell), mesh, cell.torch_dtype)
    initialize(network.stage, SEED)
    perturb_constants(network.stage)
    return network


def whole_weights(cell: Cell) -> dict[str, Tensor]:
    """Return the unsplit weights of the same model by logical name, as the oracle takes them."""
    return _whole_weights(cell.alone())


@functools.cache
def _whole_weights(cell: Cell) -> dict[str, Tensor]:
    stage = initialized_network(ParallelMesh(), cell).stage
    return {piece.tensor.name: piece.view(parameter).detach().clone() for parameter, piece in named_pieces(stage)}


def scored(cells: Sequence[Cell], tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return logits, log-probabilities and most likely tokens from each cell's network."""
    meshes = make_meshes(cells)
    results = []
    for cell in cells:
        network = initialized_network(meshes[cell.split], cell)
        scores = score_tokens(network, tokens)
        results.append((logits(network, tokens), scores.log_probabilities, scores.likeliest))
    return results


def cached(cells: Sequence[Cell], rows: Sequence[Sequence[int]], chunk: int) -> list[list[list[Tensor]]]:
    """Return, per cell and row, the logits of its tokens with a key-value cache.

    The prompts of the batch (the first half of each row) are read at once, the rest token by token. A row leaves the
    batch at its end. `chunk`: tokens of a prompt that are read at once.
    """
    meshes = make_meshes(cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_CHUNK", chunk)
        return [_cached(initialized_network(meshes[cell.split], cell), rows) for cell in cells]


def _cached(network: Network, rows: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[] for _ in rows]
    cache = StageCache(max(map(len, rows)))
    batch, read = list(range(len(rows))), [0] * len(rows)
    while batch:
        to_read = [rows[row][read[row] : read[row] + 1 if read[row] else len(rows[row]) // 2] for row in batch]
        logits = next_token_logits(network, to_read, [read[row] for row in batch], cache)
        shape = (len(batch), network.vocab_size)
        logits = network.share(torch.zeros(shape, dtype=network.stage.dtype) if logits is None else logits)
        for row, tokens, values in zip(batch, to_read, logits, strict=True):
            read[row] += len(tokens)
            found[row].append(values)
        going = [number for number, row in enumerate(batch) if read[row] < len(rows[row])]
        cache.keep(going)
        batch = [batch[number] for number in going]
    return found


def generated(cells: Sequence[Cell], prompts: Sequence[Sequence[int]], batch_size: int, **rest: Any) -> list[list[Any]]:
    """Return the events of each cell's generation."""
    meshes = make_meshes(cells)
    return [
        list(generate(initialized_network(meshes[cell.split], cell), prompts, batch_size=batch_size, **rest))
        for cell in cells
    ]


def order_of_work(cell: Cell, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the order of a rank's work while it generates two tokens: "run" its stage, or "share" the chosen
    tokens."""
    order: list[str] = []
    network = initialized_network(make_meshes([cell])[cell.split], cell)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "share"):
            patch.setattr(network, name, _noting(order, name, getattr(network, name)))
        for _ in generate(network, prompts, max_new_tokens=2, ends=(), sampling=Sampling(temperature=0.0)):
            pass
    return order


def _noting(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        order.append(name)
        return function(*arguments)

    return noted


def generated_by_huggingface_folders(
    folders: Sequence[Path], prompts: Sequence[Sequence[int]], tp: int, pp: int, **rest: Any
) -> list[list[Any]]:
    """Return the events of the generation by each folder's model."""
    cell = Cell(tp=tp, pp=pp, etp=tp)
    mesh = make_meshes([cell])[cell.split]
    return [list(generate(load_network(open_model(folder), mesh), prompts, **rest)) for folder in folders]
