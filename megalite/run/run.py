"""A run from the start of its processes to its exit code: it resumes, trains and saves, whatever its task."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megalite import checkpoint
from megalite.config.run import TaskConfig
from megalite.config.yaml_file import dump
from megalite.entry_points import entry_point
from megalite.errors import EXIT_FINISHED, CheckpointError, ConfigurationError
from megalite.lifecycle.control_files import ControlFiles, has_file
from megalite.lifecycle.launch import connect_ranks, disconnect, locate, run_watchdog
from megalite.lifecycle.startup import Startup
from megalite.optim.elementwise import require_backend
from megalite.optim.synchronization import Synchronization
from megalite.parallel import collectives, device
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.device import profile_range
from megalite.parallel.mesh import ParallelMesh
from megalite.process.launchers import MEMORY_FILES
from megalite.process.place import Place
from megalite.run.loop import TrainingLoop
from megalite.run.records import metrics_path
from megalite.storage import AnyPath, open_directory, write_atomically
from megalite.training.branch import in_words
from megalite.training.data import has_length, last_iteration
from megalite.training.display import Display
from megalite.training.kernels import choose_kernels
from megalite.training.metrics import has_test_loss, read_records
from megalite.training.profiling import record_memory_history, require_device
from megalite.training.resume import find_resume_point
from megalite.training.task import Task
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import MEETING, START, Sections

if TYPE_CHECKING:
    from megalite.mailbox import Mailbox
    from megalite.run.copies import Copies


class Run:
    """A run on this rank. A context manager: at its start all processes meet, and the newest checkpoint is loaded.

    Attributes:
        task: the network, loss and data.
        trainer: the training state; None if a checkpoint has the end of the run, so that nothing is built.
        last: number of the last step.
        how: text for the summary: how the run begins.
    """

    task: Task
    trainer: Trainer | None
    last: int
    how: str

    def __init__(
        self,
        config: TaskConfig,
        make_task: Callable[[ParallelMesh], Task],
        place: Place,
        startup: Startup,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Describe the run. `make_task`: returns the task; called on all ranks together."""
        self.config, self._make_task, self._place, self.startup = config, make_task, place, startup
        self._notes = (*startup.notes, *notes)
        self._loaded: AnyPath | None = None
        self.copies: Copies | None = None
        self._shown = False
        self._loop: TrainingLoop | None = None
        self._stack = ExitStack()
        save = config.checkpoint.save
        self.directory = None if save is None else open_directory(save)

    def __enter__(self) -> Run:
        """Connect the ranks, start the watchdog, lock the run directory, and build or load what the loop needs."""
        config, place = self.config, self._place
        require_backend(config.optimizer)
        choose_kernels(config.kernels)
        if config.reporting.services:
            entry_point("require_libraries")(config.reporting)
        require_device(config.profiling, device.local_device(place.local_rank))
        self._owns_group = not dist.is_initialized()
        self.mesh = mesh = locate(config.parallel, place)
        self.sections = sections = Sections(mesh.waits.by_axis, profile_range=profile_range)
        if config.profiling.record_memory_history:
            record_memory_history(config.profiling, place.rank)
        with ExitStack() as stack:

            def watch(mailbox: Mailbox | None) -> bool:
                watchdog = run_watchdog(config.watchdog, config.parallel, sections, place, self.directory, mailbox)
                return watchdog is not None and stack.enter_context(watchdog).linked

            with sections(MEETING):
                connect_ranks(config.parallel, place, mesh, dump(config), watch)
            with sections(START):
                if self.directory is not None:
                    self._notes += stack.enter_context(checkpoint.only_run(self.directory, mesh))
                    self._notes += ControlFiles(self.directory, mesh).clear(self.startup.preexisting_stop)
                self._synchronization = make_synchronization(config, mesh)
                self.task = self._make_task(self._synchronization.mesh)
                self._begin()
            if self.trainer is not None:
                self.task.begin(self.trainer)
            if self.copies is not None and self.trainer is not None:
                with sections(START):
                    self.copies.begin(self.trainer)
                    self._notes += self.copies.notes
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is None:
            disconnect(self.mesh, all_groups=self._owns_group)

    def _begin(self) -> None:
        """Build the trainer, and load the newest checkpoint that is whole."""
        config, mesh = self.config, self.mesh
        resume_point = self.task.start(find_resume_point(config.checkpoint, mesh))
        chosen = self._synchronization
        trainer = chosen.trainer
        if self.task.optimizers:
            from megalite.training.several import SeveralTrainer

            trainer = SeveralTrainer
        build = cache(partial(trainer, config, self.task, chosen, self.directory, self.sections))
        paths = resume_point.candidates.paths
        if MEMORY_FILES in os.environ:  # the agent of this node keeps them for ranks that start again
            self.copies = entry_point("memory_copies")(config, mesh)
        own = paths if resume_point.position else ()  # steps of another run say nothing about this one's
        if self._continue_from_copies(build, own):
            return

        def load(path: AnyPath) -> tuple[int, Trainer | None]:
            """Return the last step, and the trainer that continues the run, or None if the run has finished."""
            described = checkpoint.check_whole(path, mesh)
            training = described.training
            if resume_point.position and has_length(config.training):
                last = last_iteration(config, self.task.batch_size, training.iteration, training.consumed_samples)
                left = training.iteration == last and (training.evaluation_left or self.task.has_test)
                finished = not left or _has_finished(path, metrics_path(config, self.directory), last, mesh)
                if training.iteration >= last and finished:
                    return last, None
            build().load(path, described, resume_point)
            return build().iterations, build()

        if paths:
            try:
                path, (self.last, self.trainer), damaged = checkpoint.newest_whole(paths, load)
            except CheckpointError as error:
                build.cache_clear()  # a part may have been loaded
                if own and self._continue_from_copies(build, ()):
                    self._notes += (f"WARNING: {error}",)
                    return
                raise
            if damaged and own and self._continue_from_copies(build, (path,)):
                self._notes += tuple(f"WARNING: {problem}" for problem in damaged)
                return
            self._notes += (*resume_point.candidates.notes, *checkpoint.fall_back_notes(paths[0], path, damaged))
            self.how = f"continues from {path}" if resume_point.position else f"new, with the weights of {path}"
            if self.trainer is None and resume_point.branches:
                raise ConfigurationError(
                    f"--branch-from {config.checkpoint.branch_from}: the run would end at step {self.last}, which "
                    f"{path} has reached: give more by --train-iters or --train-samples"
                )
            if self.trainer is not None and self.trainer.parents:
                parents = in_words(self.trainer.parents)
                self.how = f"new, {parents}" if resume_point.branches else f"{self.how}; {parents}"
            self._loaded = path
            return
        self.trainer = build()
        self.last = self.trainer.iterations
        if resume_point.model is not None:
            with raise_on_all_ranks(mesh, f"opening {resume_point.model}"):
                opened = self.task.open_weights(resume_point.model)
            self.trainer.load_model(opened)
            self.how = f"new, with the weights of {opened.what}"
        else:
            self.how = f"new; {config.checkpoint.load} has no checkpoint" if config.checkpoint.load else "new"

    def _continue_from_copies(self, build: Any, on_disk: Sequence[AnyPath]) -> bool:
        """Continue from copies in memory, if there are any that are newer than these checkpoints."""
        found = None if self.copies is None else self.copies.load(build, on_disk)
        if found is not None:
            self.trainer, self.how = found
            self.last = self.trainer.iterations
        return found is not None

    def train(self) -> int:
        """Train to the last step. Returns the exit code: `EXIT_FINISHED` or `EXIT_RESUMABLE`."""
        trainer, rank = self.trainer, self.mesh.rank
        iteration = 0 if trainer is None else trainer.iteration
        display = Display(self.last, self.config.logging.log_interval, start_iteration=iteration, enabled=rank == 0)
        code = EXIT_FINISHED
        with display:
            self.begin(display)
            if trainer is not None:
                code = self.loop(trainer, display).run()
            else:
                assert self._loaded is not None
                at = checkpoint.iteration_of(self._loaded)
                display.message(f"already finished: {self._loaded} is at step {at}. Raise --train-iters to continue")
            if code == EXIT_FINISHED:
                self.finish(display, self.last)
            self._show_end(display, finished=code == EXIT_FINISHED)
        return code

    def loop(self, trainer: Trainer, display: Display) -> TrainingLoop:
        """Return the loop that runs the trainer of this rank."""
        loop = self._synchronization.loop(trainer, display, self.startup)
        loop.copies = self.copies
        self._loop = loop
        if self.config.logging.sample_interval is not None:
            loop.sampler = entry_point("text_sampler")(trainer)
        if self.config.corruption.is_watched:
            loop.watch = entry_point("corruption_watch")(trainer, self.copies)
        if self.config.is_monitored:
            loop.monitors = entry_point("monitors")(trainer)
        if self.config.profiling.trace_steps:
            loop.around = entry_point("step_traces")(trainer)
        return loop

    def finish(self, display: Display, last: int) -> None:
        """Show that the run is finished, and write DONE into its directory, so that scripts do not start it again.

        `last`: the number of the last step.
        """
        if self.trainer is not None:
            display.message(f"finished after step {self.trainer.iteration}")
        if self.directory is not None:
            if self.mesh.rank == 0:
                write_atomically(self.directory / "DONE", f"{last}\n".encode())
            display.message(f"everything is in {self.directory}")

    def _show_end(self, display: Display, *, finished: bool) -> None:
        """Show what the run has done, from its records, and what may follow; write the report of one that is finished.

        Rank 0 does. A run that was asked to stop may have seconds left: a long file is not read then.
        """
        if self.mesh.rank != 0 or self._loop is None or self._loop.metrics is None:
            return
        from megalite.run.end import end_summary, is_short, what_next  # no step needs them
        from megalite.training.facts import Facts

        path, lines, facts, told = metrics_path(self.config, self.directory), {}, Facts(), ""
        if finished and self.directory is not None and self.config.logging.report:
            facts, told = entry_point("report_at_end")(self.directory, path)
        with suppress(Exception):  # somebody else may have changed the file, and what has trained must not fail here
            if not told and path is not None and (finished or is_short(path)):
                for record in read_records(path):
                    facts.add(record)
            if not facts.last:
                facts.add(self._loop.metrics.record())
            lines = end_summary(facts)
        lines |= what_next(self.directory, finished=finished, generates=self.task.tokens_per_sample is not None)
        display.summary("finished" if finished else "stopped", lines)
        if told:
            display.message(told)

    def begin(self, display: Display) -> None:
        """Show how the run begins, once, and record that it is not finished. Called by all ranks together."""
        notes, self._notes = self._notes, ()
        for note in notes:
            display.message(note)
        if self.trainer is not None:
            with self.sections(START):
                if not self._shown:
                    for note in self.trainer.notes():
                        display.message(note)
                    display.summary("megalite", {**self.trainer.summary(), "start": self.how})
                    self._shown = True
                if self.directory is not None and self.mesh.rank == 0:
                    _record_run(self.directory, self.config)


def _has_finished(path: AnyPath, metrics: AnyPath | None, last: int, mesh: ParallelMesh) -> bool:
    """Tell whether the run of this checkpoint has made its last evaluations, too. Rank 0 looks, and all ranks agree."""
    done = path.parent / "DONE"
    finished = mesh.rank == 0 and (
        (has_file(done) and not _is_empty(done)) or (metrics is not None and has_test_loss(metrics, last))
    )
    return bool(collectives.all_gather_json(finished, mesh)[0])


def _is_empty(path: AnyPath) -> bool:
    """Tell whether a file is empty: a power loss may leave it so, and older files without their last lines."""
    return isinstance(path, Path) and path.stat().st_size == 0


def _record_run(directory: AnyPath, config: TaskConfig) -> None:
    """Write the configuration into the run directory, and remove DONE: the run is not finished, or no longer."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "DONE").unlink(missing_ok=True)
        write_atomically(directory / "config.yaml", dump(config).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write to the run directory --save {directory}: {error}") from error


class RunSynchronization(Synchronization):
    """Synchronization of a run.

    Attributes:
        trainer: the trainer of this rank.
        loop: the loop that runs it.
    """

    trainer: type[Trainer] = Trainer
    loop: type[TrainingLoop] = TrainingLoop


def make_synchronization(config: TaskConfig, mesh: ParallelMesh) -> RunSynchronization:
    """Return how the ranks of this mesh, all of a run, bring together what they learn. Called by all ranks together."""
    if config.recovery.survivors_finish_step:
        survivors: RunSynchronization = entry_point("survivors")(mesh)
        return survivors
    if config.synchronization.is_plain:
        return RunSynchronization(mesh)
    found: RunSynchronization = entry_point("synchronization")(config, mesh)
    return found


def make_trainer(config: TaskConfig, task: Task, mesh: ParallelMesh, directory: AnyPath | None = None) -> Trainer:
    """Return the trainer of a rank without a run around it. Called by all ranks together."""
    synchronization = make_synchronization(config, mesh)
    return synchronization.trainer(config, task, synchronization, directory)
