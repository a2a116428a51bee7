"""A pre-training run from configuration to exit code."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from megalite import checkpoint
from megalite.checkpoint import AnyPath, write_atomically
from megalite.config import RunConfig
from megalite.config.yaml_file import dump
from megalite.conversion.huggingface import open_huggingface
from megalite.errors import EXIT_FINISHED, CheckpointError
from megalite.optim.elementwise import require_backend
from megalite.parallel.mesh import ParallelMesh
from megalite.training.control_files import ControlFiles
from megalite.training.data import RunData, last_iteration
from megalite.training.display import Display
from megalite.training.kernels import choose_kernels
from megalite.training.launch import join, leave
from megalite.training.loop import TrainingLoop
from megalite.training.place import Place
from megalite.training.start import find_start
from megalite.training.starting import Starting
from megalite.training.summary import summary
from megalite.training.trainer import Trainer


def pretrain(config: RunConfig, notes: tuple[str, ...], data: RunData, place: Place, starting: Starting) -> int:
    """Build, resume, train and save; the same on every rank. Returns the exit code."""
    require_backend(config.optimizer)
    choose_kernels(config.kernels)
    directory = None if config.checkpoint.save is None else checkpoint.open_directory(config.checkpoint.save)
    mesh = join(config.parallel, place, dump(config))
    with ExitStack() as stack:
        if directory is not None:
            notes += stack.enter_context(checkpoint.only_run(directory, mesh))
            notes += ControlFiles(directory, mesh).clear(starting.old_stop)
        code = _run(config, directory, (*starting.notes, *notes, *data.notes), data, mesh, starting)
    leave(mesh)
    return code


def _run(
    config: RunConfig,
    directory: AnyPath | None,
    notes: tuple[str, ...],
    data: RunData,
    mesh: ParallelMesh,
    starting: Starting,
) -> int:
    start = find_start(config.checkpoint, mesh)
    build = cache(partial(Trainer, config, data, mesh, directory))

    def load(path: AnyPath) -> tuple[int, Trainer | None]:
        """The last step, and the run gone on from there; None where it was finished by then."""
        described = checkpoint.check_whole(path, mesh)
        training = described.training
        last = last_iteration(config, training.iteration, training.consumed_samples)
        if start.position and training.iteration >= last:
            return last, None
        build().load(path, described, start)
        return build().iterations, build()

    paths = start.candidates.paths
    if paths:
        path, (last, trainer), damaged = checkpoint.newest_whole(paths, load)
        notes += (*start.candidates.notes, *checkpoint.fall_back_notes(paths[0], path, damaged))
        origin = f"continues from {path}" if start.position else f"new, with the weights of {path}"
    else:
        trainer = build()
        last, origin = trainer.iterations, _anew(config)
        if start.model is not None:
            with checkpoint.together(mesh, f"opening {start.model}"):
                opened = open_huggingface(start.model)
            trainer.load_model(opened)
            origin = f"new, with the weights of {opened.what}"
    iteration = 0 if trainer is None else trainer.iteration
    with Display(last, config.logging.log_interval, start_iteration=iteration, enabled=mesh.rank == 0) as display:
        for note in notes:
            display.message(note)
        if trainer is not None:
            code = _train(trainer, origin, display, starting)
        else:
            code = EXIT_FINISHED
            at = checkpoint.iteration_of(path)
            display.message(f"finished already: {path} is after step {at}. A longer --train-iters goes on")
        if code == EXIT_FINISHED and directory is not None and mesh.rank == 0:
            write_atomically(directory / "DONE", f"{last}\n".encode())
            display.message(f"everything is in {directory}")
    return code


def _train(trainer: Trainer, origin: str, display: Display, starting: Starting) -> int:
    for note in trainer.notes():
        display.message(note)
    display.summary("megalite", summary(trainer) | {"start": origin})
    if trainer.directory is not None and trainer.mesh.rank == 0:
        _record_run(trainer.directory, trainer.config)
    code = TrainingLoop(trainer, display, starting).run()
    if code == EXIT_FINISHED:
        display.message(f"finished after step {trainer.iteration}")
    return code


def _anew(config: RunConfig) -> str:
    return f"new; {config.checkpoint.load} holds no checkpoint" if config.checkpoint.load else "new"


def _record_run(directory: AnyPath, config: RunConfig) -> None:
    """Write what this run is into its directory; it is not done (again)."""
    try:
        if isinstance(directory, Path):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "DONE").unlink(missing_ok=True)
        elif "DONE" in directory.listing():
            directory.remove(["DONE"])
        write_atomically(directory / "config.yaml", dump(config).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write to the run directory --save {directory}: {error}") from error
