"""`touch DIR/STOP` while a run starts: while it reads flags, builds indices, waits for other ranks and loads.

There is nothing to save yet, so the process ends as after SIGTERM. A thread in one process per node looks for the file,
since ranks cannot communicate before the rendezvous. This needs no torch. From the first step on, control_files.py is
used instead, and the ranks agree on stopping.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.config import RunConfig
from megalite.config.checkpoint import is_url
from megalite.entry_points import entry_point
from megalite.errors import EXIT_RESUMABLE
from megalite.lifecycle.deadline import job_end
from megalite.lifecycle.failure import write_exit_code
from megalite.process.launchers import GENERATION
from megalite.process.output import say
from megalite.process.place import Place
from megalite.storage import AnyPath, open_directory

STOP = "STOP"
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_REQUESTS = 20.0  # longer than for a file, because an object store bills each request


class Startup:
    """State of a run's start, until its first step. Create it at the beginning of `main`."""

    def __init__(self, place: Place) -> None:
        self._generation: Any = entry_point("generation")() if GENERATION in os.environ else None
        self.began = time.monotonic() if self._generation is None else self._generation.began
        """Start of the program, as `time.monotonic` in seconds."""
        self.job_end, note = job_end(os.environ, time.time())
        """End of the job in Unix seconds (deadline.py); None if it is not known."""
        self.notes = () if note is None else (note,)
        self.preexisting_stop: object = None
        """`identity` of a STOP from before this run; None if there was none, or if this rank does not look for it."""
        self._place = place
        self._over = threading.Event()
        self._store: object = None

    def announce(self, config: RunConfig) -> None:
        """Print on rank 0 which run starts, before the slow import of torch and opening of the data.

        Raises BrokenPipeError if nobody reads the output.
        """
        if self._place.rank != 0:
            return
        model = config.model
        where = config.parallel.layout(config.synchronization.workers(self._place.world_size))
        try:
            say(f"starting: {model.num_layers} layers, hidden {model.hidden_size}, on {where}")
        except BrokenPipeError:
            raise
        except OSError:
            pass  # a full disk does not end the run, here or later

    def watch_stop_file(self, save: str | None) -> None:
        """Start watching for a STOP that appears in --save or is touched: it ends the process with exit code 85."""
        if save is None or (self._place.local_rank != 0 and self._place.rank != 0):
            return
        path = open_directory(save) / STOP
        self.preexisting_stop = identity(path) if self._generation is None else self._generation.stop
        interval = SECONDS_BETWEEN_REQUESTS if is_url(save) else SECONDS_BETWEEN_LOOKS
        threading.Thread(target=self._look, args=(path, interval), name="STOP", daemon=True).start()

    def open_store(self) -> None:
        """Open rank 0's store early: a rank that fails while rank 0 reads its data can then leave its error there."""
        if self._place.world_size > 1 and self._place.rank == 0:
            from megalite.lifecycle.rendezvous import open_early

            self._store = open_early(self._place)

    def finish(self, iteration: int) -> float:
        """Stop watching. From now on the training loop handles STOP, including one created since the last look.

        `iteration`: the step after which the run goes on. Returns the seconds that the start has taken, or 0 if it was
        over before.
        """
        seconds = 0.0 if self._over.is_set() else time.monotonic() - self.began
        self._over.set()
        if self._generation is not None:
            self._generation.tell_begun(iteration)
        return seconds

    def _look(self, path: AnyPath, interval: float) -> None:
        while not self._over.wait(interval):
            if identity(path) not in (None, self.preexisting_stop) and not self._over.is_set():
                if self._place.rank == 0:
                    write_exit_code(EXIT_RESUMABLE)
                    with suppress(OSError):  # the output may be closed or its disk full
                        say(f"stopped while the run was starting, by {path}: nothing is lost")
                os.kill(os.getpid(), signal.SIGTERM)  # raises in the main thread, which cleans up unfinished work
                return


def identity(path: AnyPath) -> object:
    """Return a value that changes when the file is replaced or touched; None if the file is missing or unreadable."""
    try:
        if isinstance(path, Path):
            status = path.stat()
            return status.st_mtime_ns, status.st_ino
        return path.modified()
    except OSError:
        return None
