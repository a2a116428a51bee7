"""Folders that appear under their name complete or not at all, and messages for a failing disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.atomic_files import remove_leftovers, sync_directory, temporary_path
from megalite.errors import CheckpointError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise CheckpointError if the block, which writes into a folder, raises OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"writing {folder} failed: {error}. Free space, or choose another folder") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `folder` at the end of the block and may replace an empty folder.

    Raises CheckpointError, and leaves nothing behind, if the disk fails.
    """
    temporary = temporary_path(folder)
    try:
        with writing(folder):
            remove_leftovers(folder)
            if folder.exists():
                folder.rmdir()  # now: where it cannot go, as a mount point cannot, nothing could take its name either
            temporary.mkdir(parents=True)
            yield temporary
            os.rename(temporary, folder)
            sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
