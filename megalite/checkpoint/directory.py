"""The checkpoints of a run directory: names, the latest, and the one way in which a new one appears.

`iter_0000100/` is a checkpoint, complete by construction: it is written as `iter_0000100.tmp` and renamed. Where one of
that iteration is there already (a run repeats steps after a crash), that one stands aside as `iter_0000100.replaced`
until the new one has its name; so at every moment the last good one is there under one of the two.
`latest_checkpointed_iteration.txt` holds the iteration of the one to load.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint import manifest
from megalite.errors import CheckpointError
from megalite.files import naming, sync_directory

TRACKER = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"iter_(\d{7,})(\.replaced)?")
_LEFT_OVER = re.compile(r"iter_(\d{7,})\.(tmp|replaced)")


def checkpoint_path(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def temporary_path(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}.tmp"


def latest(directory: Path) -> Path | None:
    """The folder of the checkpoint to load: the one that the tracker names; without a tracker the newest; or None.

    Raises CheckpointError where the tracker names one that is not there.
    """
    found, text = complete(directory), _tracked(directory)
    if text is None:
        return found[max(found)] if found else None
    if text.isdecimal() and int(text) in found:
        return found[int(text)]
    raise _names_none(directory, text, found)


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that a run may start from."""

    paths: tuple[Path, ...] = ()
    """The best first, which may be damaged or gone; the others are older."""
    notes: tuple[str, ...] = ()
    """Lines on what is not as it should be, or not as it may seem."""


def candidates(directory: Path) -> Candidates:
    """The checkpoint that the tracker names and those before it; without a tracker all, the newest first.

    What is newer than the tracker says was left behind on purpose (a run went back), and going on from it would mix
    two runs. A tracker that holds no number says nothing. Raises CheckpointError where it does and there are none.
    """
    found, text = complete(directory), _tracked(directory)
    newest_first = sorted(found, reverse=True)
    if text is None:
        return Candidates(tuple(found[iteration] for iteration in newest_first))
    if not text.isdecimal():
        if not found:
            raise _names_none(directory, text, found)
        note = f"note: {directory / TRACKER} holds {text!r}, which is no step: the newest checkpoint counts"
        return Candidates(tuple(found[iteration] for iteration in newest_first), (note,))
    named = int(text)
    newer = [found[iteration].name for iteration in newest_first if iteration > named]
    if named not in found and newer and len(newer) == len(found):
        raise _names_none(directory, text, found)
    older = tuple(found[iteration] for iteration in newest_first if iteration < named)
    note = f"note: {', '.join(newer)} in {directory}: newer than step {named}, which {TRACKER} names, and left alone"
    return Candidates((found.get(named, checkpoint_path(directory, named)), *older), (note,) if newer else ())


def iterations(directory: Path) -> list[int]:
    """Of the checkpoints there are, in order."""
    return sorted(complete(directory))


def iteration_of(path: Path) -> int:
    """The iteration that a checkpoint's folder is named after."""
    match = _COMPLETE.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} has not the name of a checkpoint")
    return int(match[1])


def _tracked(directory: Path) -> str | None:
    """What the tracker holds; None where there is none: no save has come to its end."""
    try:
        return (directory / TRACKER).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{directory / TRACKER} cannot be read: {error.strerror}") from error


def _names_none(directory: Path, text: str, found: dict[int, Path]) -> CheckpointError:
    there = f"write one of {', '.join(map(str, sorted(found)))} into it" if found else "there is none in that folder"
    return CheckpointError(f"{directory / TRACKER} names {text!r}, which is no checkpoint here: {there}")


def resolve(path: Path) -> Path:
    """A checkpoint's folder, from itself or from its run directory, whose latest it is.

    Raises CheckpointError where there is none.
    """
    found = path if _COMPLETE.fullmatch(path.name) or (path / manifest.NAME).is_file() else latest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a folder that training was given as --save")
    return found


def complete(directory: Path) -> dict[int, Path]:
    """The checkpoints by iteration, damaged ones too."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("iter_*"), reverse=True):  # so that iter_N overrules iter_N.replaced
        if (match := _COMPLETE.fullmatch(path.name)) and _is_ours(path):
            found[int(match[1])] = path
    return found


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint of this program, or what is left of one."""
    return (path / manifest.NAME).is_file() or any(path.glob("rank_*.safetensors"))


def begin(directory: Path, iteration: int) -> None:
    """Clear away what saves that did not end have left, and make the folder to write into."""
    for path in directory.glob("iter_*"):
        if match := _LEFT_OVER.fullmatch(path.name):
            of_that = checkpoint_path(directory, int(match[1]))
            if match[2] == "replaced" and not of_that.exists():
                os.rename(path, of_that)
            else:
                shutil.rmtree(path, ignore_errors=True)  # what stays takes space, and no more
    final = checkpoint_path(directory, iteration)
    if final.exists() and not _is_ours(final):
        raise CheckpointError(f"{final} is there already and is no checkpoint of this program: move it away")
    temporary_path(directory, iteration).mkdir(parents=True)


def commit(directory: Path, iteration: int) -> Path:
    """Give the written folder its name and point the tracker at it; everything is on disk before it is relied upon.

    Raises OSError where the disk does; all has its old name then, unless only the last sync failed.
    """
    final, aside = checkpoint_path(directory, iteration), directory / f"iter_{iteration:07d}.replaced"
    temporary = temporary_path(directory, iteration)
    sync_directory(temporary)
    try:
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        sync_directory(directory)
        _point_tracker(directory, iteration)
    except OSError:
        with suppress(OSError):
            if not temporary.exists():
                os.rename(final, temporary)
            if aside.exists():
                os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    sync_directory(directory)
    return final


def _point_tracker(directory: Path, iteration: int) -> None:
    temporary = directory / f"{TRACKER}.tmp"
    try:
        write_synced(temporary, f"{iteration}\n")
        os.replace(temporary, directory / TRACKER)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, text: str) -> None:
    with naming(path), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
