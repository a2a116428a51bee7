"""Runs a split model forward on a rank, with given initial weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalite.inference.network import Network, logits, make_network, score_tokens
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
    """Of the same model, by logical name, as the oracle takes them."""
    stage = initialized_network(ParallelMesh(), cell).stage
    return {piece.tensor.name: piece.view(parameter).detach().clone() for parameter, piece in named_pieces(stage)}


def scored(cells: Sequence[Cell], tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits, log-probabilities and likeliest tokens by each cell's network."""
    meshes = make_meshes(cells)
    results = []
    for cell in cells:
        network = initialized_network(meshes[cell.tp, cell.pp], cell)
        scores = score_tokens(network, tokens)
        results.append((logits(network, tokens), scores.log_probabilities, scores.likeliest))
    return results
