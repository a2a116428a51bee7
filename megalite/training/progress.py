"""`--log-progress`: the course of a run over all its starts, a line each, in DIR/progress.txt."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint import AnyPath


class Progress:
    """Appends lines to the file of a run directory; without one, does nothing."""

    def __init__(self, directory: AnyPath | None, world_size: int) -> None:
        self._path = directory / "progress.txt" if isinstance(directory, Path) else None
        self._world_size = world_size

    def write(self, text: str) -> None:
        """Append one line with the time, the job and the number of ranks, separated by tabs.

        A full disk loses the line: the run does not depend on it.
        """
        if self._path is None:
            return
        when, job = time.strftime("%Y-%m-%d %H:%M:%S"), os.environ.get("SLURM_JOB_ID", "none")
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{when}\tjob {job}\t{self._world_size} ranks\t{text}\n")
