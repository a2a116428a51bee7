"""The trainer of a run on this rank: training step, saving and loading."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from megalite import checkpoint
from megalite.checkpoint import Manifest, TrainingState
from megalite.checkpoint.fingerprint import BASE, fingerprint, has_places
from megalite.config.run import TaskConfig
from megalite.conversion.opened import OpenedModel
from megalite.data.mixed import Resumed
from megalite.data.sampler import Deal, Ranges, sample_at
from megalite.entry_points import entry_point
from megalite.errors import CheckpointError, ConfigurationError
from megalite.optim.host_memory import bytes_on_host
from megalite.optim.learning_rate import Rates, rate_notes, rate_schedules
from megalite.optim.optimizer import StepResult
from megalite.optim.statistics import zeros_in_gradients
from megalite.optim.synchronization import Synchronization
from megalite.parallel import device
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.stage import LossTerm, TermSums
from megalite.pipeline.engine import PipelineEngine, Recording, StepObserver
from megalite.pipeline.offloading import proved
from megalite.pipeline.point_to_point import make_links
from megalite.storage import AnyPath
from megalite.training import builder, loss_terms
from megalite.training.branch import Parent, in_words, parents_of, saved_parents
from megalite.training.checkpoints import Checkpoints
from megalite.training.data import last_iteration
from megalite.training.display import Display
from megalite.training.factors import SECTION as FACTORS
from megalite.training.factors import factor_notes, saved_factors
from megalite.training.gradients import Gradients, undone_by_error
from megalite.training.ledger import Decision, decision_so_far
from megalite.training.left_out import LEFT_OUT, left_out_of
from megalite.training.load_report import Loaded, expected_records, load_notes, rate_change, rounding_notes
from megalite.training.loss_terms import EmptyTerms, Totals
from megalite.training.metrics import StepMetrics
from megalite.training.nonfinite import LOCATED_SKIPS, is_finite_everywhere, locate
from megalite.training.profiling import begin_recording, missed_step_note, write_recording
from megalite.training.resume import ResumePoint, check_optimizers, check_schedule_unit
from megalite.training.task import ONLY, Task
from megalite.watchdog.sections import DATA, FORWARD_BACKWARD, OPTIMIZER, PROFILE, SAVE, SECOND_RUN, Sections

if TYPE_CHECKING:
    from megalite.training.alarms import Alarms

ENDLESS = 2**62
"""Number of steps of a run whose end its program decides."""


class Trainer:
    """Training state of this rank. The loop (loop.py) decides when to step, to evaluate and to save.

    The position in the data and the learning rate depend on `consumed_samples` alone, and on the samples left out.

    Attributes:
        left_out: samples that the run passes over, which are not consumed.
        parents: the checkpoints of other runs with which this one, and those that it is a branch of, began.
        decisions: those of the last step that depart from the plain rule, for the ledger; of all ranks, on rank 0.
    """

    decisions: Sequence[Decision] = ()

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        synchronization: Synchronization,
        directory: AnyPath | None = None,
        sections: Sections | None = None,
    ) -> None:
        mesh, replica = synchronization.mesh, synchronization.replica_mesh
        self.config, self.task, self.mesh, self.directory = config, task, mesh, directory
        self.sections = sections if sections is not None else Sections()
        device.make_deterministic(config.training.deterministic_mode)
        stages = task.stages()
        self.chunks = task.make_chunks(replica, stages)
        self.terms = loss_terms.declared_terms(self.chunks)
        self._forward_state = task.forward_state()
        self.optimizer = builder.make_optimizer(
            config,
            self.chunks,
            replica,
            stages,
            task.set_values,
            allow_unused=task.allow_unused,
            synchronization=synchronization,
            optimizers=task.optimizers,
        )
        self._bytes_on_host = bytes_on_host(self.optimizer)
        task.check(self.optimizer)
        links = make_links(mesh, stages)  # collective: all ranks of a pipeline connect to their neighbours here
        self.engine = PipelineEngine(self.chunks, stages, mesh.coordinate("pp"), links, mesh.device)
        self.engine.offloading = task.offloading
        if (rounding := builder.fixed_point(config)) is not None:
            self.engine.rounded = rounding.term
        self.schedules = builder.make_proved_schedules(config, replica, stages, self.chunks, self.optimizer, self.terms)
        self.shares = builder.make_shares(config, mesh)
        self.shares.require(task.has_empty_slots)
        micro_batches = self.prove_steps()
        if task.offloading is not None:
            for number in micro_batches:
                proved(self.schedules.training(number), task.offloading.layers, task.offloading.ends)
        task.connect(self.engine, self.optimizer, self.schedules)
        self.rates = rate_schedules(
            config.optimizer,
            config.training,
            hidden_size=task.hidden_size,
            global_batch_size=task.batch_size.final,
            factor=task.factors.get(ONLY),
        )
        self.iterations = last_iteration(config, task.batch_size)
        self.iteration = self.consumed_samples = self.skips_in_a_row = 0
        self.left_out: Ranges = ()
        self.parents: tuple[Parent, ...] = ()
        self.evaluation_left = False
        self.loaded = Loaded()
        self._base: dict[str, Any] = {}
        self.loss_scale = builder.make_loss_scale(config)
        self._skipped: Gradients | None = None  # of the last step, if its NaN or infinity is to be located
        self._time_line: Recording | None = None
        self.empty_terms = EmptyTerms()
        self.loader = task.train_loader()
        chunks_at = partial(task.make_chunks, stages=stages)
        self.plan = builder.make_plan(
            config,
            chunks_at,
            mesh,
            stages,
            synchronization,
            self.optimizer,
            task.optimizers,
            saves_frozen=task.saves_frozen,
        )
        self.checkpoints: Checkpoints | None = None
        if directory is not None:
            self.checkpoints = Checkpoints(config.checkpoint, directory, self.optimizer, self.plan)
        self.alarms: Alarms | None = entry_point("alarms")(self) if config.alarms.watches else None

    @property
    def network(self) -> nn.ModuleList:
        """The stages of this rank as one module."""
        return nn.ModuleList(self.chunks)

    @property
    def evaluation_batch_size(self) -> int:
        """Number of samples in a batch of an evaluation."""
        return self.config.training.evaluation_batch_size or self.task.batch_size.final

    # ------------------------------------------------------------------------------------------------ one step

    def step(self, micro_batches: Sequence[Any] | None = None) -> StepMetrics:
        """Run one optimizer step on one global batch. Called by all ranks together.

        `micro_batches`: those of this rank; None for the next ones of the training data.
        """
        return self.update(self.forward_backward(micro_batches))

    def forward_backward(
        self,
        micro_batches: Sequence[Any] | None = None,
        terms: Sequence[LossTerm] | None = None,
        multipliers: Callable[[Totals], Totals] = dict,
        observer: StepObserver | None = None,
    ) -> Gradients:
        """Compute the gradients of one global batch. `update` follows. Called by all ranks together.

        Args:
            terms: the terms of the loss; None for those of the network.
            multipliers: makes the multipliers of the engine from those of the terms.
            observer: is called for each action, in a step that is not profiled.
        """
        began, bytes_sent = time.perf_counter(), dict(self.mesh.traffic.by_axis)
        if micro_batches is None:
            micro_batches = self.next_micro_batches()
        batch_size = sum(len(each.sample_ids) for each in micro_batches) * self.mesh.size("dp")
        if not self.shares.are_equal:  # then micro-batches are those that the shares say
            batch_size = self.task.batch_size.at(self.consumed_samples)
        micro_batches = self.task.begin_step(micro_batches, self.consumed_samples)
        terms = self.terms if terms is None else terms
        counts, divisors = self._counts(terms, loss_terms.counted(terms, micro_batches, self.mesh.device))

        for chunk in self.chunks:
            chunk.train()
        loss_scale = self.loss_scale.value
        self.optimizer.begin_step(len(micro_batches), loss_scale)
        actions = self.schedules.training(len(micro_batches))
        scaled = multipliers(loss_terms.loss_multipliers(terms, divisors, loss_scale))
        records = self.iteration + 1 == self.config.profiling.profile_pipeline
        self._time_line = begin_recording(self.mesh) if records else None
        observer = self._time_line or observer or self.shares.observer
        before = None if self._forward_state is None else self._forward_state.copy()
        with undone_by_error(before), self.sections(FORWARD_BACKWARD):
            sums = self.engine.run(actions, micro_batches, scaled, self.optimizer, observer)
        return Gradients(
            began=began,
            bytes_sent=bytes_sent,
            batch_size=batch_size,
            micro_batches=micro_batches,
            actions=actions,
            terms=terms,
            counts=counts,
            multipliers=scaled,
            loss_scale=loss_scale,
            sums=sums,
            before=before,
        )

    def _counts(self, terms: Sequence[LossTerm], own: TermSums) -> tuple[Totals, Totals]:
        """Return the counts of the terms over the global batch, and those by which gradients are divided: the same.

        `own`: the counts on this rank.
        """
        counts = loss_terms.total_counts(terms, own, self.mesh)
        return counts, counts

    def update(self, gradients: Gradients, figures: Mapping[str, float] = MappingProxyType({})) -> StepMetrics:
        """Update the weights by the gradients of `forward_backward`. Called by all ranks together.

        `figures`: additional figures for the record.
        """
        loss_scale = gradients.loss_scale
        rates = self.rates.at(self.consumed_samples)
        with undone_by_error(gradients.before), self.sections(OPTIMIZER):
            self.return_unused_memory(1)
            judge = None if self.alarms is None else partial(self.alarms.judge, gradients)
            update = self.optimizer.step(rates, loss_scale, judge)
            self.return_unused_memory(2)
        gradients.undo_forward_if(update.skipped)
        micro_batches = gradients.micro_batches
        with self.sections(SAVE):
            self.task.end_step(micro_batches, updated=not update.skipped)
        totals = loss_terms.total_sums(gradients.terms, gradients.sums, self.mesh)
        losses = loss_terms.means(totals, gradients.counts)
        self.empty_terms.add(gradients.counts)
        overflow = update.skipped and not update.refused
        scale_is_adapting = (  # it is too large still, which is no divergence
            overflow and self.loss_scale.can_shrink and is_finite_everywhere(sum(losses.values()), self.mesh)
        )
        self.skips_in_a_row = self.skips_in_a_row + 1 if overflow and not scale_is_adapting else 0
        self.loss_scale = self.loss_scale.after(overflow=overflow)
        self.iteration += 1
        self._skipped = gradients if self.skips_in_a_row in LOCATED_SKIPS else None
        self.consumed_samples += gradients.batch_size
        seconds = time.perf_counter() - gradients.began
        figures = {**self.task.figures(micro_batches, updated=not update.skipped), **figures}
        name, batch_size = gradients.terms[0].name, gradients.batch_size
        sent = gradients.bytes_sent
        return self._metrics(name, losses, update, rates, loss_scale, batch_size, seconds, sent, figures)

    def unchanged(self) -> AbstractContextManager[None]:
        """Undo what a forward within the block changes in the network: it is not that of a step."""
        return nullcontext() if self._forward_state is None else self._forward_state.unchanged()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the network evaluate within the block. What its forward changes there is undone."""
        for chunk in self.chunks:
            chunk.eval()
        with self.unchanged():
            yield

    def next_micro_batches(self) -> Sequence[Any]:
        """Return this rank's micro-batches of the next step, from the training data."""
        deal = self.next_deal()
        with self.sections(DATA):
            return self.loader.micro_batches(self.consumed_samples, deal)

    def next_deal(self) -> Deal:
        """Return this rank's part of the next step."""
        deal = self.deal(self.task.batch_size.at(self.consumed_samples))
        return replace(deal, left_out=self.left_out) if self.left_out else deal

    def return_unused_memory(self, level: int) -> None:
        """Give cached memory of the device back, if the setting is at least this level."""
        if self.config.training.empty_unused_memory_level >= level:
            device.return_unused_memory(self.mesh.device)

    def locate_not_finite(self) -> str | None:
        """Return a report on the source of NaN or infinity in the last step, or None if no report is due.

        Called by all ranks together.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is None or self.config.training.rerun_mode == "disabled":
            return None
        with self.unchanged(), self.sections(SECOND_RUN):
            stages = self.schedules.stages
            return locate(skipped, self.iteration, self.chunks, self.engine, stages, self.optimizer, self.mesh)

    def draw_time_line(self) -> str | None:
        """Draw the time line of the last step if it was requested. Called by all ranks together.

        Returns a message on rank 0; None on other ranks, or if there is nothing to draw.
        """
        recording, self._time_line = self._time_line, None
        if recording is None or not isinstance(self.directory, Path):
            return None
        with self.sections(PROFILE):
            stages = self.schedules.stages
            return write_recording(recording, stages, self.mesh, self.directory, self.iteration, self.chunks)

    def deal(self, batch_size: int) -> Deal:
        """Return this rank's micro-batches of a step of `batch_size` samples.

        Raises:
            ConfigurationError: they cannot be dealt, as with an early size of a schedule on too many ranks.
        """
        micro_batch_size, shares = self.config.training.micro_batch_size, self.shares
        micro_batches, rest = divmod(batch_size, micro_batch_size)
        if rest or not shares.can_deal(micro_batches):
            raise ConfigurationError(
                f"--step-batch-size-schedule: the size {batch_size}, of the step at {self.consumed_samples} samples, "
                f"is not a multiple of --micro-batch-size {micro_batch_size} x {shares.unit}, with a micro-batch for "
                f"each of {shares.ranks} data-parallel ranks: begin with fewer ranks"
            )
        return shares.deal(micro_batches)

    def num_micro_batches(self, batch_size: int) -> int:
        """Return the number of micro-batches of this rank in a step of `batch_size` samples."""
        return self.deal(batch_size).slots

    def balance(self) -> Decision | None:
        """Take the shares that measured times ask for. Returns the decision if there are others.

        Called by all ranks together, between two steps, before a save.
        """
        why = self.shares.balance()
        if why is None:
            return None
        self.prove_steps()
        return Decision("shares", list(range(self.shares.ranks)), (), "trained", why)

    def prove_steps(self) -> Sequence[int]:
        """Prove the steps of all ranks. Returns the numbers of their micro-batches. Called by all ranks together."""
        micro_batch_size = self.config.training.micro_batch_size
        steps = [divmod(size, micro_batch_size) for size in self.task.batch_size.sizes]
        # A run that continues may be past sizes that are too small for its ranks.
        numbers = [number for number, rest in steps if not rest and self.shares.can_deal(number)]
        training = [slots for number in numbers for slots in self.shares.slots(number)]
        evaluation = self.shares.slots(self.evaluation_batch_size // micro_batch_size)
        self.schedules.prove(training=training, evaluation=evaluation, mesh=self.mesh)
        if not self.shares.are_equal:
            lists = {slots: self.schedules.training(slots) for slots in training}
            self.shares.check({n: [each.chunk for each in actions if each.kind == "R"] for n, actions in lists.items()})
        return training

    def evaluation_due(self, iteration: int) -> bool:
        """Tell if a validation is due after this step."""
        due = iteration % self.config.training.eval_interval == 0 or iteration == self.iterations
        return due and self.task.has_validation

    # ------------------------------------------------------------------------------------------------ save and load

    def save(self, display: Display, *, last: bool) -> None:
        """Save a checkpoint if the run has a directory. `last`: True if this is the last save of the run."""
        if self.checkpoints is None:
            return
        self.checkpoints.save(*self.progress(), display, last=last)

    def progress(self) -> tuple[TrainingState, dict[str, Any]]:
        """Return the progress and the configuration by section, for a checkpoint of what the optimizer holds now."""
        config = {**self.task.saved_config(self.consumed_samples), **saved_factors(self.task.factors, self.steps_of)}
        if self.alarms is not None:
            config |= self.alarms.saved()
        if not self.task.saves_frozen:
            config |= self._base_for_checkpoint()
        if self.left_out:
            config[LEFT_OUT] = {"ranges": self.left_out}
        return self._training_state(), {**config, **saved_parents(self.parents), **self.shares.saved()}

    def _training_state(self) -> TrainingState:
        """Return the progress of the run for a checkpoint."""
        loss_scale = self.loss_scale.state() if self.loss_scale.window is not None else None
        seen = self.task.remember(self.consumed_samples) if self.mesh.rank == 0 else None
        return TrainingState(
            self.iteration, self.consumed_samples, self.optimizer.steps, loss_scale, seen, self.evaluation_left
        )

    def steps_of(self, optimizer: str) -> int:
        """Return the number of steps that the schedule of an optimizer has had."""
        return self.consumed_samples // self.task.batch_size.final

    def save_seconds(self) -> float:
        """Return the duration of the longest save, an estimate before the first one; 0 if nothing is saved."""
        return 0.0 if self.checkpoints is None else self.checkpoints.seconds

    def load(self, path: AnyPath, described: Manifest, resume_point: ResumePoint) -> None:
        """Continue from a checkpoint of this model, which may have been written under any layout.

        Args:
            described: the checkpoint's manifest.
            resume_point: which parts of the checkpoint to restore.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged; another one may be loaded instead.
            CheckpointError: the checkpoint cannot be loaded.
            ConfigurationError: the run keeps a schedule that counts other steps.

        All errors are the same on every rank.
        """
        if resume_point.position:
            check_schedule_unit(path, described.config, self.config)
        with raise_on_all_ranks(self.mesh, f"loading {path}"):
            self.task.check_compatible(path, described)
            if resume_point.optimizer:
                check_optimizers(path, described, self.task.optimizers)
                self.task.check_trained(path, described)
            copied = resume_point.alone or resume_point.holders is not None  # with the frozen weights
            base = None if copied else self.task.open_base(path, described)
        if base is not None:
            self.load_model(base)
        state = checkpoint.load(
            path,
            self.network,
            self.optimizer,
            self.mesh,
            described=described,
            plan=None if copied else self.plan,
            state=resume_point.optimizer,
            casts=self.config.checkpoint.load_casts,
            optional=self.task.optional_tensors(path, described),
            alone=resume_point.alone,
            holders=resume_point.holders,
        )
        if not self.task.saves_frozen:
            self._know_base(path, described)
        self.task.loaded()
        notes = (
            self.loaded.notes
            + load_notes(
                described.config, self.config, state, position=resume_point.position, optimizer=resume_point.optimizer
            )
            + checkpoint.relayout_notes(described, self.network, self.optimizer, state=resume_point.optimizer)
        )
        records = None
        decisions = list[Decision]()
        if resume_point.optimizer and state.loss_scale is not None and self.loss_scale.window is not None:
            self.loss_scale = self.loss_scale.restored(state.loss_scale)
        if resume_point.position:
            proved_for = self.shares.saved()
            notes += factor_notes(described.config, self.task.factors) + self.shares.restore(described.config)
            if self.shares.saved() != proved_for:
                self.prove_steps()
            self.iteration, self.consumed_samples = state.iteration, state.consumed_samples
            self.left_out = left_out_of(path, described.config)
            resumed = self._resume_data(path, described.config)
            notes += resumed.notes
            self.parents = parents_of(path, described.config)
            if resume_point.branches:
                self.parents = (Parent.of(path, state), *self.parents)
                decisions.append(decision_so_far("branch", state.consumed_samples, in_words(self.parents)))
            if resumed.why is not None:
                decisions.append(decision_so_far("data", self.consumed_samples, resumed.why))
            if self.alarms is not None:
                self.alarms.restore(described.config)
            notes += self._optimizer_notes(path, described.config, state.consumed_samples)
            self.iterations = last_iteration(self.config, self.task.batch_size, self.iteration, self.consumed_samples)
            self.evaluation_left = state.evaluation_left and self.evaluation_due(self.iteration)
            if path.parent == self.directory:
                records = expected_records(self.config, described, has_validation=self.task.has_validation)
            if self.mesh.rank == 0:
                position = sample_at(self.consumed_samples - 1, self.left_out) + 1
                notes += self.task.order_notes(path, described.config, position, state.seen_samples or ())
        self.loaded = Loaded(notes, records, decisions)

    def _resume_data(self, path: AnyPath, saved: Mapping[str, Any]) -> Resumed:
        """Continue with the data behind those of a checkpoint, and take the numbers that its samples have here."""
        with raise_on_all_ranks(self.mesh, f"going on with the data of {path}"):
            resumed = self.task.resume_data(path, saved, self.consumed_samples, self.left_out)
        if resumed.consumed_samples != self.consumed_samples:  # those that were left out have passed
            self.consumed_samples, self.left_out = resumed.consumed_samples, ()
        return resumed

    def _optimizer_notes(self, path: AnyPath, saved: Mapping[str, Any], samples: int) -> tuple[str, ...]:
        """Return notes on what the optimizer continues with otherwise.

        `saved` and `samples` are the configuration of `path`, and the number of samples that it has consumed.
        """
        if ONLY in saved.get(FACTORS, {}):  # the run that saved it had a rate that its configuration does not say
            return ()
        here, width = self.rates.learning_rate, self.task.hidden_size
        return rate_change(path, saved, here, self.consumed_samples, samples, width)

    def load_model(self, opened: OpenedModel) -> None:
        """Start from the weights of a model that another program has written.

        Raises CheckpointError, the same on every rank, if the network differs or the model cannot be read.
        """
        with raise_on_all_ranks(self.mesh, f"loading {opened.what}"):
            fresh = self.task.check_weights(opened)
        checkpoint.load_weights(opened.source, opened.what, self.network, self.optimizer, self.mesh, fresh)
        self.loaded = Loaded((*opened.notes, *rounding_notes(opened, builder.model_dtype(self.config))))
        self._base = {"path": opened.path}

    def _know_base(self, path: AnyPath, described: Manifest) -> None:
        """Raise CheckpointError if the frozen weights are not those of the run that saved a checkpoint."""
        theirs = described.config.get(BASE, {})
        places = has_places(theirs.get("fingerprint"))
        ours = fingerprint(self.optimizer, self.mesh, places=places)
        if theirs.get("fingerprint") != ours:
            raise CheckpointError(
                f"{path} has adapters of other weights than {self._base.get('path') or 'the seed'} gives now in this "
                "precision: give the precision and the base of its run"
            )
        self._base = {"path": theirs.get("path"), **self._base, **({"fingerprint": ours} if places else {})}

    def _base_for_checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint says of frozen weights that it does not have. Called by all ranks together."""
        if "fingerprint" not in self._base:
            self._base = {**self._base, "fingerprint": fingerprint(self.optimizer, self.mesh)}
        return {BASE: self._base}

    # ------------------------------------------------------------------------------------------------ metrics

    def where(self) -> tuple[int, int, int | None]:
        """Return the number of steps, samples and tokens since the start of the run."""
        tokens = self.task.tokens_per_sample
        return self.iteration, self.consumed_samples, None if tokens is None else self.consumed_samples * tokens

    def _metrics(
        self,
        name: str,
        losses: Totals,
        update: StepResult,
        rates: Rates,
        loss_scale: float,
        batch_size: int,
        seconds: float,
        sent_before: Mapping[str, int],
        figures: Mapping[str, float],
    ) -> StepMetrics:
        """Return the record of a step.

        Args:
            losses: the means of all terms.
            name: the first of the terms.
            sent_before: the bytes that this rank had sent before the step, by axis.
        """
        sent = {}
        for axis, total in self.mesh.traffic.by_axis.items():
            sent[f"bytes_sent/{axis}"] = total - sent_before.get(axis, 0)
        others = {term: mean for term, mean in losses.items() if term != name}
        return StepMetrics(
            *self.where(),
            losses={name: losses[name]},
            grad_norm=update.gradient_norm,
            learning_rate=rates.learning_rate,
            loss_scale=loss_scale,
            skipped=update.skipped,
            iteration_time_s=seconds,
            throughput=self.task.throughput(batch_size, seconds),
            peak_memory_bytes=device.peak_memory_bytes(self.mesh.device),
            bytes_sent=sum(sent.values()),
            extra={**sent, **self._statistics(others, update, rates), **figures},
        )

    def _statistics(self, others: Totals, update: StepResult, rates: Rates) -> dict[str, float]:
        """Return additional figures for the record: the other loss terms, and values that flags enable or vary."""
        figures, activations = dict(others), self.task.offloading
        if on_host := self._bytes_on_host + (0 if activations is None else activations.host_bytes):
            figures["host_memory_bytes"] = on_host
        if self.config.optimizer.decoupled_lr is not None:
            figures["decoupled_learning_rate"] = rates.token_table_learning_rate
        if self.config.optimizer.weight_decay_incr_style != "constant":
            figures["weight_decay"] = rates.weight_decay
        if self.config.logging.log_params_norm:
            parameter_norms = self.optimizer.parameter_norms()
            figures["params_norm"] = math.hypot(*parameter_norms.values())
            figures |= {f"params_norm/{group}": norm for group, norm in parameter_norms.items()}
            figures |= {f"grad_norm/{group}": norm for group, norm in update.gradient_norms.items()}
        if self.config.logging.log_num_zeros_in_grad:
            figures["num_zeros_in_grad"] = zeros_in_gradients(self.optimizer.updated, self.optimizer.mesh)
        return figures

    def summary(self) -> Mapping[str, object]:
        """Return names and values for the display. Called by all ranks together."""
        return self.task.summary(self)

    def notes(self) -> tuple[str, ...]:
        """Return messages about the effective settings and the loaded checkpoint. Called by all ranks together."""
        profile = missed_step_note(self.config.profiling.profile_pipeline, self.iteration)
        rates = rate_notes(self.config.optimizer, self.rates, self.task.batch_size.final)
        most = max(self.shares.slots(max(self.task.batch_size.sizes) // self.config.training.micro_batch_size))
        sums = builder.gradient_notes(self.config, most)
        saves = self.checkpoints.notes if self.checkpoints is not None else ()
        return (*rates, *sums, *self.loaded.notes, *saves, *profile, *self.task.notes(self))
