"""Transactions that each save one checkpoint: it becomes visible complete, or not at all.

On a file system the checkpoint is written as `iter_0000100.tmp` and then renamed. If there is already a checkpoint of
that iteration (a run repeats steps after a crash), the old one is renamed to `iter_0000100.replaced` until the new one
has its name. So at every moment the last good checkpoint exists under one of the two names.

An object store has no rename. Files get their final names at once, with the mark of their transaction in the name
(`rank_00000.3f9a2c01.safetensors`). So a transaction overwrites no files of an earlier one, and a late one
none of this one. The manifest comes last, as one object: it publishes the new checkpoint and retires the one before.
The files that the manifest names are the checkpoint; files that only an earlier manifest named no longer belong to it.
A folder without a manifest holds a transaction that did not end.

In both cases the tracker is then set to the iteration, and leftover files are removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.atomic_files import path_in_errors, sync_directory
from megalite.checkpoint import manifest
from megalite.checkpoint.collective_error import all_gather_text
from megalite.checkpoint.directory import TRACKER, checkpoint_path, folders, is_ours
from megalite.checkpoint.storage import AnyPath, ObjectPath
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh

_LEFT_OVER = re.compile(r"iter_(\d{7,})\.(tmp|replaced)")
_FILE = re.compile(r"(?:rank_\d+|__\d+_\d+)(?:\.([0-9a-f]{8}))?\.(?:safetensors|distcp)")


def new_transaction(directory: AnyPath, iteration: int, mesh: ParallelMesh) -> SaveTransaction:
    """Return a transaction to save an iteration, the same on every rank. Every rank calls this; one rank calls its
    methods."""
    if isinstance(directory, Path):
        return FolderTransaction(directory, iteration)
    return ObjectTransaction(directory, iteration, mark=all_gather_text(secrets.token_hex(4), mesh)[0])


@dataclass(frozen=True)
class FolderTransaction:
    """SaveTransaction on a file system."""

    directory: Path
    iteration: int

    @property
    def path(self) -> Path:
        """Final folder of the checkpoint."""
        return checkpoint_path(self.directory, self.iteration)

    @property
    def folder(self) -> Path:
        """Folder that the files are written into."""
        return _temporary(self.path)

    def file(self, name: str) -> Path:
        """Return where to write a file such as `rank_00000.safetensors`; the manifest uses the name of the returned
        path."""
        return self.folder / name

    def begin(self) -> None:
        """Remove what unfinished saves have left, and make the folder to write into.

        Raises OSError, or CheckpointError if something else has the checkpoint's name.
        """
        clear_away(self.directory)
        if self.path.exists() and not is_ours(self.path):
            raise _foreign(self.path)
        self.folder.mkdir(parents=True)

    def commit(self, manifest_text: str) -> None:
        """Add the manifest, give the folder its final name and point the tracker at it; each stage is synced to disk
        first.

        Raises OSError if the disk fails; everything then keeps its old name, unless only the last sync failed.
        """
        aside = self.path.with_name(f"{self.path.name}.replaced")
        _write_synced(self.folder / manifest.NAME, manifest_text)
        sync_directory(self.folder)
        try:
            if self.path.exists():
                os.rename(self.path, aside)
            os.rename(self.folder, self.path)
            sync_directory(self.directory)
            self._point_tracker()
        except OSError:
            with suppress(OSError):
                if not self.folder.exists():
                    os.rename(self.path, self.folder)
                if aside.exists():
                    os.rename(aside, self.path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        sync_directory(self.directory)

    def _point_tracker(self) -> None:
        temporary = self.directory / f"{TRACKER}.tmp"
        try:
            _write_synced(temporary, f"{self.iteration}\n")
            os.replace(temporary, self.directory / TRACKER)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def abandon(self) -> None:
        """Remove all that was written."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class ObjectTransaction:
    """Transaction on an object store. Its methods are as in `FolderTransaction`, unless they say otherwise."""

    directory: ObjectPath
    iteration: int
    mark: str
    """Mark of this transaction in the names of its files."""

    @property
    def path(self) -> ObjectPath:
        return checkpoint_path(self.directory, self.iteration)

    @property
    def folder(self) -> ObjectPath:
        return self.path

    def file(self, name: str) -> ObjectPath:
        stem, _, suffix = name.rpartition(".")
        return self.path / f"{stem}.{self.mark}.{suffix}"

    def begin(self) -> None:
        for folder in folders(self.directory):
            with suppress(OSError):  # what stays takes space, and no more
                folder.remove(_left_over(folder))
        there = self.path.listing()
        ours = any(mark or name.startswith("rank_") for name, mark in _files(there).items())
        if there and manifest.NAME not in there and not ours:
            raise _foreign(self.path)

    def commit(self, manifest_text: str) -> None:
        before = _files(self.path.listing())
        (self.path / manifest.NAME).put(manifest_text.encode())
        (self.directory / TRACKER).put(f"{self.iteration}\n".encode())
        with suppress(OSError):  # the next save has another try
            self.path.remove([name for name, mark in before.items() if mark != self.mark])

    def abandon(self) -> None:
        """Remove all that was written, unless the store has the manifest: it may have stored it and answered with an
        error."""
        with suppress(OSError):
            self.path.remove(_left_over(self.path))


SaveTransaction = FolderTransaction | ObjectTransaction


def clear_away(directory: Path) -> None:
    """Remove what unfinished saves into a run directory have left. Raises OSError."""
    for path in directory.glob("iter_*"):
        if match := _LEFT_OVER.fullmatch(path.name):
            of_that = checkpoint_path(directory, int(match[1]))
            if not path.is_dir():
                path.unlink()
            elif match[2] == "replaced" and not of_that.exists():
                os.rename(path, of_that)
            else:
                shutil.rmtree(path, ignore_errors=True)  # what stays takes space, and no more


def remove(path: AnyPath) -> None:
    """Remove a checkpoint; a crash in between leaves no checkpoint, or leftovers that the next save removes. Raises
    OSError."""
    if isinstance(path, Path):
        os.rename(path, _temporary(path))
        shutil.rmtree(_temporary(path))
    else:
        path.remove([manifest.NAME])
        path.remove(list(path.listing()))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _foreign(path: AnyPath) -> CheckpointError:
    return CheckpointError(f"{path} is there already and is no checkpoint of this program: move it away")


def _files(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names of checkpoint files among these, each with its transaction's mark, or None for a copied file."""
    return {name: match[1] for name in names if (match := _FILE.fullmatch(name))}


def _left_over(folder: ObjectPath) -> Collection[str]:
    """Return the files of transactions in a folder that are not part of a checkpoint."""
    there = folder.listing()
    marks = _files(there)
    if manifest.NAME not in there:
        return [name for name, mark in marks.items() if mark]
    if len(set(marks.values())) < 2:
        return ()  # without a look at the manifest, which may be large
    try:
        named = manifest.read_manifest(folder).files
    except CheckpointError:
        return ()  # what is damaged stays as it is
    return [name for name in marks if name not in named]


def _write_synced(path: Path, text: str) -> None:
    with path_in_errors(path), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
