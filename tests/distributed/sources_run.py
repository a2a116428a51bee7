"""Loss by source on a rank: a step and an evaluation of a cell of the layout matrix, of data with sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchLoader
from megalite.data.loss_weights import WeightedDataset
from megalite.data.sampler import Ranges
from megalite.model.batch import MicroBatch
from megalite.model.head import LM_LOSS, bits_per_byte, loss_by_source
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.training import loss_terms
from megalite.training.batches import Cutting, to_micro_batches
from tests.distributed.layout_cell import VOCABULARIES, Cell, batch, head_ranks, model_config, rates
from tests.distributed.layout_run import (
    SEED,
    Training,
    initialized_chunks,
    make_meshes,
    micro_batches_of,
    shares_of,
)

NAMES = ("web", "code", "math", "books", "none")
SOURCES = (0, 1, 2, 3, 1, 2, 1, 1)
"""Source of each sample. The loss masks of random cells leave nothing of samples 0 and 3, and so of two sources."""
WEIGHTS = (1.0, 0.3, 2.5, 0.7, 1.0)


def bytes_of_tokens(cell: Cell) -> np.ndarray:
    """Return made-up bytes of the text of each token, [tokens]; some have none."""
    return np.arange(VOCABULARIES[cell.vocabulary][0]) * 3 % 5


@dataclass(frozen=True)
class Rows:
    """Dataset of the samples of a cell's first step, and their sources."""

    cell: Cell
    names: Sequence[str] = NAMES

    def __len__(self) -> int:
        return self.cell.samples

    def __getitem__(self, sample: int) -> SampleFields:
        whole = batch(self.cell, 0)
        return SampleFields(
            tokens=whole.tokens[sample].numpy(),
            labels=whole.labels[sample].numpy(),
            loss_mask=whole.loss_mask[sample].numpy(),
            positions=whole.positions[sample].numpy(),
            document_ids=None if whole.document_ids is None else whole.document_ids[sample].numpy(),
            padding=None if whole.padding is None else whole.padding[sample].numpy(),
        )

    def of(self, sample: int) -> int:
        return SOURCES[sample]

    def after(self, consumed_samples: int, left_out: Ranges = ()) -> dict[str, float]:
        raise AssertionError("nobody asks here")


@dataclass(frozen=True)
class Recorded:
    """Sums and counts of the terms, over all ranks, and the gradient's norm of a step."""

    sums: dict[str, float]
    counts: dict[str, float]
    norm: float


def run_with_sources(cells: Sequence[Cell]) -> list[tuple[Recorded, Recorded]]:
    """Run a step with weights of tokens, and an evaluation without, of each cell."""
    meshes = make_meshes(cells)
    return [_run(meshes[cell.split], cell) for cell in cells]


def _run(mesh: ParallelMesh, cell: Cell) -> tuple[Recorded, Recorded]:
    chunks = initialized_chunks(mesh, cell)
    for chunk in chunks:
        chunk.main_terms = (LM_LOSS, loss_by_source(NAMES))
    training = Training(mesh, cell, chunks)
    rows = Rows(cell)
    trained = _micro_batches(mesh, cell, WeightedDataset(rows, np.array(WEIGHTS), rows), None)
    evaluated = _micro_batches(mesh, cell, rows, bytes_of_tokens(cell))
    slots = shares_of(cell, mesh.coordinate("dp")).slots(micro_batches_of(cell))
    training.schedules.prove(evaluation=slots, mesh=mesh)
    training.network.eval()
    terms = (LM_LOSS, loss_by_source(NAMES), bits_per_byte(NAMES))
    with torch.no_grad():
        sums = training.engine.run(training.schedules.evaluation(len(evaluated)), evaluated)
    of_evaluation = _recorded(mesh, terms, sums, evaluated, 0.0)

    training.network.train()
    counts = loss_terms.total_counts(training.terms, loss_terms.counted(training.terms, trained, mesh.device), mesh)
    training.optimizer.begin_step(len(trained))
    multipliers = loss_terms.loss_multipliers(training.terms, counts, 1.0)
    actions = training.schedules.training(len(trained))
    sums = training.engine.run(actions, trained, multipliers, training.optimizer)
    norm = training.optimizer.step(rates(cell, 0)).gradient_norm
    return _recorded(mesh, training.terms, sums, trained, norm), of_evaluation


def _recorded(
    mesh: ParallelMesh,
    terms: Sequence[LossTerm],
    sums: dict[str, torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    norm: float,
) -> Recorded:
    counts = loss_terms.total_counts(terms, loss_terms.counted(terms, micro_batches, mesh.device), mesh)
    return Recorded(dict(loss_terms.total_sums(terms, sums, mesh)), dict(counts), norm)


def _micro_batches(
    mesh: ParallelMesh, cell: Cell, samples: Dataset[SampleFields], byte_lengths: np.ndarray | None
) -> list[MicroBatch]:
    """Return this rank's micro-batches of the step, as a run reads and cuts them."""
    loader = MicroBatchLoader(
        samples,
        micro_batch_size=cell.micro_batch_size,
        vocab_size=VOCABULARIES[cell.vocabulary][0],
        sources=Rows(cell),
        byte_lengths=byte_lengths,
    )
    attention = [layer for layer in model_config(cell).passed_layers if layer.mixer is not None]
    layers = Counter((layer.keys_before, head_ranks(vars(cell))) for layer in attention)
    cutting = Cutting(cell.cp, mesh.coordinate("cp"), cell.chunks, layers, cell.depths)
    deal = shares_of(cell, mesh.coordinate("dp")).deal(micro_batches_of(cell))
    arrays = loader.micro_batches(0, deal)
    return to_micro_batches(arrays, SEED, cell.torch_dtype, mesh.device, cutting, len(NAMES))
