"""The trainer of a program of one's own: a run, from the start of its processes to its checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import RunConfig
from megalite.config.model import ModelConfig
from megalite.data.sample_source import SampleSource
from megalite.entry_points import entry_point
from megalite.errors import EXIT_FINISHED, EXIT_RESUMABLE, ConfigurationError, MegaliteError, exit_code_of
from megalite.extras.post_training.export import export_tensors
from megalite.extras.post_training.token_methods import TokenMethods
from megalite.extras.post_training.token_task import TokenTask
from megalite.library import arguments, configuration
from megalite.library.settings import Layout, Optimizer
from megalite.lifecycle.common_end import CommonEnd
from megalite.lifecycle.failure import report_uncaught, write_exit_code
from megalite.lifecycle.startup import Startup
from megalite.modules.records import decays as decays_by_shape
from megalite.modules.sequences import SequenceDims
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.process.ending import at_exit
from megalite.process.launchers import GENERATION
from megalite.process.output import write_out
from megalite.process.place import Place, place_from_environment
from megalite.run.evaluation import evaluate
from megalite.run.loop import TrainingLoop
from megalite.run.run import Run
from megalite.tasks.dataset_task import DatasetTask, check_alike
from megalite.tasks.loss_functions import Count, Function
from megalite.tasks.module_task import Build, Costs, ModuleOptions, ModuleTask
from megalite.training.display import Display
from megalite.training.gradients import Gradients
from megalite.training.metrics import StepMetrics
from megalite.training.several import SeveralTrainer
from megalite.training.task import Task
from megalite.training.trainer import ENDLESS
from megalite.watchdog.sections import EVALUATION


class Trainer(TokenMethods):
    """A run that trains a model: created alike on all ranks, by the program that a launcher starts on each.

    Creating it connects the ranks, and continues from the newest checkpoint in `save`.

    >>> model = torch.nn.Linear(2, 1)
    >>> dataset = [(torch.tensor([x, 1.0]), torch.tensor([2.0 * x + 1.0])) for x in (-1.0, 0.0, 1.0, 2.0)]
    >>> def loss(outputs, batch):
    ...     return torch.nn.functional.mse_loss(outputs, batch[1])
    >>> run = Trainer(model, loss=loss, dataset=dataset, optimizer=AdamW(lr=0.1), micro_batch_size=4, quiet=True)
    >>> run.train(steps=200)
    >>> run.last_record["loss"] < 0.01
    True
    >>> run.close()
    """

    def __init__(
        self,
        model: Build | ModelConfig | None = None,
        *,
        stages: Sequence[Build] | None = None,
        loss: Function | None = None,
        count: Count | None = None,
        dataset: Any = None,
        valid_dataset: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
        metrics: Mapping[str, Function] | None = None,
        sequence_dims: SequenceDims | None = None,
        terms: Sequence[LossTerm] = (),
        optimizer: Optimizer | Mapping[str, Optimizer],
        layout: Layout | None = None,
        precision: configuration.Precision = "fp32",
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
        seq_length: int | None = None,
        seed: int = 1234,
        save: str | Path | None = None,
        initial: Callable[[str, torch.Generator, tuple[int, ...]], Tensor] | None = None,
        decays: Callable[[str, Tensor], bool] = decays_by_shape,
        buffers: Mapping[str, Literal["keep", "average", "first rank"]] | None = None,
        recompute: bool | Sequence[str] = False,
        allow_unused: bool = False,
        messages: Sequence[Any] | None = None,
        costs: Costs = "counted",
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        """Start the run.

        Args:
            model: the model, built alike on every rank; or a function from a `ParallelContext` that builds it from
                parallel layers; or a `GPTConfig`.
            stages: in place of `model`, its stages or layers, in order. More than the layout has stages are divided by
                `costs`.
            loss: function from the last stage's outputs and a batch to a sum over the batch, or to several sums by
                name. Without `count`, it returns the mean over the batch's samples.
            count: function from a batch to the number of items that the mean is taken over, or numbers by name.
            dataset: map-style or iterable dataset, or a DataLoader.
            valid_dataset: data of evaluations.
            collate: makes a batch from a list of samples; None: torch's, or that of the DataLoader.
            shuffle: read each epoch in another order; None: as the DataLoader does, otherwise False.
            metrics: functions from outputs and a batch to a sum over samples, or to a sum and the number of its items,
                by name, for evaluations.
            sequence_dims: dimensions of the fields of a batch that are sequences, by their names or, in a tuple, their
                places. With `Layout(cp=...)`, the model, the loss and `count` get a rank's part of these fields.
            terms: terms of the loss that stages return themselves, in a `StageOutput`.
            optimizer: one for all parameters, or several: each by a pattern of names of parameters, or by the beginning
                of these names up to a dot. A term of the loss with such a name is of steps that update this optimizer.
            precision: dtype of weights and activations; with bf16 and fp16, the optimizer has fp32 masters.
            micro_batch_size: samples that a rank processes at once; None: the batch size of the DataLoader.
            global_batch_size: samples per step over all ranks; None: one micro-batch per data-parallel rank.
            seq_length: tokens per sample, for a GPT.
            save: the run directory, for checkpoints, records and control files; None: nothing is saved.
            initial: function from the name, a generator and the shape of a parameter to its initial values; None: the
                values that the model has. With it, the model may be on the meta device.
            decays: tells from the name and values of a parameter whether it has weight decay; by default, if it has two
                or more dimensions.
            buffers: how buffers stay the same on all ranks, by a pattern of their names: "keep" (they do by
                themselves), "average", or "first rank" (the default).
            recompute: True to recompute activations in backward, or patterns of names of submodules.
            allow_unused: let parameters that a step does not use have a gradient of zero, instead of an error.
            messages: tensors between stages, if they cannot be found by a run on the meta device.
            costs: costs of the layers by which they are divided: "counted", "measured", or numbers.
            quiet: print nothing.
            settings: any other field of a run's configuration (docs/flags.md), for example `save_interval=100`.

        Raises:
            ConfigurationError: settings do not fit together or do not fit the ranks.
            MegaliteError: the model or the data cannot be used as they are.
        """
        place = _place()
        if place.world_size > 1 or save is not None:
            report_uncaught()
        startup = Startup(place)
        workers = settings.pop("num_workers", None)

        def source(given: Any, shuffle: bool | None) -> SampleSource | None:
            if given is None:
                return None
            return SampleSource.of(given, seed=seed, shuffle=shuffle, collate=collate, num_workers=workers)

        train, valid = source(dataset, shuffle), source(valid_dataset, shuffle=False)
        micro = train.batch_size if micro_batch_size is None and train is not None else micro_batch_size
        if micro is None:
            raise ConfigurationError("give Trainer(micro_batch_size=...), the samples that a rank processes at once")
        sections = configuration.sections_of(
            optimizer,
            layout or Layout(),
            precision=precision,
            micro_batch_size=micro,
            global_batch_size=global_batch_size,
            seed=seed,
            save=save,
            world_size=place.world_size,
        )
        if (model is None) == (stages is None):
            raise ConfigurationError("give Trainer a model, or stages=[...] in place of it")
        options = ModuleOptions(
            stages=list(stages) if model is None else [model],  # type: ignore[arg-type, list-item]
            loss=loss,
            count=count,
            metrics=metrics or {},
            sequence_dims=sequence_dims or {},
            terms=terms,
            initial=initial,
            decays=decays,
            buffers=buffers or {},
            recompute=recompute,
            allow_unused=allow_unused,
            messages=messages,
            costs=costs,
            optimizers=configuration.several_optimizers(optimizer),
        )
        if isinstance(model, ModelConfig):
            sections |= configuration.sections_of_gpt(model, seq_length, options)
        elif seq_length is not None:
            raise ConfigurationError(f"seq_length={seq_length} is for a GPTConfig, not for modules")
        self.config = config = configuration.configured(
            sections,
            settings,
            valid,
            place.world_size,
            place.local_world_size,
            own=signature(Trainer).parameters,
            optimizers=options.optimizers,
        )
        if config.recovery.warm_restart and GENERATION not in os.environ:
            entry_point("run_program_warm")(config, place)
        startup.watch_stop_file(config.checkpoint.save)
        if not dist.is_initialized():
            startup.open_store()
        if isinstance(model, ModelConfig):
            assert isinstance(config, RunConfig)
            make_task: Callable[[ParallelMesh], Task] = partial(
                TokenTask, config, train=train, valid=valid, loss=loss, count=count
            )
        else:
            make_task = partial(ModuleTask, config, options=options, train=train, valid=valid)
        make_task = configuration.with_factors(make_task, optimizer)
        self._files = ExitStack()
        with arguments.errors_in_arguments(load=config.checkpoint.load, save=config.checkpoint.save):
            self._run = self._files.enter_context(Run(config, make_task, place, startup))
        assert self._run.trainer is not None  # without a length, no run has ended
        self._trainer, self._quiet, self._stopped, self._ended = self._run.trainer, quiet, False, False
        self._loop: TrainingLoop | None = None
        self._gradients: Gradients | None = None
        self._last_record: dict[str, Any] = {}
        self._loop_files = ExitStack()
        self._common_end = CommonEnd(self.mesh)
        self._earlier_error = getattr(sys, "last_value", None)  # a notebook goes on after an error
        at_exit(self._at_exit)

    # ------------------------------------------------------------------------------------------------ where it stands

    @property
    def rank(self) -> int:
        """Number of this rank among all."""
        return self._run.mesh.rank

    @property
    def mesh(self) -> ParallelMesh:
        """Place of this rank on the axes of the layout."""
        return self._run.mesh

    @property
    def iteration(self) -> int:
        """Number of steps since the start of the run, those before a resume included."""
        return self._trainer.iteration

    @property
    def last_record(self) -> dict[str, Any]:
        """Record of the last step, as in metrics.jsonl; empty before the first one."""
        metrics = None if self._loop is None else self._loop.metrics
        return self._last_record if metrics is None else metrics.record()

    # ------------------------------------------------------------------------------------------------ training

    def train(self, steps: int | None = None, *, epochs: float | None = None) -> None:
        """Train until the run has had this many steps, or whole steps of this many epochs, in all; then save.

        Raises SystemExit, with the code 85, if the run is asked to stop before: it is saved then, and the program
        continues it when it is started again.
        """
        loop = self._open(self._last(steps, epochs))
        while not loop.is_over:
            self._advance(None)
        self._finish()

    def batches(self, steps: int | None = None, *, epochs: float | None = None) -> Iterator[Sequence[Any]]:
        """Yield this rank's micro-batches of each step that is left, or without an end if no length is given.

        The program passes each to `step`. Raises MegaliteError if it does not.
        """
        loop = self._open(None if steps is epochs is None else self._last(steps, epochs))
        while not loop.is_over:
            iteration = self.iteration
            yield self._trainer.next_micro_batches()
            if self.iteration == iteration:
                raise MegaliteError("a batch of run.batches() was not trained on: call run.step(batch) for each")
        self._finish()

    def step(self, batch: Sequence[Any] | None = None, *, only: str | Collection[str] | None = None) -> dict[str, Any]:
        """Train on the micro-batches of `batches`, or on the next ones of the dataset. Returns the step's record.

        `only`: the names of the optimizers that the step updates; None: all.

        Raises MegaliteError if the batch is none of `batches`, or if the run has no such optimizer.
        """
        if batch is not None:
            configuration.check_numbered(batch)
        trainer = self._trainer
        if only is None:
            return self._run_step(lambda: trainer.step(batch))
        names = configuration.check_names_of_optimizers(self._run.task.optimizers, only)
        assert isinstance(trainer, SeveralTrainer)
        return self._run_step(lambda: trainer.step(batch, names))

    def export(self, to: Path | str) -> None:
        """Write the weights and buffers as safetensors under their own names, into a new folder; tied ones under each.

        No rank holds more than one tensor in addition to its own part. Called by all ranks together.
        """
        task = self._run.task
        export_tensors(self._trainer.optimizer, to, task.aliases if isinstance(task, ModuleTask) else {})

    def evaluate(self, dataset: Any = None) -> dict[str, float]:
        """Return the means of the loss and the metrics over `valid_dataset`, or over another dataset.

        Each sample counts once. They run in batches of `eval_global_batch_size`, by default a micro-batch per
        data-parallel rank, and the rest in smaller micro-batches. `eval_iters` limits the batches of `valid_dataset`.
        With `messages=[...]`, which have one size, the rest is left out.
        """
        task, trainer = self._run.task, self._trainer
        assert isinstance(task, DatasetTask)
        source, batches = task.valid, self.config.training.eval_iters
        if dataset is not None:
            seed, collate = self.config.training.seed, None if task.train is None else task.train.collate
            source = SampleSource.of(dataset, seed=seed, shuffle=False, collate=collate)
            for note in check_alike("the dataset of the evaluation", source, self.mesh):
                self._display().message(note)
            batches = configuration.evaluation_batches(source, trainer.evaluation_batch_size, batches)
        if source is None:
            raise ConfigurationError("there is nothing to evaluate: give Trainer(valid_dataset=...)")
        with trainer.sections(EVALUATION):
            means = evaluate(trainer, loader=task.loader(source), batches=batches)
        assert means is not None
        if empty := trainer.empty_terms.note():
            self._display().message(empty)
        return dict(means)

    def save(self) -> None:
        """Save a checkpoint now."""
        if self.config.checkpoint.save is None:
            raise ConfigurationError("there is no run directory: give Trainer(save=...)")
        self._open(None).save()

    # ------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """End the run: steps that no checkpoint has are saved, and the processes take leave of each other.

        It happens by itself when a program ends, except by an error.
        """
        self._ended = True
        if self._loop is not None:
            if self.config.checkpoint.save is not None and self._loop.saves[-1] < self.iteration:
                self._loop.save()
            self._close_loop()
        self._files.close()
        if self.rank == 0:
            write_exit_code(EXIT_RESUMABLE if self._stopped else EXIT_FINISHED)

    def _at_exit(self) -> None:
        """Close the run when the program ends without an error, and end with the exit code of a failure to do so."""
        if self._ended or getattr(sys, "last_value", None) is not self._earlier_error:  # the program ends by an error
            return
        try:
            if self._loop is not None and self.config.checkpoint.save is not None:
                self._common_end.require(self.iteration)
            self.close()
        except BaseException as error:  # Python would report it, and end as if nothing was wrong
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                write_out()
                os._exit(exit_code_of(error))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _last(self, steps: int | None, epochs: float | None) -> int:
        """Return the number of the last step."""
        if (steps is None) == (epochs is None):
            raise ConfigurationError("give the length of the training as steps=... or as epochs=...")
        if steps is not None:
            return steps
        task = self._run.task
        length = task.train.length if isinstance(task, DatasetTask) and task.train is not None else None
        if length is None or epochs is None:
            raise ConfigurationError("epochs=... needs a dataset with a length: give steps=... instead")
        return round(epochs * length) // task.batch_size.final

    def _open(self, last: int | None) -> TrainingLoop:
        """Return the loop; it goes on to the step `last`, or without an end."""
        if self._stopped:
            raise MegaliteError("the run was asked to stop, and has stopped")
        if last is not None or self._loop is None:
            self._trainer.iterations = ENDLESS if last is None else last
        if self._loop is None:
            display = self._display(None if last is None else max(last, 1))
            self._run.begin(self._loop_files.enter_context(display))
            self._loop = self._loop_files.enter_context(self._run.loop(self._trainer, display))
        return self._loop

    def _display(self, steps: int | None = None) -> Display:
        """Return the display of the loop or, without one, a new display of this many steps."""
        if self._loop is not None:
            return self._loop.display
        interval, enabled = self.config.logging.log_interval, self.rank == 0 and not self._quiet
        return Display(steps, interval, start_iteration=self.iteration, enabled=enabled)

    def _run_step(self, step: Callable[[], StepMetrics]) -> dict[str, Any]:
        """Run a step within the loop, and return its record."""
        self._open(None)
        self._advance(step)
        return self.last_record

    def _advance(self, step: Callable[[], StepMetrics] | None) -> None:
        assert self._loop is not None
        if self._loop.advance(step):
            return
        self._stopped = True
        self.close()
        raise SystemExit(EXIT_RESUMABLE)

    def _finish(self) -> None:
        """Finish the training to a given step."""
        assert self._loop is not None
        self._loop.finish()
        self._run.finish(self._loop.display, self.iteration)
        self._close_loop()

    def _close_loop(self) -> None:
        self._last_record, self._loop = self.last_record, None
        self._loop_files.pop_all().close()


def _place() -> Place:
    """Return this process's place: that in the process group which the program has, or else that of the launcher."""
    told = place_from_environment()
    if not dist.is_initialized():
        return told
    rank, size = dist.get_rank(), dist.get_world_size()
    if told.world_size == size:
        return replace(told, rank=rank)
    return Place(rank, torch.cuda.current_device() if torch.cuda.is_available() else 0, size)
