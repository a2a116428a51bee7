"""Checkpoints in a run directory: their names, and which one to load.

A folder `iter_0000100` is a checkpoint and always complete (see `transaction`). A folder `iter_0000100.replaced` is a
checkpoint if there is no `iter_0000100`. The tracker, `latest_checkpointed_iteration.txt`, holds the iteration of the
checkpoint to load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megalite.checkpoint import manifest
from megalite.errors import CheckpointError
from megalite.small_files import shown
from megalite.storage import AnyPath, ObjectPath, read_small

TRACKER = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"iter_(\d{7,15})(\.replaced)?")
_STEP = re.compile(r"\d{1,15}")

PathType = TypeVar("PathType", Path, ObjectPath, AnyPath)


def checkpoint_path(directory: PathType, iteration: int) -> PathType:
    return directory / f"iter_{iteration:07d}"


def latest(directory: AnyPath) -> AnyPath | None:
    """Return the folder of the checkpoint that the tracker names. Without a tracker, return the newest, or None.

    Raises CheckpointError if the checkpoint that the tracker names does not exist.
    """
    found, text = complete(directory), _tracked(directory)
    if text is None:
        return found[max(found)] if found else None
    if _STEP.fullmatch(text) and int(text) in found:
        return found[int(text)]
    raise _names_none(directory, text, found)


@dataclass(frozen=True)
class Candidates:
    """Checkpoints that a run may start from."""

    paths: tuple[AnyPath, ...] = ()
    """Folders, in order of preference. The first may be damaged or missing; the others are older."""
    notes: tuple[str, ...] = ()
    """Lines to show to the user about anything unexpected."""


def candidates(directory: AnyPath) -> Candidates:
    """Return the checkpoint that the tracker names, and all older ones. Without a tracker, return all, newest first.

    Checkpoints newer than the tracker's are ignored: the user has gone back to an earlier one on purpose, and loading a
    newer one would mix two runs. A tracker without a number is ignored. Raises CheckpointError if all
    checkpoints are newer than the tracker's, or if the tracker has no number and there are no checkpoints.
    """
    found, text = complete(directory), _tracked(directory)
    newest_first = sorted(found, reverse=True)
    if text is None or not _STEP.fullmatch(text):
        if text is not None and not found:
            raise _names_none(directory, text, found)
        note = f"note: {directory / TRACKER} has {shown(text)}, which is not a step: the newest checkpoint is used"
        return Candidates(tuple(found[iteration] for iteration in newest_first), () if text is None else (note,))
    named = int(text)
    newer = [found[iteration].name for iteration in newest_first if iteration > named]
    if named not in found and newer and len(newer) == len(found):
        raise _names_none(directory, text, found)
    older = tuple(found[iteration] for iteration in newest_first if iteration < named)
    note = f"note: {', '.join(newer)} in {directory}: newer than step {named}, which {TRACKER} names, and left alone"
    return Candidates((found.get(named, checkpoint_path(directory, named)), *older), (note,) if newer else ())


def iterations(directory: AnyPath) -> list[int]:
    """Return the iterations of all checkpoints, sorted."""
    return sorted(complete(directory))


def iteration_of(path: AnyPath) -> int:
    """Return the iteration from the name of a checkpoint's folder."""
    match = _COMPLETE.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} does not have the name of a checkpoint")
    return int(match[1])


def _tracked(directory: AnyPath) -> str | None:
    """Return the text in the tracker; None if there is no tracker, because no save has completed.

    If the tracker is too large or not a regular file, return the reason in parentheses.
    """
    try:
        return read_small(directory / TRACKER, largest=1000).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{directory / TRACKER} cannot be read: {error.strerror}") from error
    except ValueError as error:
        return f"({error})"


def _names_none(directory: AnyPath, text: str, found: dict[int, AnyPath]) -> CheckpointError:
    there = f"write one of {', '.join(map(str, sorted(found)))} into it" if found else "there is none in that folder"
    others = manifest.advise_import(directory / text[:100])
    return CheckpointError(f"{directory / TRACKER} names {shown(text)}, not a checkpoint here: {there}{others}")


def resolve(path: AnyPath) -> AnyPath:
    """Return a checkpoint's folder. If `path` is a run directory, return the folder of its latest checkpoint.

    Raises CheckpointError if there is no checkpoint.
    """
    found = path if _COMPLETE.fullmatch(path.name) or (path / manifest.NAME).is_file() else latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint: give a folder that was the --save of a training")
    return found


def complete(directory: AnyPath) -> dict[int, AnyPath]:
    """Return all checkpoints by iteration, damaged ones too. Raises CheckpointError if the directory is unreadable."""
    found: dict[int, AnyPath] = {}
    try:
        for path in reversed(folders(directory)):  # so iter_N takes precedence over iter_N.replaced
            if is_ours(path) if isinstance(path, Path) else (path / manifest.NAME).is_file():
                found[iteration_of(path)] = path
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    return found


def folders(directory: PathType) -> list[PathType]:
    """Return all paths in a run directory that have the name of a checkpoint, sorted by name. Raises OSError."""
    try:
        found = [path for path in directory.iterdir() if _COMPLETE.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: path.name)


def is_ours(path: Path) -> bool:
    """Return whether a folder is a checkpoint of megalite, or an incomplete one."""
    return (path / manifest.NAME).is_file() or any(path.glob("rank_*.safetensors"))
