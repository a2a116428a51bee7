"""The training loop: steps, with evaluations and saves between them, until the run ends or is requested to stop."""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from megalite.errors import EXIT_FINISHED, EXIT_RESUMABLE, MegaliteError
from megalite.lifecycle.control_files import ControlFiles
from megalite.lifecycle.deadline import Pace, why_stop
from megalite.lifecycle.startup import Startup
from megalite.parallel.collectives import on_any_rank
from megalite.process.signals import StopRequest
from megalite.run.evaluation import evaluate
from megalite.run.records import Records
from megalite.run.timing import Timing, gather_timing
from megalite.training.display import Display, perplexity
from megalite.training.ledger import Decision
from megalite.training.loss_terms import Totals
from megalite.training.metrics import SampleMetrics, StepMetrics, TestMetrics, ValidationMetrics
from megalite.training.nonfinite import MAX_CONSECUTIVE_SKIPS
from megalite.training.profiling import Profiler
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import AGREEMENT, EVALUATION, SAVE, START, STEP

if TYPE_CHECKING:
    from megalite.run.copies import Copies
    from megalite.run.corruption import Watch
    from megalite.run.monitor import Monitor


class TextSampler(Protocol):
    """Writer of texts with the network that is trained."""

    def texts(self) -> Sequence[str]:
        """Return what it writes now, the same on all ranks. Called by all ranks together."""


@dataclass(frozen=True)
class _Agreed:
    """Decisions that all ranks share after a step. A field is True if it is True on any rank."""

    stop: bool
    """Stop after this step."""
    save: bool
    """Save after this step."""
    profile: bool
    """Profile the next steps."""
    saving: bool
    """A checkpoint is still being written in the background."""
    save_failed: bool
    """Writing a checkpoint has failed."""
    copying: bool = False
    """A copy in memory is under way."""


class TrainingLoop:
    """The loop from the trainer's first step to its last. All ranks run it in lockstep."""

    def __init__(self, trainer: Trainer, display: Display, startup: Startup) -> None:
        self.trainer, self.display = trainer, display
        self.config, self.mesh, self.sections = trainer.config, trainer.mesh, trainer.sections
        self.control_files = ControlFiles(trainer.directory, trainer.mesh)
        self.startup = startup
        self._timed = trainer.iteration
        self.records = Records(trainer, display.message)
        self._stop, self._why = StopRequest(), ""
        self._pace = Pace()
        self.copies: Copies | None = None
        self.watch: Watch | None = None
        self.sampler: TextSampler | None = None
        self.monitors: Sequence[Monitor] = ()
        self.around: Callable[[Callable[[], StepMetrics]], StepMetrics] = operator.call
        """Runs a step: as it is, or with a record of it."""
        self._stack = ExitStack()
        self.saves = [trainer.iteration]
        """Steps that checkpoints of this trajectory have, or are to have: where it began, and where it was saved."""
        self._start_seconds = 0.0
        self.metrics: StepMetrics | None = None
        """Record of the last step."""
        self._profiler = Profiler(self.config, self.mesh, display, self.sections, trainer.iteration)

    def run(self) -> int:
        """Train until the run ends or is asked to stop. Returns the exit code of the program."""
        with self:
            while not self.is_over:
                if not self.advance():
                    return EXIT_RESUMABLE
            self.finish()
        return EXIT_FINISHED

    def advance(self, step: Callable[[], StepMetrics] | None = None) -> bool:
        """Run a step, then an evaluation and a save if they are due. Called by all ranks together.

        Args:
            step: runs the step; None for `Trainer.step`.

        Returns:
            False if the run was asked to stop: it is saved then, and no more steps may follow.
        """
        trainer = self.trainer
        if not trainer.evaluation_left:
            self._step(step or trainer.step)
            if trainer.alarms is not None and trainer.alarms.after_step(self, may_go_back=step is None):
                return True
        if trainer.evaluation_due(trainer.iteration):
            self._validate()
        agreed = self._agree()
        self._continue_save(agreed)
        if agreed.profile:
            self._profiler.ask(trainer.iteration)
        if agreed.stop and trainer.iteration < trainer.iterations:
            self._end_early()
            return False
        last = trainer.iteration == trainer.iterations
        if last or agreed.save or self._every(self.config.checkpoint.save_interval):
            self._save(last=last)
        return True

    def finish(self) -> None:
        """Run the evaluation on test data, and wait for the removal of old checkpoints."""
        self._test()
        self._settle()
        self.log_progress("finished")

    @property
    def is_over(self) -> bool:
        """True if the last step and its evaluation are done."""
        return self.trainer.iteration >= self.trainer.iterations and not self.trainer.evaluation_left

    def __enter__(self) -> TrainingLoop:
        """Open the metrics, wait for all ranks, and start the loader. From here on, a stop is the loop's."""
        trainer = self.trainer
        with ExitStack() as stack:
            if trainer.checkpoints is not None:
                stack.callback(trainer.checkpoints.close)
            stack.push(self.records.close)
            self.records.open()
            with self.sections(START):
                on_any_rank([False], self.mesh)  # a barrier: until all ranks get here, a stop is handled by `Startup`
            stack.enter_context(self._stop)
            self._start_seconds = self.sections.spent[START, START] = self.startup.finish(trainer.iteration)
            self.log_progress("continues" if trainer.iteration else "begins")
            stack.enter_context(trainer.loader)
            stack.callback(self._profiler.finish)
            if self.copies is not None:
                stack.enter_context(self.copies)
            if self.config.training.manual_gc:
                gc.disable()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin_again(self, decisions: Sequence[Decision]) -> None:
        """Go on from the step to which the trainer has gone back: records and decisions of later ones are removed.

        `decisions`: those that led there. They are of the step that is next, which they change.
        """
        trainer = self.trainer
        self._timed = trainer.iteration
        self.saves = [step for step in self.saves if step <= trainer.iteration]
        del self.sections.spent[START, START]  # of loading, which is no start
        if trainer.iteration == self.saves[0]:  # the record with the figures of the start is removed
            self.metrics, self.sections.spent[START, START] = None, self._start_seconds
        self.records.close()
        self.records.open(decisions)
        self.log_progress("goes back")

    def _step(self, step: Callable[[], StepMetrics]) -> None:
        number = self.sections.step = self.trainer.iteration + 1
        with self._profiler.step(number), self.sections(STEP):
            metrics = self.around(step if self.watch is None else self.watch.step)
        self._pace = self._pace.after(metrics.iteration_time_s)
        self._report(metrics)
        self._raise_if_diverged()
        if self.sampler is not None and self._every(self.config.logging.sample_interval):
            self._sample(self.sampler)
        if self._collects_garbage_now():
            gc.collect()

    def _report(self, metrics: StepMetrics) -> None:
        """Record a step and show it, with what else was asked for."""
        timing = self._timing() if self._every(self.config.watchdog.timing_interval) else None
        figures = {} if timing is None else timing.figures()
        if self.config.logging.log_world_size_to_tensorboard:
            figures["world_size"] = self.mesh.world_size
        if self.copies is not None:
            figures |= self.copies.figures()
        if (sources := self.trainer.task.sources) is not None:
            figures |= sources.after(metrics.consumed_samples, self.trainer.left_out)
        if self.metrics is None and (counted := self.trainer.task.counted_memory) is not None:
            figures["predicted_memory_bytes"] = counted
        self.metrics = replace(metrics, extra={**metrics.extra, **figures})
        lines = self._observed(self.metrics) if self.monitors else ()
        self.records.write(self.metrics)
        if self.trainer.decisions:
            self.records.write_decisions(self.trainer.decisions)
        self.display.step(metrics)
        if timing is not None:
            self.display.message(timing.line())
        for line in lines:
            self.display.message(line)
        drawn = self.trainer.draw_time_line()
        if drawn is not None:
            self.display.message(drawn)
        self._tell_empty()

    def _timing(self) -> Timing:
        """Gather the timing of the steps since the last call. Called by all ranks together."""
        steps, self._timed = self.trainer.iteration - self._timed, self.trainer.iteration
        with self.sections(AGREEMENT):
            return gather_timing(self.sections.take(), steps, self.mesh)

    def _observed(self, metrics: StepMetrics) -> Sequence[str]:
        """Have the monitors look at a step, and add their figures to its record. Returns their lines."""
        with self.sections(AGREEMENT):
            seen = [monitor.after_step(metrics) for monitor in self.monitors]
        figures = {name: value for each in seen for name, value in each.figures.items()}
        self.metrics = replace(metrics, extra={**metrics.extra, **figures})
        return [line for each in seen for line in each.lines]

    def _raise_if_diverged(self) -> None:
        """Say where a step that was skipped was not finite. Raises MegaliteError after too many of them."""
        report = self.trainer.locate_not_finite()
        if report is not None and self.watch is not None:
            report = self.watch.after_skip(report)
        if self.config.alarms.on_not_finite == "end" and self.trainer.skips_in_a_row:
            raise MegaliteError(
                f"the loss or the gradient of step {self.trainer.iteration} was not finite, and "
                f"--on-not-finite end ends the run at the first such step{f'. {report}' if report else ''}"
            )
        if self.trainer.skips_in_a_row == MAX_CONSECUTIVE_SKIPS:
            raise MegaliteError(
                f"the gradient norm was not finite in the last {MAX_CONSECUTIVE_SKIPS} steps (now step "
                f"{self.trainer.iteration}): the run has diverged. Lower --lr, lengthen the warm-up or resume from an "
                f"earlier checkpoint{f'. The last of them: {report}' if report else ''}"
            )
        if report is not None:
            self.display.message(f"WARNING: {report}")

    def _validate(self) -> None:
        """Evaluate. If the run is stopped during the evaluation, the resumed run evaluates before its first step."""
        trainer = self.trainer

        def stopped() -> bool:
            """Tell whether any rank must stop. The evaluation after the last step is never ended early."""
            return trainer.iteration < trainer.iterations and on_any_rank([self._told_to_stop()], self.mesh)[0]

        with self.sections(EVALUATION):
            means = evaluate(trainer, should_stop=stopped)
        trainer.evaluation_left = means is None
        if means is not None:
            loss, others = self._shown("validation", means)
            wanted = self.config.logging.log_validation_ppl_to_tensorboard
            losses = {"": loss, **{name[4:]: mean for name, mean in others.items() if name.startswith("loss/")}}
            extra = {f"valid_perplexity{of}": perplexity(mean) for of, mean in losses.items()} if wanted else {}
            extra |= {f"valid_{name}": mean for name, mean in others.items()}
            self.records.write(ValidationMetrics(*trainer.where(), loss, extra=extra))

    def _test(self) -> None:
        trainer = self.trainer
        if trainer.task.has_test:
            with self.sections(EVALUATION):
                means = evaluate(trainer, test=True)
            assert means is not None
            loss, others = self._shown("test", means)
            extra = {f"test_{name}": mean for name, mean in others.items()}
            self.records.write(TestMetrics(*trainer.where(), loss, extra=extra))

    def _sample(self, sampler: TextSampler) -> None:
        """Record and show what the network writes."""
        with self.sections(EVALUATION):
            texts = sampler.texts()
        for text in texts:
            self.records.write(SampleMetrics(*self.trainer.where(), text))
            self.display.sample(self.trainer.iteration, text)

    def _shown(self, name: str, means: Totals) -> tuple[float, dict[str, float]]:
        """Show the results of an evaluation, with a line for each source or set.

        Returns the loss and the other means, of which loss/NAME is that of a source or set.
        """
        task = self.trainer.task
        others = {name.replace(f"{task.loss_name}/", "loss/"): mean for name, mean in means.items()}
        loss = others.pop(task.loss_name)
        lines = {"": {"loss": loss}, **{name[5:]: dict[str, float]() for name in others if name.startswith("loss/")}}
        for figure, mean in others.items():
            base, _, part = figure.partition("/")
            is_part = part in lines
            lines[part if is_part else ""][base if is_part else figure] = mean
        self._tell_empty()
        for part, figures in lines.items():
            is_of_tokens = task.tokens_per_sample is not None and task.has_perplexity
            of_tokens = {"perplexity": perplexity(figures["loss"])} if is_of_tokens else {}
            of = f" of {part}" if part else ""
            self.display.evaluation(f"{name}{of}", self.trainer.iteration, {**figures, **of_tokens})
        return loss, others

    def _tell_empty(self) -> None:
        note = self.trainer.empty_terms.note()
        if note is not None:
            self.display.message(note)

    def save(self) -> None:
        """Save a checkpoint. Called by all ranks together."""
        self._save(last=True)

    def _save(self, *, last: bool) -> None:
        with self.sections(SAVE):
            if (decision := self.trainer.balance()) is not None:
                self.display.message(f"data-parallel shares: {decision.why}")
                self.records.write_decisions([decision])
            self.records.publish()
            self.trainer.save(self.display, last=last)
        self.saves.append(self.trainer.iteration)

    def _continue_save(self, agreed: _Agreed) -> None:
        """Continue a save in the background, and take a copy in memory if one is due."""
        if self.trainer.checkpoints is not None:
            with self.sections(SAVE):
                self.trainer.checkpoints.advance(agreed.saving, agreed.save_failed, self.display)
        if self.copies is not None and self.trainer.iteration < self.trainer.iterations and not agreed.stop:
            with self.sections(SAVE):
                told = self.copies.after_step(busy=agreed.copying)
            if told is not None:
                self.display.message(told)

    def _settle(self) -> None:
        if self.trainer.checkpoints is not None:
            with self.sections(SAVE):
                self.trainer.checkpoints.settle(self.display)

    def _end_early(self) -> None:
        self._stop.answered()
        self._save(last=True)
        self._settle()
        saved = "nothing is saved without --save" if self.trainer.directory is None else "--resume auto continues"
        self.log_progress("stopped")
        self.display.message(f"stopped after step {self.trainer.iteration}; {saved}{self._why and f': {self._why}'}")

    def log_progress(self, what: str) -> None:
        """Append a line to DIR/progress.txt, if `--log-progress` is given: what has happened to the run."""
        if self.trainer.checkpoints is not None:
            self.trainer.checkpoints.log_progress(f"{what} after step {self.trainer.iteration}")

    # ------------------------------------------------------------------------------------------------ decisions

    def _every(self, interval: int | None) -> bool:
        """Tell whether the last step is a multiple of `interval`. None or 0 means never."""
        return interval is not None and interval > 0 and self.trainer.iteration % interval == 0

    def _collects_garbage_now(self) -> bool:
        """Tell whether to collect garbage now.

        --manual-gc turns Python's own collector off: all ranks then collect after the same step, instead of each rank
        delaying the others at a different time.
        """
        training = self.config.training
        after_evaluation = training.manual_gc_eval and self.trainer.evaluation_due(self.trainer.iteration)
        return training.manual_gc and (self._every(training.manual_gc_interval) or after_evaluation)

    def _agree(self) -> _Agreed:
        """Combine the requests and the save status of all ranks, in one all-reduce per step."""
        checkpoints, files = self.trainer.checkpoints, self.control_files
        saving = checkpoints.flags if checkpoints is not None else (False, False)
        with self.sections(AGREEMENT):
            copying = () if self.copies is None else (self.copies.busy,)
            save = files.take("SAVE") or self.trainer.iteration + 1 in self.config.profiling.trace_steps
            flags = self._told_to_stop(), save, files.take("PROFILE"), *saving, *copying
            asked, *others = self.agreed(flags)
        return _Agreed(asked or self._every(self.config.training.exit_interval), *others)

    def _told_to_stop(self) -> bool:
        """Tell whether this rank must stop: because of a signal, the time limit, a STOP file or the end of the job."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self.startup.began >= 60.0 * minutes
        return self._stop.local_request() > 0 or late or self.control_files.stop() or self._job_ends()

    def _job_ends(self) -> bool:
        """Tell whether the job ends too soon for another step. Rank 0 decides, by its clock."""
        trainer = self.trainer
        if self.startup.job_end is None or self.mesh.rank != 0:
            return False
        left = self.startup.job_end - time.time()
        due = trainer.evaluation_due(trainer.iteration + 1)
        evaluation = self.sections.longest.get(EVALUATION, 0.0) if due else 0.0
        self._why = why_stop(left, self._pace.step, evaluation, trainer.save_seconds()) or ""
        return bool(self._why)

    def agreed(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. Called after each step."""
        return on_any_rank(flags, self.mesh)
