"""Parts that tasks with a dataset of one's own share: loaders, the position in the data, and reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import Manifest
from megalite.config.run import TaskConfig
from megalite.data.any_dataset import AnyDatasetLoader, Batch, check, checksum_of_start
from megalite.data.sample_source import SampleSource
from megalite.data.sampler import Deal, GlobalBatchSize, equal_deal
from megalite.errors import CheckpointError, ConfigurationError
from megalite.modules.forward_state import ForwardState
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.device import moved
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.nested import map_tensors
from megalite.parallel.stage import LossTerm
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.tasks import summary
from megalite.training import builder
from megalite.training.task import Figures, Loader, Summarized, Task


@dataclass
class _Loader:
    """Loader of a rank's micro-batches, made of the samples of `batches`."""

    batches: AnyDatasetLoader
    to_micro_batch: Callable[[Batch], Any]
    length: int | None = None
    terms: Sequence[LossTerm] = ()

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[Any]:
        return [self.to_micro_batch(each) for each in self.batches.micro_batches(consumed_samples, deal)]

    def __enter__(self) -> _Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.batches.close()


class DatasetTask(Task):
    """Task on datasets of one's own: `train`, and `valid` for evaluations."""

    any_size: bool = True
    """Stages can run micro-batches of any size, so that an evaluation has every sample."""

    def __init__(
        self, config: TaskConfig, mesh: ParallelMesh, train: SampleSource | None, valid: SampleSource | None
    ) -> None:
        assert config.training.global_batch_size is not None
        given = (("dataset", train), ("valid_dataset", valid))
        self._data_differ = [note for name, source in given for note in check_alike(name, source, mesh)]
        self.config, self.mesh, self.train, self.valid = config, mesh, train, valid
        self.dtype = builder.model_dtype(config)
        self.batch_size = GlobalBatchSize(config.training.global_batch_size)
        self.has_validation = valid is not None
        self._train_loader: AnyDatasetLoader | None = None
        self._data_notes: tuple[str, ...] = ()

    @abstractmethod
    def to_micro_batch(self, batch: Batch) -> Any:
        """Return a micro-batch on the device, from collated samples."""

    @abstractmethod
    def stages_for(self, micro_batch: Any) -> Stages:
        """Return the stages, with messages for the size of a micro-batch."""

    @abstractmethod
    def model_section(self) -> dict[str, Any]:
        """Return the description of the network that checkpoints keep."""

    def on_device(self, values: Any) -> Any:
        """Move the tensors of collated samples to the device. Floating-point ones get no narrower than the model's."""

        def copied(tensor: Tensor) -> Tensor:
            wide = torch.promote_types(tensor.dtype, self.dtype) if tensor.is_floating_point() else tensor.dtype
            return moved(tensor, self.mesh.device).to(wide)

        return map_tensors(copied, values)

    def forward_state(self) -> ForwardState:
        return ForwardState()  # a loss of one's own may draw random numbers

    def _loader_of(self, source: SampleSource) -> AnyDatasetLoader:
        return AnyDatasetLoader(source, micro_batch_size=self.config.training.micro_batch_size)

    def _turn(self) -> Deal:
        """Return this rank's part of one micro-batch for each rank."""
        ranks = self.mesh.size("dp")
        return equal_deal(self.mesh.coordinate("dp"), ranks, ranks)

    def first_micro_batch(self) -> Any:
        """Return this rank's micro-batch of the dataset's first samples; None without a dataset."""
        if self.train is None:
            return None
        with self._loader_of(self.train) as loader:
            (batch,) = loader.micro_batches(0, self._turn())
        return self.to_micro_batch(batch)

    def train_loader(self) -> _Loader:
        if self.train is None:
            return _Loader(_NoData(), self.to_micro_batch)
        self._train_loader = self._loader_of(self.train)
        return _Loader(self._train_loader, self.to_micro_batch)

    def evaluation_loader(self, *, test: bool) -> _Loader:
        assert self.valid is not None
        return self.loader(self.valid)

    def loader(self, source: SampleSource) -> _Loader:
        """Return a loader of this rank's part of a dataset, for an evaluation."""
        return _Loader(self._loader_of(source), self.to_micro_batch, self._evaluable(source))

    def _evaluable(self, source: SampleSource) -> int | None:
        """Return how many samples of a dataset an evaluation has at most. Raises ConfigurationError if it has none."""
        batch_size = self.config.training.evaluation_batch_size
        if self.any_size or source.length is None or batch_size is None:
            return source.length
        if source.length < batch_size:
            raise ConfigurationError(
                f"the dataset of evaluations has {source.length} samples, fewer than one batch of all ranks, "
                f"{batch_size}, which is the only size that messages=[...] declares: give more samples, or leave "
                "messages out"
            )
        return source.length - source.length % batch_size

    def last_micro_batches(self, loader: Loader[Any], start: int) -> Iterator[tuple[Any, Stages, bool]]:
        assert isinstance(loader, _Loader)
        assert loader.length is not None
        ranks, rank = self.mesh.size("dp"), self.mesh.coordinate("dp")
        while start < loader.length:
            size = min(self.config.training.micro_batch_size, max(1, (loader.length - start) // ranks))
            loader.batches.resize(size)
            (micro_batch,) = loader.micro_batches(start, self._turn())
            yield micro_batch, self.stages_for(micro_batch), start + rank * size < loader.length
            start += size * ranks

    # ------------------------------------------------------------------------------------------------ checkpoints

    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        data = {} if self._train_loader is None else self._train_loader.remember(consumed_samples)
        return {**asdict(self.config), "model": self.model_section(), "data": data}

    def check_compatible(self, path: AnyPath, described: Manifest) -> None:
        saved, own = described.config.get("model", {}), self.model_section()
        if (theirs := saved.get("kind")) != own["kind"]:
            raise CheckpointError(f"{path} is of {theirs or 'a GPT'}, and this run trains {own['kind']}")
        if self.train is not None:
            self._data_notes = check(self.train, described.config.get("data", {}))

    # ------------------------------------------------------------------------------------------------ reports

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        sources = [source for source in (self.train, self.valid) if source is not None]
        of_sources = dict.fromkeys(note for source in sources for note in source.notes)
        return (*of_sources, *self._data_differ, *self._left_out(), *self._data_notes)

    def _left_out(self) -> tuple[str, ...]:
        """Return a note if evaluations leave out samples that do not fill a batch of all ranks."""
        if self.valid is None or (evaluable := self._evaluable(self.valid)) == self.valid.length:
            return ()
        return (
            f"note: evaluations use the first {evaluable} of {self.valid.length} samples, which fill batches of all "
            "ranks: messages=[...] declares no other size",
        )

    def throughput(self, batch_size: int, seconds: float) -> Figures:
        per_second = batch_size / seconds
        return {
            "samples_per_second": per_second,
            "samples_per_second_per_device": per_second / self.mesh.world_size,
        }

    def lines(self, trainer: Summarized, micro_batch: Any) -> dict[str, object]:
        """Return the lines of the summary on the layout and the memory, measured by a forward on a micro-batch."""
        return {
            "layout": summary.layout_line(trainer),
            "precision": self.config.training.dtype,
            **summary.common_lines(trainer, summary.measured_by(trainer, micro_batch)),
        }


class _NoData(AnyDatasetLoader):
    def __init__(self) -> None:
        pass

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[Batch]:
        raise ConfigurationError("this run has no dataset: give Trainer(dataset=...), or batches to its methods")

    def close(self) -> None:
        pass


def check_alike(name: str, source: SampleSource | None, mesh: ParallelMesh) -> tuple[str, ...]:
    """Compare the datasets of all ranks. Called by all ranks together.

    Returns a note if the first sample is not the same on all of them.

    Raises:
        ConfigurationError: they differ in kind or length, or ranks that have parts of the same samples have others.
    """
    own = None if source is None else [source.is_stream, source.length]
    for rank, other in enumerate(found := all_gather_json(own, mesh)):
        if other != found[0]:
            lengths = [None if each is None else each[1] for each in (found[0], other)]
            raise ConfigurationError(
                f"{name} has {lengths[0]} samples on rank 0 and {lengths[1]} on rank {rank}: give all ranks the whole "
                "dataset, from which each takes its samples"
            )
    if source is None or mesh.world_size == 1:
        return ()
    checksum = checksum_of_start(source)
    starts = all_gather_json((mesh.coordinate("dp"), checksum), mesh)
    wrong = [rank for rank, start in enumerate(starts) if start[1] != starts[0][1]]
    if not wrong:
        return ()
    told = f"the first sample of {name} is another on rank {wrong[0]} than on rank 0"
    if len({dp for dp, _ in starts}) != len({(dp, start) for dp, start in starts}):
        raise ConfigurationError(
            f"{told}, and ranks of a pipeline, or of tensor or context parallelism, need the same samples: seed what "
            "makes the dataset alike on all ranks, and give each the whole of it"
        )
    return (
        f"note: {told}. If ranks have parts of it, samples are lost: give each the whole dataset, which megalite "
        "shares out. A dataset with random numbers of a generator of its own causes this note too",
    )
