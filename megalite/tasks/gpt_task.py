"""The task of a run that pre-trains a GPT: the network of its configuration, the language-model loss and token data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megalite.config import RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchArrays, MicroBatchLoader
from megalite.data.mixed import Resumed
from megalite.data.sampler import Deal, Ranges, equal_deal, sample_at
from megalite.data.sources import Sources, told
from megalite.entry_points import entry_point
from megalite.errors import ConfigurationError, DataError
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS, bits_per_byte, loss_by_source
from megalite.model.prediction import further_terms
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives, device
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.tasks import summary
from megalite.tasks.adapters import adapter_products, check_names
from megalite.tasks.experts import expert_loads, node_notes, with_dispatcher
from megalite.tasks.flops import flops_per_token, peak_flops
from megalite.tasks.gpt_network import GPTNetworkTask
from megalite.training import builder
from megalite.training.batches import BUSIEST, to_micro_batches
from megalite.training.data import RunData, global_batch_size, order_notes, routing_records, seen_samples, vocab_size
from megalite.training.metrics import THROUGHPUT
from megalite.training.task import Figures, Loader, Summarized

if TYPE_CHECKING:
    from megalite.tasks.routing_recorder import RoutingRecorder


@dataclass
class TokenLoader:
    """Loader of a rank's micro-batches: those of `arrays`, cut for this rank, on the device."""

    arrays: MicroBatchLoader
    cut: Callable[[Iterable[MicroBatchArrays]], list[MicroBatch]]
    length: int | None = None
    terms: Sequence[LossTerm] = ()

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[MicroBatch]:
        return self.cut(self.arrays.micro_batches(consumed_samples, deal))

    def __enter__(self) -> TokenLoader:
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
        self.has_validation, self.has_test = data.has_validation, data.test is not None
        self.full_validation = config.training.full_validation
        self.tokens_per_sample, self.sources = config.data.seq_length, told(data.sources)
        self.cutting = builder.make_cutting(config, mesh)
        padded = self.model.padded_vocab_size(mesh.size("tp"))
        adapters = adapter_products(self.model, config.adapters)
        self._flops_per_token = flops_per_token(self.model, padded, config.data.seq_length, adapters=adapters)
        self._peak_flops = peak_flops(device.device_name(mesh.device))
        self.evaluated = (LM_LOSS, *further_terms(self.model))
        self.chunks = []
        self._recorder: RoutingRecorder | None = None
        self._teacher: Any = None

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
        chunks, settings = super().make_chunks(mesh, stages), self.config.distillation
        terms = (LM_LOSS,) if settings.distill_from is None else entry_point("distilled_terms")(settings)
        if self.sources is not None:
            terms = (*terms, loss_by_source(self.sources.names))
        for chunk in chunks:
            chunk.main_terms = terms
        return chunks

    def connect(self, engine: PipelineEngine[Any], optimizer: Optimizer, schedules: ProvedSchedules) -> None:
        super().connect(engine, optimizer, schedules)
        if self.config.distillation.distill_from is not None:
            self._teacher = entry_point("teacher")(self.config, self.chunks, engine, optimizer, schedules)

    # ------------------------------------------------------------------------------------------------ the data

    def train_loader(self) -> TokenLoader:
        train = self._loader(self.data.train, self.data.sources, trains=True)
        return replace(train, length=len(self.data.train))

    def evaluation_loader(self, *, test: bool) -> TokenLoader:
        dataset = self.data.test if test else self.data.valid
        assert dataset is not None
        sources = self.data.test_sources if test else self.data.valid_sources
        return self._loader(dataset, sources, whole=self.full_validation and not test)

    def evaluation_loaders(self, *, test: bool) -> Mapping[str, Loader[Any]]:
        if test or not self.data.valid_sets:
            return super().evaluation_loaders(test=test)
        sets = self.data.valid_sets.items()
        return {name: self._loader(dataset, None, whole=self.full_validation) for name, dataset in sets}

    def last_micro_batches(self, loader: Loader[Any], start: int) -> Iterator[tuple[Any, Stages, bool]]:
        assert loader.length is not None
        ranks, stages = self.mesh.size("dp"), self.stages()
        deal = equal_deal(self.mesh.coordinate("dp"), ranks, ranks)
        for first in range(start, loader.length, ranks * self.config.training.micro_batch_size):
            (micro_batch,) = loader.micro_batches(first, deal)
            yield micro_batch, stages, True  # what is behind the end is padding, which counts nowhere

    def _loader(
        self, dataset: Dataset[SampleFields], sources: Sources | None, *, trains: bool = False, whole: bool = False
    ) -> TokenLoader:
        """Return a loader, of training data or for evaluations.

        `whole`: all samples are asked for, the last ones in micro-batches that are filled up.
        """
        routing, seed = self.data.routing if trains else None, self.config.training.seed
        lengths = None if trains else self._byte_lengths
        shown = told(sources)
        arrays = builder.make_loader(self.config, self.mesh, self.data, dataset, routing, shown, lengths, fills=whole)
        names = () if shown is None else shown.names
        terms = [loss_by_source(names)] if names else []
        terms += [] if lengths is None else [bits_per_byte(names)]

        def cut(fields: Iterable[MicroBatchArrays]) -> list[MicroBatch]:
            return to_micro_batches(fields, seed, self.dtype, self.mesh.device, self.cutting, len(names))

        return TokenLoader(arrays, cut, len(dataset) if whole else None, terms)

    @cached_property
    def _byte_lengths(self) -> np.ndarray | None:
        """Bytes of the text of each token; None if the tokenizer does not tell them."""
        return self.data.tokenizer.byte_lengths()

    def begin_step(self, micro_batches: Sequence[MicroBatch], consumed_samples: int) -> Sequence[MicroBatch]:
        if self._teacher is not None:
            micro_batches = self._teacher.compared(micro_batches)
        return self._recorded(micro_batches, is_first=consumed_samples == 0)

    def _recorded(self, micro_batches: Sequence[MicroBatch], *, is_first: bool) -> Sequence[MicroBatch]:
        """Return micro-batches whose routing is recorded, if a folder is given for it."""
        folder = self.config.training.moe_record_routing
        if folder is None:
            return micro_batches
        if self._recorder is None:
            from megalite.tasks.routing_recorder import RoutingRecorder

            sample_group = self.mesh.group(*self.chunks[0].context.sample_axes)
            self._recorder = RoutingRecorder(routing_records(self.config, folder), self.mesh, sample_group)
        return self._recorder.begin_step(micro_batches, is_first=is_first)

    def end_step(self, micro_batches: Sequence[MicroBatch], *, updated: bool) -> None:
        if self._recorder is not None:
            self._recorder.end_step(micro_batches)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        mix = {} if self.data.mix is None else self.data.mix.saved()
        teacher = {} if self._teacher is None else self._teacher.saved()
        return asdict(replace(self.config, model=self.model)) | mix | teacher

    def resume_data(self, path: AnyPath, saved: Mapping[str, Any], consumed_samples: int, left_out: Ranges) -> Resumed:
        """Continue with the mix of the data, if there is one; see `Task.resume_data`."""
        if (mix := self.data.mix) is not None:
            resumed = mix.resume(path, saved, consumed_samples, left_out)
        elif "data_mix" in saved:
            raise ConfigurationError(
                f"{path} is of a run with --data-mix-schedule, whose sources would not go on where they are: "
                "give a schedule, also for a single phase, or begin with other data by --finetune"
            )
        else:
            resumed = super().resume_data(path, saved, consumed_samples, left_out)
        notes = () if self._teacher is None else self._teacher.change_notes(path, saved)
        if resumed.former_length not in (None, self.config.data.seq_length):
            notes = (*entry_point("unit_notes")(saved, self.config, resumed.former_length), *notes)
        return replace(resumed, notes=(*resumed.notes, *notes))

    def remember(self, consumed_samples: int) -> list[tuple[int, int]]:
        if self.data.mix is not None:
            return []  # its checkpoint has the checksums of the sources
        return seen_samples(self.data.train, consumed_samples)

    def order_notes(
        self, path: AnyPath, saved: Mapping[str, Any], position: int, remembered: Sequence[Sequence[int]]
    ) -> tuple[str, ...]:
        if self.data.mix is not None:
            return ()
        changes: tuple[str, ...] | None
        changes = entry_point("blend_change_notes")(path, saved, self.config, self.data, position, remembered)
        return order_notes(self.data.train, remembered) if changes is None else changes

    # ------------------------------------------------------------------------------------------------ reports

    def summary(self, trainer: Summarized) -> dict[str, object]:
        found = summary.summary(trainer, self)
        if self.data.mix is not None:
            found["data mix"] = self.data.mix.description(trainer.consumed_samples)
        if self._teacher is not None:
            found["teacher"], taken = self._teacher.summary(trainer.num_micro_batches(self.batch_size.final))
            self.counted_memory = (self.counted_memory or 0) + taken
        return found

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        experts = node_notes(self.mesh) if self.config.model.num_experts is not None else ()
        teacher = () if self._teacher is None else self._teacher.notes
        of_network = (*self.network_notes, *self.recipe_notes)
        return (*self._dispatcher_notes, *experts, *of_network, *self._mix_notes(trainer), *teacher)

    def _mix_notes(self, trainer: Summarized) -> tuple[str, ...]:
        """Return notes on what the sources of a mix lack until the end. Raises DataError if they end before."""
        if (mix := self.data.mix) is None:
            return ()
        if len(set(collectives.all_gather_json(mix.fingerprint(), self.mesh))) > 1:
            raise DataError(
                f"--data-mix-schedule {self.config.data.data_mix_schedule}: the ranks do not read the same file, or "
                "its sources are others on some: each node must see the same schedule and the same files"
            )
        left = (trainer.iterations - trainer.iteration) * self.batch_size.final
        end = self.config.training.train_samples or trainer.consumed_samples + left
        return mix.notes(sample_at(end - 1, trainer.left_out) + 1)

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
