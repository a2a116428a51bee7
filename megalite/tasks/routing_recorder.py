"""Recorder of routing: after a step, the experts that each token chose are written to files, one per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.data.routing_records import RoutingRecords
from megalite.errors import ConfigurationError
from megalite.model.batch import MicroBatch
from megalite.parallel import collectives
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import Group, ParallelMesh


class RoutingRecorder:
    """Writer of the records of a run. All ranks call its methods together."""

    def __init__(self, records: RoutingRecords, mesh: ParallelMesh, sample_group: Group) -> None:
        """Create the recorder. `sample_group`: the ranks that share the tokens of a sample."""
        self.records, self.mesh, self.sample_group = records, mesh, sample_group

    def begin_step(self, micro_batches: Sequence[MicroBatch], *, is_first: bool) -> list[MicroBatch]:
        """Return the micro-batches with a place for the choices of their tokens.

        Raises:
            ConfigurationError: this is the first step of a run, and the folder has records of another run.
            CheckpointError: a disk fails.
        """
        if is_first:
            self._claim_folder()
        return [replace(micro_batch, choices={}) for micro_batch in micro_batches]

    def _claim_folder(self) -> None:
        if not all(collectives.all_gather_json(self.records.may_be_written, self.mesh)):
            raise ConfigurationError(
                f"--moe-record-routing {self.records.folder} has records of another run: give another folder"
            )
        with raise_on_all_ranks(self.mesh, f"recording routing in {self.records.folder}"):
            if self.mesh.rank == 0:
                self.records.write_run()

    def end_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Write the choices that the routers left in these micro-batches. Raises CheckpointError if a disk fails."""
        samples = [sample for micro_batch in micro_batches for sample in micro_batch.key.samples]
        tokens = micro_batches[0].layout.length // self.sample_group.size
        shape = (tokens, len(samples), sum(self.records.layers), self.records.topk)
        choices = torch.full(shape, -1, dtype=torch.int32, device=self.mesh.device)
        first = 0
        for micro_batch in micro_batches:
            assert micro_batch.choices is not None
            for layer, chosen in micro_batch.choices.items():
                choices[:, first : first + chosen.shape[1], layer] = chosen
            first += len(micro_batch.key.samples)
        choices = collectives.all_reduce_(choices, self.mesh.group("pp"), "max")  # each stage has its own layers
        choices = _in_order(collectives.all_gather(choices, self.sample_group), micro_batches)
        with raise_on_all_ranks(self.mesh, f"recording routing in {self.records.folder}"):
            if self.sample_group.rank == self.mesh.coordinate("pp") == 0:
                self.records.folder.mkdir(parents=True, exist_ok=True)
                for column, sample in enumerate(samples):
                    self.records.write(sample, choices[:, column].cpu().numpy())


def _in_order(choices: Tensor, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Put choices [length, samples, ...], gathered in rank order, into the order of each sample."""
    first, in_order = 0, []
    for micro_batch in micro_batches:
        layout, size = micro_batch.layout, len(micro_batch.key.samples)
        gathered = choices[:, first : first + size]
        if len(layout.of_ranks) > 1:
            gathered = torch.empty_like(gathered).index_copy_(0, layout.gathered_places(choices.device), gathered)
        in_order.append(gathered)
        first += size
    return torch.cat(in_order, dim=1)
