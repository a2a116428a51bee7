"""Selection of the checkpoint that a run starts from, the same on all ranks, and of old checkpoints to remove."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from megalite.checkpoint import directory as run_directory
from megalite.checkpoint.directory import Candidates, iteration_of
from megalite.checkpoint.integrity import CorruptFileError, check_size, unreadable
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.transaction import remove
from megalite.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from megalite.parallel.collective_error import check_all_see, raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, sizes

NEWEST = 2
"""Number of newest checkpoints that are always kept: one to load, and one to fall back to if that is damaged."""
ATTEMPTS = 2
"""Number of reads that must all find damage. A single read may fail although the file is intact."""

T = TypeVar("T")


def find_candidates(directory: AnyPath, mesh: ParallelMesh) -> Candidates:
    """Return the result of `directory.candidates`. Raises CheckpointError if the ranks do not see the same files."""
    with raise_on_all_ranks(mesh, f"looking for a checkpoint in {directory}"):
        found = run_directory.candidates(directory)
    check_all_see(str(found), directory, mesh)
    return found


def find_iteration(directory: AnyPath, iteration: int, mesh: ParallelMesh, flag: str) -> Candidates:
    """Return the checkpoint of one iteration, which `flag` asks for, as the only candidate.

    Raises ConfigurationError if there is none.
    """
    with raise_on_all_ranks(mesh, f"looking for a checkpoint in {directory}"):
        there = run_directory.iterations(directory)
    check_all_see(str(there), directory, mesh)
    if iteration not in there:
        holds = f"only steps {', '.join(map(str, there))}" if there else "no checkpoint"
        raise ConfigurationError(f"{flag}: {directory} has {holds}")
    return Candidates((run_directory.checkpoint_path(directory, iteration),))


def find_iterations(directory: AnyPath, iterations: Iterable[int], mesh: ParallelMesh) -> Candidates:
    """Return the checkpoints of these iterations that there are, the newest first."""
    with raise_on_all_ranks(mesh, f"looking for a checkpoint in {directory}"):
        there = run_directory.iterations(directory)
    check_all_see(str(there), directory, mesh)
    found = sorted(set(there).intersection(iterations), reverse=True)
    return Candidates(tuple(run_directory.checkpoint_path(directory, iteration) for iteration in found))


def check_whole(path: AnyPath, mesh: ParallelMesh) -> Manifest:
    """Check that all files of the checkpoint in folder `path` exist with the right sizes, and return its manifest.

    Raises CorruptCheckpointError, the same on every rank, if a file is missing or has another size. The checksums are
    verified later, when the files are read.
    """
    with raise_on_all_ranks(mesh, f"reading {path}"):
        manifest = read_manifest(path)
        if manifest.training.iteration != iteration_of(path):
            raise CorruptFileError(path, f"its manifest says step {manifest.training.iteration}")
        check_sizes(path, manifest, list(manifest.files)[mesh.rank :: mesh.world_size])
    check_all_see(str(manifest.checksum), path, mesh)
    return manifest


def check_sizes(path: AnyPath, manifest: Manifest, files: Iterable[str]) -> None:
    """Raise CorruptCheckpointError if one of the files is missing, or if its size differs from the manifest."""
    files = list(files)
    try:
        found = sizes(path, files)
    except OSError as error:
        raise unreadable(path, error) from error
    for file in files:
        if file not in found:
            raise CorruptFileError(path / file, "it is missing")
        check_size(path / file, found[file], manifest.files[file].size)


def newest_whole(paths: Iterable[AnyPath], use: Callable[[AnyPath], T]) -> tuple[AnyPath, T, tuple[str, ...]]:
    """Return the first checkpoint that is not damaged, the result of `use` for it, and the errors of those before it.

    Every rank calls it. `use` raises CorruptCheckpointError for a damaged checkpoint, and must fail on all ranks or on
    none. Damaged checkpoints are not removed. Raises CheckpointError if all are damaged. Any other error of `use`, such
    as a checkpoint of another model, is raised unchanged.
    """
    passed_over: list[str] = []
    for path in paths:
        for _ in range(ATTEMPTS):
            try:
                return path, use(path), tuple(passed_over)
            except CorruptCheckpointError as error:
                problem = str(error)
        passed_over.append(problem)
    raise CheckpointError("\n".join(["there is no undamaged checkpoint to start from:", *passed_over]))


def fall_back_notes(first: AnyPath, chosen: AnyPath, passed_over: Iterable[str]) -> tuple[str, ...]:
    """Return warnings about skipped checkpoints, the newest of them being `first`; empty if none was skipped."""
    problems = [f"  {problem}" for problem in passed_over]
    if not problems:
        return ()
    lost, at = iteration_of(first) - iteration_of(chosen), iteration_of(chosen)
    return (
        f"WARNING: fell back to {chosen}: {lost} {'step is' if lost == 1 else 'steps are'} repeated from step {at} on. "
        "Newer ones are damaged, and are kept until their steps are saved again:",
        *problems,
    )


def remove_old(directory: AnyPath, interval: int) -> tuple[str, ...]:
    """Remove checkpoints whose step is not a multiple of `interval`, except the newest two. Return notes on failures.

    One rank calls it, after a save is on disk. Damaged and foreign checkpoints are not counted and not removed. The
    same holds for checkpoints newer than the tracker's: the user has gone back to an earlier one.
    """
    try:
        paths = run_directory.candidates(directory).paths
    except CheckpointError as error:
        return (f"note: no old checkpoints are removed: {error}",)
    notes: list[str] = []
    kept = 0
    for path in paths:
        if kept >= NEWEST and iteration_of(path) % interval == 0:
            continue
        try:
            check_sizes(path, manifest := read_manifest(path), manifest.files)
        except CheckpointError:
            continue
        kept += 1
        if kept > NEWEST:
            try:
                remove(path)
            except OSError as error:
                notes.append(f"note: {path} could not be removed ({error.strerror}): remove it by hand")
    return tuple(notes)
