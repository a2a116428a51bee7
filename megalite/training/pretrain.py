"""Pre-training run, from its configuration to its exit code."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from megalite import checkpoint
from megalite.config import RunConfig
from megalite.config.yaml_file import dump
from megalite.conversion.upcycling import upcycled
from megalite.errors import EXIT_FINISHED, CheckpointError
from megalite.lifecycle.control_files import ControlFiles, has_file
from megalite.lifecycle.launch import come_together, leave, take_place
from megalite.lifecycle.run_watchdog import run_watchdog
from megalite.lifecycle.startup import Startup
from megalite.optim.elementwise import require_backend
from megalite.parallel import collectives, device
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.profile_range import profile_range
from megalite.process.place import Place
from megalite.storage import AnyPath, open_directory, write_atomically
from megalite.training.data import RunData, last_iteration
from megalite.training.display import Display
from megalite.training.kernels import choose_kernels, require_equal_dropout
from megalite.training.loop import TrainingLoop, metrics_path
from megalite.training.metrics import has_test_loss
from megalite.training.profiling import record_memory_history, require_device
from megalite.training.resume import find_resume_point, open_initial_model
from megalite.training.summary import summary
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import MEETING, START, Sections

if TYPE_CHECKING:
    from megalite.torch_internals import Store


@dataclass(frozen=True)
class _Begun:
    """A run that is ready for its first step, or that had already finished."""

    trainer: Trainer | None
    """Trainer of the run; None if the run is finished."""
    last: int
    """The number of the last step."""
    how: str
    """Text for the summary: how the run begins."""
    checkpoint: AnyPath | None
    """Checkpoint that the run was loaded from, if any."""
    notes: tuple[str, ...] = ()


def pretrain(config: RunConfig, notes: tuple[str, ...], data: RunData, place: Place, startup: Startup) -> int:
    """Build, resume, train and save; the same on every rank. Returns the exit code."""
    require_backend(config.optimizer)
    choose_kernels(config.kernels)
    require_device(config.profiling, device.local_device(place.local_rank))
    require_equal_dropout(config, device.local_device(place.local_rank))
    directory = None if config.checkpoint.save is None else open_directory(config.checkpoint.save)
    mesh = take_place(config.parallel, place)
    sections = Sections(lambda: mesh.waits.seconds, profile_range=profile_range)
    if config.profiling.record_memory_history:
        record_memory_history(config.profiling, place.rank)
    with ExitStack() as stack:

        def watch(store: Store | None) -> bool:
            watchdog = run_watchdog(config, sections, place, directory, store)
            return watchdog is not None and stack.enter_context(watchdog).linked

        with sections(MEETING):
            come_together(config.parallel, place, mesh, dump(config), watch)
        with sections(START):
            if directory is not None:
                notes += stack.enter_context(checkpoint.only_run(directory, mesh))
                notes += ControlFiles(directory, mesh).clear(startup.preexisting_stop)
            begun = _begin(config, directory, data, mesh, sections)
        code = _run(config, directory, begun, (*startup.notes, *notes, *data.notes, *begun.notes), mesh, startup)
    leave(mesh)
    return code


def _begin(
    config: RunConfig, directory: AnyPath | None, data: RunData, mesh: ParallelMesh, sections: Sections
) -> _Begun:
    resume_point = find_resume_point(config.checkpoint, mesh)
    build = cache(partial(Trainer, config, data, mesh, directory, sections))

    def load(path: AnyPath) -> tuple[int, Trainer | None]:
        """Return the last step, and the trainer that continues the run, or None if the run has finished."""
        described = checkpoint.check_whole(path, mesh)
        training = described.training
        last = last_iteration(config, training.iteration, training.consumed_samples)
        left = training.iteration == last and (training.evaluation_left or data.test is not None)
        at_end = resume_point.position and training.iteration >= last
        if at_end and (not left or _has_finished(path, metrics_path(config, directory), last, mesh)):
            return last, None
        build().load(path, described, resume_point)
        return build().iterations, build()

    paths = resume_point.candidates.paths
    if paths:
        path, (last, trainer), damaged = checkpoint.newest_whole(paths, load)
        notes = (*resume_point.candidates.notes, *checkpoint.fall_back_notes(paths[0], path, damaged))
        how = f"continues from {path}" if resume_point.position else f"new, with the weights of {path}"
        return _Begun(trainer, last, how, path, notes)
    trainer = build()
    if resume_point.model is None:
        how = f"new; {config.checkpoint.load} has no checkpoint" if config.checkpoint.load else "new"
        return _Begun(trainer, trainer.iterations, how, None)
    with raise_on_all_ranks(mesh, f"opening {resume_point.model}"):
        opened = open_initial_model(resume_point.model)
        if config.checkpoint.moe_use_upcycling:
            opened = upcycled(opened, trainer.model_config, config.training.seed)
    trainer.load_model(opened)
    return _Begun(trainer, trainer.iterations, f"new, with the weights of {opened.what}", None)


def _has_finished(path: AnyPath, metrics: AnyPath | None, last: int, mesh: ParallelMesh) -> bool:
    """Tell whether the run of this checkpoint has made its last evaluations, too. Rank 0 looks, and all ranks agree."""
    finished = mesh.rank == 0 and (
        has_file(path.parent / "DONE") or (metrics is not None and has_test_loss(metrics, last))
    )
    return bool(collectives.all_gather_json(finished, mesh)[0])


def _run(
    config: RunConfig,
    directory: AnyPath | None,
    begun: _Begun,
    notes: tuple[str, ...],
    mesh: ParallelMesh,
    startup: Startup,
) -> int:
    trainer, code = begun.trainer, EXIT_FINISHED
    iteration = 0 if trainer is None else trainer.iteration
    display = Display(begun.last, config.logging.log_interval, start_iteration=iteration, enabled=mesh.rank == 0)
    with display:
        for note in notes:
            display.message(note)
        if trainer is not None:
            with trainer.sections(START):
                for note in trainer.notes():
                    display.message(note)
                display.summary("megalite", summary(trainer) | {"start": begun.how})
                if directory is not None and mesh.rank == 0:
                    _record_run(directory, config)
            code = TrainingLoop(trainer, display, startup).run()
            if code == EXIT_FINISHED:
                display.message(f"finished after step {trainer.iteration}")
        else:
            assert begun.checkpoint is not None
            at = checkpoint.iteration_of(begun.checkpoint)
            display.message(f"already finished: {begun.checkpoint} is at step {at}. Raise --train-iters to continue")
        if code == EXIT_FINISHED and directory is not None and mesh.rank == 0:
            write_atomically(directory / "DONE", f"{begun.last}\n".encode())
            display.message(f"everything is in {directory}")
    return code


def _record_run(directory: AnyPath, config: RunConfig) -> None:
    """Write the configuration into the run directory, and remove DONE: the run is not finished, or no longer."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "DONE").unlink(missing_ok=True)
        write_atomically(directory / "config.yaml", dump(config).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write to the run directory --save {directory}: {error}") from error
