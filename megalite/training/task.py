"""The interface of a task: the network, loss and data of a run. Everything else of a run is the same for all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from megalite.checkpoint import Manifest
from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import TaskConfig
from megalite.conversion.opened import OpenedModel
from megalite.data.mixed import Resumed
from megalite.data.sampler import Deal, GlobalBatchSize, Ranges, Shares
from megalite.data.sources import Sources
from megalite.errors import ConfigurationError, MegaliteError
from megalite.modules.forward_state import ForwardState
from megalite.offload.activations import ActivationOffload
from megalite.optim.learning_rate import Factor
from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.stage import LossTerm
from megalite.parallel.stage_module import StageModule
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.training.resume import ResumePoint
from megalite.watchdog.sections import Sections

MicroBatch = TypeVar("MicroBatch", covariant=True)
Figures = Mapping[str, float | None]
ONLY = "optimizer"
"""Name that stands for the single optimizer of a run."""


class Loader(AbstractContextManager[Any], Protocol[MicroBatch]):
    """Loader of this rank's micro-batches. Its threads or processes end with the context."""

    length: int | None
    """Number of samples; None: it has as many as are asked for."""
    terms: Sequence[LossTerm]
    """Terms that an evaluation of these data computes in addition to those of the task."""

    def micro_batches(self, consumed_samples: int, deal: Deal) -> Sequence[MicroBatch]:
        """Return the micro-batches of the step that starts at global sample `consumed_samples`, on the device."""


class Summarized(Protocol):
    """Parts of a trainer that a summary and notes describe."""

    config: TaskConfig
    task: Task
    mesh: ParallelMesh
    directory: AnyPath | None
    chunks: Sequence[StageModule]
    optimizer: Optimizer
    engine: PipelineEngine[Any]
    schedules: ProvedSchedules
    sections: Sections
    shares: Shares
    iterations: int
    iteration: int
    consumed_samples: int
    left_out: Ranges

    def num_micro_batches(self, batch_size: int) -> int:
        """Return the number of micro-batches per rank in a step of `batch_size` samples."""

    def unchanged(self) -> AbstractContextManager[None]:
        """Undo what a forward within the block changes in the network."""


class Task(ABC):
    """Network, loss and data of a run.

    Attributes:
        loss_name: name of the term that records and the screen show as the loss.
        evaluated: terms whose means an evaluation computes; `loss_name` is the name of one of them.
        metrics: names of further means of an evaluation. Their counts are sums of the last stage (`items_of`).
        batch_size: number of samples in a step.
        hidden_size: width of the network, for the learning rate noam.
        has_validation: True if the task has data for evaluations between steps.
        has_test: True if it has data for an evaluation after the last step.
        full_validation: an evaluation between steps reads all samples of its data, which have an end.
        tokens_per_sample: None if samples do not consist of tokens.
        has_perplexity: the loss of tokens is a mean over them.
        optimizers: hyperparameters by the name of the optimizer, if there are several. Each parameter's record has the
            name of its own.
        factors: factors of learning rates that a program gives as functions, by the name of the optimizer; `ONLY` is
            that of a single one.
        offloading: copies what the layers of this rank save for backward to the host; None: it stays.
        has_empty_slots: micro-batches can be empty: all their tokens are padding, which counts nowhere.
        allow_unused: parameters that a step does not use have a gradient of zero, instead of an error; None: no setting
            allows them.
        saves_frozen: False if frozen weights are those of a base, which checkpoints name instead of saving it.
        sources: sources of the samples of training; None: they have one, or none is told.
        counted_memory: bytes that this rank keeps on its device, as `summary` has counted them; None before.
    """

    loss_name: str
    evaluated: Sequence[LossTerm]
    metrics: Sequence[str] = ()
    batch_size: GlobalBatchSize
    hidden_size: int = 1
    has_validation: bool = False
    has_test: bool = False
    full_validation: bool = False
    tokens_per_sample: int | None = None
    has_perplexity: bool = True
    optimizers: Mapping[str, OptimizerConfig] = MappingProxyType({})
    factors: Mapping[str, Factor] = MappingProxyType({})
    offloading: ActivationOffload | None = None
    allow_unused: bool | None = None
    has_empty_slots: bool = False
    saves_frozen: bool = True
    sources: Sources | None = None
    counted_memory: int | None = None

    # ------------------------------------------------------------------------------------------------ the network

    @abstractmethod
    def stages(self) -> Stages:
        """Return the placement of the stages on pipeline ranks, with the tensors that stages send to each other."""

    @abstractmethod
    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> Sequence[StageModule]:
        """Return the stages of a rank: of this one, or of another, by a mesh on the meta device."""

    @property
    @abstractmethod
    def set_values(self) -> Callable[[Parameter], None] | None:
        """A function that sets the initial values of a parameter; None if parameters have them already."""

    def check(self, optimizer: Optimizer) -> None:
        """Raise MegaliteError if the buckets of the optimizer do not fit the network. Called by all ranks together."""
        return

    def connect(self, engine: PipelineEngine[Any], optimizer: Optimizer, schedules: ProvedSchedules) -> None:
        """Make what the task runs beside the network, with the parts of its trainer. Called by all ranks together."""
        return

    def forward_state(self) -> ForwardState | None:
        """Return what forward may change beside gradients on this rank; None if it can change nothing.

        Called once, after `make_chunks`.
        """
        return None

    # ------------------------------------------------------------------------------------------------ the data

    def updating(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Leave out the terms of the loss of all but these optimizers within the block, if there are several."""
        return nullcontext()

    def terms_of_step(self, names: Collection[str], terms: Sequence[LossTerm]) -> list[LossTerm]:
        """Return the terms that a step which updates these optimizers differentiates, if there are several.

        Raises MegaliteError if there are none.
        """
        found = [term for term in terms if self.has_term(names, term.name)]
        if not found:
            raise MegaliteError(f"a step that updates only {', '.join(names)} has no term of the loss")
        return found

    def has_term(self, names: Collection[str], term: str) -> bool:
        """Tell whether a step that updates these optimizers has a term of the loss: its name is not of another one."""
        return term in names or term not in self.optimizers

    @abstractmethod
    def train_loader(self) -> Loader[Any]:
        """Return the loader of the training data."""

    @abstractmethod
    def evaluation_loader(self, *, test: bool) -> Loader[Any]:
        """Return a loader of the validation data or of the test data, if they are one set."""

    def evaluation_loaders(self, *, test: bool) -> Mapping[str, Loader[Any]]:
        """Return loaders of the sets of the validation data or of the test data, by name; a single one has no name."""
        return {"": self.evaluation_loader(test=test)}

    def begin(self, trainer: Summarized) -> None:
        """Prepare what steps need beside the network's values, in sections of its own. All ranks call it together."""
        return

    def begin_step(self, micro_batches: Sequence[Any], consumed_samples: int) -> Sequence[Any]:
        """Return the micro-batches of the step that begins. Called by all ranks together."""
        return micro_batches

    def end_step(self, micro_batches: Sequence[Any], *, updated: bool) -> None:
        """Finish a step after its update. Called by all ranks together. `updated`: False if the step was skipped."""
        return

    def last_micro_batches(self, loader: Loader[Any], start: int) -> Iterator[tuple[Any, Stages, bool]]:
        """Yield this rank's micro-batches of the samples that do not fill a batch of an evaluation, from `start` on.

        All ranks get as many. Each comes with the stages, whose messages have its size, and with False if its samples
        are repeated ones, which do not count.
        """
        return iter(())

    # ------------------------------------------------------------------------------------------------ checkpoints

    def start(self, found: ResumePoint) -> ResumePoint:
        """Return where the run starts, if `found` is what the flags name. Raises CheckpointError."""
        return found

    def open_base(self, path: AnyPath, described: Manifest) -> OpenedModel | None:
        """Open the weights that the checkpoint at `path` names instead of having them; None if it names none."""
        return None

    @abstractmethod
    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        """Return the configuration of the run, by section, for checkpoints."""

    def remember(self, consumed_samples: int) -> Any:
        """Return what a checkpoint keeps of the consumed samples, as JSON. Called on rank 0."""
        return None

    def order_notes(self, path: AnyPath, saved: Mapping[str, Any], position: int, remembered: Any) -> tuple[str, ...]:
        """Return notes on samples that are not those which a checkpoint remembers. Called on rank 0.

        Args:
            path: the checkpoint.
            saved: its configuration.
            position: number of samples that its run had passed.
            remembered: what `remember` has returned there.
        """
        return ()

    def resume_data(self, path: AnyPath, saved: Mapping[str, Any], consumed_samples: int, left_out: Ranges) -> Resumed:
        """Continue with the data behind those of a checkpoint.

        Args:
            path: the checkpoint, for messages.
            saved: its configuration.
            consumed_samples: samples that its run had consumed.
            left_out: samples that the run passes over.

        Raises MegaliteError, the same on every rank, if the run cannot go on with its data.
        """
        return Resumed(consumed_samples)

    def loaded(self) -> None:
        """Take over the state that a checkpoint has set."""
        return

    @abstractmethod
    def check_compatible(self, path: AnyPath, described: Manifest) -> None:
        """Raise CheckpointError if a checkpoint's network does not compute the function of this one."""

    def check_trained(self, path: AnyPath, described: Manifest) -> None:
        """Raise CheckpointError if the run that saved a checkpoint has not trained the same weights as this one.

        It is called if the optimizer's state is loaded, which frozen weights do not have.
        """
        return

    def optional_tensors(self, path: AnyPath, described: Manifest) -> set[str]:
        """Return the names of tensors that a checkpoint may lack, or may have in addition."""
        return set()

    def open_weights(self, path: AnyPath) -> OpenedModel:
        """Open the weights of a model of another program.

        Raises CheckpointError if they cannot be read, ConfigurationError if the task reads none.
        """
        raise ConfigurationError(f"{path} has the weights of a GPT, and this run does not train one")

    def check_weights(self, opened: OpenedModel) -> set[str]:
        """Return the names of tensors that the model may lack. Raises CheckpointError if it is another network."""
        raise ConfigurationError(f"{opened.what} is a GPT, and this run does not train one")

    # ------------------------------------------------------------------------------------------------ reports

    @abstractmethod
    def summary(self, trainer: Summarized) -> Mapping[str, object]:
        """Return names and values to show before the first step. Called by all ranks together."""

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        """Return messages to show before the first step. Called by all ranks together."""
        return ()

    @abstractmethod
    def throughput(self, batch_size: int, seconds: float) -> Figures:
        """Return figures of a step's speed for its record."""

    def figures(self, micro_batches: Sequence[Any], *, updated: bool) -> dict[str, float]:
        """Return additional figures of a step for its record. Called by all ranks together."""
        return {}
