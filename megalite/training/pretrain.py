"""A pre-training run from configuration to exit code."""

from __future__ import annotations

from pathlib import Path

from megalite import checkpoint
from megalite.config import RunConfig
from megalite.config.yaml_file import dump
from megalite.errors import EXIT_FINISHED, CheckpointError, ConfigurationError
from megalite.files import write_atomically
from megalite.optim.elementwise import require_backend
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import RunData, last_iteration
from megalite.training.display import Display
from megalite.training.launch import join, leave
from megalite.training.place import Place
from megalite.training.summary import summary
from megalite.training.trainer import Trainer


def pretrain(config: RunConfig, notes: tuple[str, ...], data: RunData, place: Place) -> int:
    """Build, resume, train and save; the same on every rank. Returns the exit code."""
    require_backend(config.optimizer)
    mesh = join(config.parallel, place, dump(config))
    start = checkpoint_to_load(config, mesh)
    iteration, samples = (0, 0) if start is None else _progress(start)
    last = last_iteration(config, iteration, samples)
    with Display(last, config.logging.log_interval, start_iteration=iteration, enabled=mesh.rank == 0) as display:
        for note in (*notes, *data.notes):
            display.message(note)
        if iteration < last:
            code = _train(config, data, mesh, start, display)
        else:
            code = EXIT_FINISHED
            display.message(f"finished already: {start} is after step {iteration}. A longer --train-iters goes on")
        if code == EXIT_FINISHED and config.checkpoint.save is not None and mesh.rank == 0:
            write_atomically(Path(config.checkpoint.save) / "DONE", f"{last}\n".encode())
            display.message(f"everything is in {config.checkpoint.save}")
    leave(mesh)
    return code


def _progress(start: Path) -> tuple[int, int]:
    """The steps and samples that a checkpoint stands after."""
    training = checkpoint.read_manifest(start).training
    return training.iteration, training.consumed_samples


def _train(config: RunConfig, data: RunData, mesh: ParallelMesh, start: Path | None, display: Display) -> int:
    trainer = Trainer(config, data, mesh)
    if start is not None:
        trainer.load(start)
    for note in trainer.notes():
        display.message(note)
    display.summary("megalite", summary(trainer) | {"start": _describe_start(config, start)})
    if trainer.directory is not None and mesh.rank == 0:
        _record_run(trainer.directory, config)
    code = trainer.train(display)
    if code == EXIT_FINISHED:
        display.message(f"finished after step {trainer.iteration}")
    return code


def checkpoint_to_load(config: RunConfig, mesh: ParallelMesh) -> Path | None:
    """Under `--resume auto` the newest checkpoint of --save, where there is one; else that of --load.

    Raises ConfigurationError where the run would write among the checkpoints of another.
    """

    def newest(directory: str | None) -> Path | None:
        return None if directory is None else checkpoint.find_latest(Path(directory), mesh)

    present = newest(config.checkpoint.save)
    start = present if config.checkpoint.resume == "auto" and present is not None else newest(config.checkpoint.load)
    if present is not None and (start is None or start.resolve() != present.resolve()):
        raise ConfigurationError(
            f"--save {config.checkpoint.save} holds {present.name} of an earlier run, which this one would not "
            "continue: give --resume auto to continue it, or another --save"
        )
    return start


def _describe_start(config: RunConfig, start: Path | None) -> str:
    if start is not None:
        return f"continues from {start}"
    return f"new; {config.checkpoint.load} holds no checkpoint" if config.checkpoint.load else "new"


def _record_run(directory: Path, config: RunConfig) -> None:
    """Write what this run is into its directory; it is not done (again)."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "DONE").unlink(missing_ok=True)
        write_atomically(directory / "config.yaml", dump(config).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write to the run directory --save {directory}: {error}") from error
