"""Which checkpoint a run starts from: the newest that is whole, the same for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from megalite.checkpoint import directory as run_directory
from megalite.checkpoint.agreement import check_all_see, together
from megalite.checkpoint.damage import Damage, check_size, unreadable
from megalite.checkpoint.directory import Candidates, iteration_of
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.storage import AnyPath, sizes
from megalite.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megalite.parallel.mesh import ParallelMesh

ATTEMPTS = 2
"""Damage is believed when so many readings have found it: one may have failed on its way."""

T = TypeVar("T")


def find_candidates(directory: AnyPath, mesh: ParallelMesh) -> Candidates:
    """`directory.candidates`, agreed by all ranks. Raises CheckpointError where they do not see the same files."""
    with together(mesh, f"looking for a checkpoint in {directory}"):
        found = run_directory.candidates(directory)
    check_all_see(str(found), directory, mesh)
    return found


def find_iteration(directory: AnyPath, iteration: int, mesh: ParallelMesh) -> Candidates:
    """The checkpoint of one iteration alone. Raises ConfigurationError where there is none."""
    with together(mesh, f"looking for a checkpoint in {directory}"):
        there = run_directory.iterations(directory)
    check_all_see(str(there), directory, mesh)
    if iteration not in there:
        holds = f"those after steps {', '.join(map(str, there))}" if there else "no checkpoint"
        raise ConfigurationError(f"--ckpt-step {iteration}: {directory} holds {holds}")
    return Candidates((run_directory.checkpoint_path(directory, iteration),))


def check_whole(path: AnyPath, mesh: ParallelMesh) -> Manifest:
    """The manifest of the checkpoint in folder `path`, once all its files are known to be there.

    Raises DamagedCheckpointError, the same on every rank, where they are not; their bytes are checked as they are read.
    """
    with together(mesh, f"reading {path}"):
        manifest = read_manifest(path)
        if manifest.training.iteration != iteration_of(path):
            raise Damage(path, f"its manifest is of step {manifest.training.iteration}")
        check_sizes(path, manifest, list(manifest.files)[mesh.rank :: mesh.world_size])
    check_all_see(str(manifest.checksum), path, mesh)
    return manifest


def check_sizes(path: AnyPath, manifest: Manifest, files: Iterable[str]) -> None:
    """Raise DamagedCheckpointError where one of the files is missing or has not the size that the manifest says."""
    files = list(files)
    try:
        found = sizes(path, files)
    except OSError as error:
        raise unreadable(path, error) from error
    for file in files:
        if file not in found:
            raise Damage(path / file, "it is missing")
        check_size(path / file, found[file], manifest.files[file].size)


def newest_whole(paths: Iterable[AnyPath], use: Callable[[AnyPath], T]) -> tuple[AnyPath, T, tuple[str, ...]]:
    """The first checkpoint that `use` does not find damaged, what it gave, and what was wrong with those before.

    Every rank calls it, and `use` must fail on all or on none. What is damaged stays where it is. Raises
    CheckpointError where none is whole; what is not damage, like a checkpoint of another model, is raised as it is.
    """
    passed_over: list[str] = []
    for path in paths:
        for _ in range(ATTEMPTS):
            try:
                return path, use(path), tuple(passed_over)
            except DamagedCheckpointError as error:
                problem = str(error)
        passed_over.append(problem)
    raise CheckpointError("\n".join(["there is no whole checkpoint to start from:", *passed_over]))


def fall_back_notes(first: AnyPath, chosen: AnyPath, passed_over: Iterable[str]) -> tuple[str, ...]:
    """What to tell of checkpoints that were passed over, `first` the newest of them; nothing where none was."""
    problems = [f"  {problem}" for problem in passed_over]
    if not problems:
        return ()
    lost, at = iteration_of(first) - iteration_of(chosen), iteration_of(chosen)
    return (
        f"WARNING: fell back to {chosen}: {lost} {'step is' if lost == 1 else 'steps are'} repeated from step {at} on. "
        "What is newer is damaged and stays where it is until its step is saved again:",
        *problems,
    )
