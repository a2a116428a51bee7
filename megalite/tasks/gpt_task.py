"""The task of a run that pre-trains a GPT: the network of its configuration, the language-model loss and token data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megalite.config import RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchArrays, MicroBatchLoader
from megalite.data.sampler import Deal
from megalite.model.batch import MicroBatch
from megalite.model.head import LM_LOSS
from megalite.model.prediction import further_terms
from megalite.parallel import collectives, device
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks import summary
from megalite.tasks.adapters import check_names
from megalite.tasks.experts import expert_loads, node_notes, with_dispatcher
from megalite.tasks.flops import flops_per_token, peak_flops
from megalite.tasks.gpt_network import GPTNetworkTask
from megalite.training import builder
from megalite.training.batches import BUSIEST, to_micro_batches
from megalite.training.data import RunData, global_batch_size, order_notes, routing_records, seen_samples, vocab_size
from megalite.training.metrics import THROUGHPUT
from megalite.training.task import Figures, Summarized

if TYPE_CHECKING:
    from megalite.tasks.routing_recorder import RoutingRecorder


@dataclass
class _Loader:
    """Loader of a rank's micro-batches: those of `arrays`, cut for this rank, on the device."""

    arrays: MicroBatchLoader
    cut: Callable[[Iterable[MicroBatchArrays]], list[MicroBatch]]
    length: int | None = None

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[MicroBatch]:
        return self.cut(self.arrays.micro_batches(consumed_samples, deal))

    def __enter__(self) -> _Loader:
        self.arrays.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.arrays.__exit__(*error)


class GPTTask(GPTNetworkTask):
    """Pre-training of a GPT on this rank. Create it on all ranks together."""

    loss_name = LM_LOSS.name
    has_empty_slots = True

    def __init__(self, config: RunConfig, data: RunData, mesh: ParallelMesh) -> None:
        self.config, self.data, self.mesh = config, data, mesh
        self.dtype = builder.model_dtype(config)
        model = replace(config.model, vocab_size=vocab_size(data.tokenizer, config.model))
        self.model, self._dispatcher_notes = with_dispatcher(model, self.dtype, mesh)
        check_names(self.model, config.adapters)
        self.batch_size = global_batch_size(config)
        self.hidden_size = model.hidden_size
        self.has_validation, self.has_test = data.valid is not None, data.test is not None
        self.tokens_per_sample, self.sources = config.data.seq_length, data.sources
        self.cutting = builder.make_cutting(config, mesh)
        padded = self.model.padded_vocab_size(mesh.size("tp"))
        length, frozen = config.data.seq_length, not self.saves_frozen
        self._flops_per_token = flops_per_token(self.model, padded, length, frozen=frozen)
        self._peak_flops = peak_flops(device.device_name(mesh.device))
        self.evaluated = (LM_LOSS, *further_terms(self.model))
        self.chunks = []
        self._recorder: RoutingRecorder | None = None

    # ------------------------------------------------------------------------------------------------ the data

    def train_loader(self) -> _Loader:
        return replace(self._loader(self.data.train, replays=True), length=len(self.data.train))

    def evaluation_loader(self, *, test: bool) -> _Loader:
        dataset = self.data.test if test else self.data.valid
        assert dataset is not None
        return self._loader(dataset)

    def _loader(self, dataset: Dataset[SampleFields], *, replays: bool = False) -> _Loader:
        routing = self.data.routing if replays else None
        arrays = builder.make_loader(self.config, self.mesh, self.data, dataset, routing)

        def cut(fields: Iterable[MicroBatchArrays]) -> list[MicroBatch]:
            return to_micro_batches(fields, self.config.training.seed, self.dtype, self.mesh.device, self.cutting)

        return _Loader(arrays, cut)

    def begin_step(self, micro_batches: Sequence[MicroBatch], consumed_samples: int) -> Sequence[MicroBatch]:
        folder = self.config.training.moe_record_routing
        if folder is None:
            return micro_batches
        if self._recorder is None:
            from megalite.tasks.routing_recorder import RoutingRecorder

            sample_group = self.mesh.group(*self.chunks[0].context.sample_axes)
            self._recorder = RoutingRecorder(routing_records(self.config, folder), self.mesh, sample_group)
        return self._recorder.begin_step(micro_batches, is_first=consumed_samples == 0)

    def end_step(self, micro_batches: Sequence[MicroBatch], *, updated: bool) -> None:
        if self._recorder is not None:
            self._recorder.end_step(micro_batches)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        return asdict(replace(self.config, model=self.model))

    def remember(self, consumed_samples: int) -> list[tuple[int, int]]:
        return seen_samples(self.data.train, consumed_samples)

    def order_notes(self, remembered: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return order_notes(self.data.train, remembered)

    # ------------------------------------------------------------------------------------------------ reports

    def summary(self, trainer: Summarized) -> dict[str, object]:
        return summary.summary(trainer, self)

    def notes(self) -> tuple[str, ...]:
        experts = node_notes(self.mesh) if self.config.model.num_experts is not None else ()
        return (*self._dispatcher_notes, *experts, *self.finetune_notes)

    def throughput(self, batch_size: int, seconds: float) -> Figures:
        tokens_per_second = batch_size * self.config.data.seq_length / seconds
        per_device = tokens_per_second / self.mesh.world_size
        flops, peak = per_device * self._flops_per_token, self._peak_flops
        figures = tokens_per_second, per_device, flops / 1e12, None if peak is None else flops / peak
        return dict(zip(THROUGHPUT, figures, strict=True))

    def figures(self, micro_batches: Sequence[MicroBatch], *, updated: bool) -> dict[str, float]:
        figures = super().figures(micro_batches, updated=updated)
        if self.config.model.num_experts is not None and updated:
            figures |= expert_loads(self.chunks, len(self.config.model.all_layers), self.mesh)
        if self.cutting.ranks > 1 and self.cutting.layers:
            figures[BUSIEST] = self._busiest(micro_batches)
        return figures

    def _busiest(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the scores of the busiest context-parallel rank of each micro-batch, over a rank's on average."""
        own = torch.tensor(self.cutting.busiest(micro_batches), dtype=torch.float64, device=self.mesh.device)
        most, mean = collectives.all_reduce_(own, self.mesh.group("dp")).tolist()
        return float(most / mean)
