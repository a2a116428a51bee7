"""Transactions that each save one checkpoint, which becomes visible complete or not at all.

On a file system, the checkpoint is written as `iter_0000100.tmp` and then renamed. There may already be a checkpoint of
this iteration, if a run repeats steps after a crash. Then the old one is first renamed to `iter_0000100.replaced`, and
removed after the new one has its name. At every moment, the last good checkpoint exists under one of the two names.

An object store cannot rename. The files get their final names at once, and each name contains the mark of its
transaction (`rank_00000.3f9a2c01.safetensors`), so that no transaction overwrites the files of another one. The
manifest is written last, as one object: this makes the new checkpoint visible and replaces an older one. A checkpoint
consists of the files that its manifest names. A folder without a manifest is left over from a transaction that did not
complete.

In both cases, the tracker is then set to the iteration, and leftover files are removed.
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

from megalite.atomic_files import open_itself, path_in_errors, sync_directory
from megalite.checkpoint import manifest
from megalite.checkpoint.directory import TRACKER, checkpoint_path, folders, is_ours
from megalite.errors import CheckpointError
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, ObjectPath

_LEFT_OVER = re.compile(r"iter_(\d{7,})\.(tmp|replaced)")
_FILE = re.compile(r"(?:rank_\d+|__\d+_\d+)(?:\.([0-9a-f]{8}))?\.(?:safetensors|distcp)")


def new_transaction(directory: AnyPath, iteration: int, mesh: ParallelMesh) -> SaveTransaction:
    """Return a transaction that saves an iteration. Every rank calls it and gets the same transaction.

    Only one rank calls `begin`, `commit` and `abandon`.
    """
    if isinstance(directory, Path):
        return FolderTransaction(directory, iteration)
    return ObjectTransaction(directory, iteration, mark=all_gather_json(secrets.token_hex(4), mesh)[0])


@dataclass(frozen=True)
class FolderTransaction:
    """Transaction on a file system."""

    directory: Path
    iteration: int

    @property
    def path(self) -> Path:
        """Final folder of the checkpoint."""
        return checkpoint_path(self.directory, self.iteration)

    @property
    def folder(self) -> Path:
        """Folder into which the files are written."""
        return _temporary(self.path)

    def file(self, name: str) -> Path:
        """Return the path for writing a file such as `rank_00000.safetensors`; its name is the name in the manifest."""
        return self.folder / name

    def begin(self) -> None:
        """Remove leftovers of unfinished saves, and create the folder for the files.

        Raises OSError, or CheckpointError if something else has the checkpoint's name.
        """
        clear_away(self.directory)
        if self.path.exists() and not is_ours(self.path):
            raise _foreign(self.path)
        self.folder.mkdir(parents=True)

    def commit(self, manifest_text: str) -> None:
        """Add the manifest, give the folder its final name, and set the tracker. Each stage is first synced to disk.

        Raises OSError if the disk fails. All names are then restored, unless only the last sync failed.
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
        """Remove all files of this transaction."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class ObjectTransaction:
    """Transaction on an object store. Its methods have the meaning of those of `FolderTransaction`, unless noted."""

    directory: ObjectPath
    iteration: int
    mark: str
    """Text in the names of this transaction's files."""

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
            with suppress(OSError):  # leftovers only take space
                folder.remove(_left_over(folder))
        there = self.path.listing()
        ours = any(mark or name.startswith("rank_") for name, mark in _files(there).items())
        if there and manifest.NAME not in there and not ours:
            raise _foreign(self.path)

    def commit(self, manifest_text: str) -> None:
        before = _files(self.path.listing())
        (self.path / manifest.NAME).put(manifest_text.encode())
        (self.directory / TRACKER).put(f"{self.iteration}\n".encode())
        with suppress(OSError):  # the next save tries again
            self.path.remove([name for name, mark in before.items() if mark != self.mark])

    def abandon(self) -> None:
        """Remove all files of this transaction, unless the store has its manifest.

        The store may have written the manifest and still reported an error.
        """
        with suppress(OSError):
            self.path.remove(_left_over(self.path))


SaveTransaction = FolderTransaction | ObjectTransaction


def clear_away(directory: Path) -> None:
    """Remove leftovers of unfinished saves from a run directory. Raises OSError."""
    for path in directory.glob("iter_*"):
        if match := _LEFT_OVER.fullmatch(path.name):
            of_that = checkpoint_path(directory, int(match[1]))
            if not path.is_dir():
                path.unlink()
            elif match[2] == "replaced" and not of_that.exists():
                os.rename(path, of_that)
            else:
                shutil.rmtree(path, ignore_errors=True)  # leftovers only take space


def remove(path: AnyPath) -> None:
    """Remove a checkpoint. After a crash in between, the next save removes the rest. Raises OSError."""
    if isinstance(path, Path):
        os.rename(path, _temporary(path))
        shutil.rmtree(_temporary(path))
    else:
        path.remove([manifest.NAME])
        path.remove(list(path.listing()))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _foreign(path: AnyPath) -> CheckpointError:
    return CheckpointError(f"{path} already exists and is not a checkpoint of this program: move it away")


def _files(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names of checkpoint files, each with the mark of its transaction, or None for a copied file."""
    return {name: match[1] for name in names if (match := _FILE.fullmatch(name))}


def _left_over(folder: ObjectPath) -> Collection[str]:
    """Return the files of a folder that belong to a transaction but not to a checkpoint."""
    there = folder.listing()
    marks = _files(there)
    if manifest.NAME not in there:
        return [name for name, mark in marks.items() if mark]
    if len(set(marks.values())) < 2:
        return ()  # avoids reading the manifest, which may be large
    try:
        named = manifest.read_manifest(folder).files
    except CheckpointError:
        return ()  # a damaged checkpoint is left unchanged
    return [name for name in marks if name not in named]


def _write_synced(path: Path, text: str) -> None:
    with path_in_errors(path), open_itself(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
