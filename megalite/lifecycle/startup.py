"""`touch DIR/STOP` while a run starts: reading flags, building indices, meeting the other ranks, loading.

There is nothing to save yet, so the process ends, as after SIGTERM. One process per node looks, from a thread, since
ranks cannot communicate before all have met. It does not need torch. When the loop begins, control_files.py takes over,
and the ranks agree.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config import RunConfig
from megalite.config.checkpoint import is_url
from megalite.errors import EXIT_RESUMABLE
from megalite.lifecycle.deadline import job_end
from megalite.lifecycle.failure import leave_code
from megalite.process.place import Place

if TYPE_CHECKING:
    from megalite.checkpoint import AnyPath

STOP = "STOP"
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_REQUESTS = 20.0  # an object store bills each


class Startup:
    """Start of a run, until its first step: watches for a stop request. Create it first thing in `main`."""

    def __init__(self, place: Place) -> None:
        self.began = time.monotonic()
        """Time when the program began, by `time.monotonic`."""
        self.job_end, note = job_end(os.environ, time.time())
        """End of the job, in Unix seconds (deadline.py); None if that is not known."""
        self.notes = () if note is None else (note,)
        self.preexisting_stop: object = None
        """The STOP that was there before this run (`identity`); None if there was none, or if this rank does not look.
        """
        self._place = place
        self._over = threading.Event()
        self._store: object = None

    def announce(self, config: RunConfig) -> None:
        """Say what starts, on rank 0: data and torch take a while. Raises BrokenPipeError if nobody reads it."""
        if self._place.rank != 0:
            return
        model, where = config.model, config.parallel.layout(self._place.world_size)
        try:
            print(f"starting: {model.num_layers} layers, hidden {model.hidden_size}, on {where}", flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            pass  # a full disk, which does not end a run later either

    def watch_stop_file(self, save: str | None) -> None:
        """Watch, from now on, for a STOP that appears in --save or is touched; it ends the process with code 85."""
        if save is None or (self._place.local_rank != 0 and self._place.rank != 0):
            return
        path = _directory(save) / STOP
        self.preexisting_stop = identity(path)
        interval = SECONDS_BETWEEN_REQUESTS if is_url(save) else SECONDS_BETWEEN_LOOKS
        threading.Thread(target=self._look, args=(path, interval), name="STOP", daemon=True).start()

    def open_store(self) -> None:
        """Open rank 0's store, so that a rank that fails while rank 0 reads data leaves its error there."""
        if self._place.world_size > 1 and self._place.rank == 0:
            from megalite.lifecycle.rendezvous import open_early

            self._store = open_early(self._place)

    def over(self) -> None:
        """Stop watching. The training loop handles STOP files from here on, also one created since the last look."""
        self._over.set()

    def _look(self, path: AnyPath, interval: float) -> None:
        while not self._over.wait(interval):
            if identity(path) not in (None, self.preexisting_stop) and not self._over.is_set():
                if self._place.rank == 0:
                    leave_code(EXIT_RESUMABLE)
                    with suppress(OSError):  # nobody reads the output any more
                        print(f"stopped while the run was starting, by {path}: nothing is lost", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, where what is half done is cleared away
                return


def identity(path: AnyPath) -> object:
    """Return a value that changes when the file is replaced or touched; None if there is no file, or it cannot be
    read."""
    try:
        if isinstance(path, Path):
            status = path.stat()
            return status.st_mtime_ns, status.st_ino
        return path.modified()
    except OSError:
        return None


def _directory(save: str) -> AnyPath:
    if not is_url(save):
        return Path(save)
    from megalite.checkpoint import open_directory  # for an object store torch comes first

    return open_directory(save)
