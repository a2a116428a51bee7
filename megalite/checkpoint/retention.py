"""Removal of old checkpoints: those at multiples of an interval stay, and so do the newest two."""

from __future__ import annotations

from megalite.checkpoint import directory as run_directory
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.selection import check_sizes
from megalite.checkpoint.storage import AnyPath
from megalite.checkpoint.transaction import remove
from megalite.errors import CheckpointError

NEWEST = 2
"""Number of newest checkpoints that always stay: one to start from, and one to fall back to."""


def remove_old(directory: AnyPath, interval: int) -> tuple[str, ...]:
    """Remove checkpoints whose step is not a multiple of `interval`, except the newest two; return what failed.

    One rank calls it, once a save is on disk. Damaged or foreign checkpoints are neither counted nor touched. Neither
    are checkpoints newer than the one that the tracker names: a run has gone back from these.
    """
    try:
        paths = run_directory.candidates(directory).paths
    except CheckpointError as error:
        return (f"note: no old checkpoints are removed: {error}",)
    notes: list[str] = []
    kept = 0
    for path in paths:
        if kept >= NEWEST and run_directory.iteration_of(path) % interval == 0:
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
