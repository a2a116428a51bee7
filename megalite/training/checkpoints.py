"""Checkpointing policy of a run: asynchronous saves, messages, tolerated failures, removal of old checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megalite import checkpoint
from megalite.atomic_files import open_itself
from megalite.checkpoint import FORMATS, Plan, Saver, TrainingState
from megalite.config import CheckpointConfig
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.process.bounded import in_thread
from megalite.storage import AnyPath
from megalite.training.display import Display

_SECONDS_OF_ANY_SAVE, _BYTES_A_SECOND = 5.0, 100e6
"""Pessimistic figures per rank, from which the duration of the first save is estimated."""


class Checkpoints:
    """The saves of a run. All ranks call `save` and `advance` together."""

    def __init__(self, settings: CheckpointConfig, directory: AnyPath, optimizer: Optimizer, plan: Plan) -> None:
        self._settings, self._directory, self._rank = settings, directory, plan.mesh.rank
        self._saver = Saver(
            directory,
            optimizer,
            plan,
            file_format=FORMATS[settings.ckpt_format],
            state=settings.save_optim,
            asynchronous=settings.async_save,
        )
        self._world_size = plan.mesh.whole.world_size
        self._removal: Future[tuple[str, ...]] | None = None
        self._failures = 0
        self._newest: AnyPath | None = None
        self._began, self._stood_still, self._longest = 0.0, 0.0, 0.0
        # When a rank was last seen busy; and for how many seconds of the save its background work was already complete.
        self._seen_busy = self._unnoticed = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages to show when the run starts."""
        if self._saver.staging is None:
            return ()
        return (f"asynchronous saves: {self._saver.staging.size / 2**20:,.0f} MiB of host memory on rank 0",)

    @property
    def flags(self) -> tuple[bool, bool]:
        """Flags of this rank, busy and failed. They must be combined over all ranks for `advance`."""
        return self._saver.busy, self._saver.failed

    @property
    def seconds(self) -> float:
        """Duration of the longest save of this run until it is complete on disk; an estimate before the first save."""
        return self._longest or _SECONDS_OF_ANY_SAVE + self._saver.size / _BYTES_A_SECOND

    def save(self, training: TrainingState, config: dict[str, Any], display: Display, *, last: bool) -> None:
        """Save the current state. With --async-save the write runs in the background, except for the `last` save.

        Up to --tolerated-save-failures consecutive failures are only reported: training continues, and a later save may
        succeed. Raises CheckpointError for the next failure, or if the last save fails.
        """
        self._finish(display, last=False, another=last)
        self.settle(display)  # a new save also clears partly removed checkpoints: both must not run at the same time
        with self._tolerating(display, last=last):
            self._began, self._unnoticed = time.perf_counter(), 0.0
            self._saver.begin(training, config)
            self._stood_still = time.perf_counter() - self._began
        if last or not self._settings.async_save:
            self._finish(display, last=last)

    def advance(self, busy: bool, failed: bool, display: Display) -> None:
        """Continue a background save if no rank is still busy. `busy` and `failed` are combined over all ranks."""
        if not self._saver.under_way:
            return
        now = time.perf_counter()
        if busy:
            self._seen_busy = now
        else:  # the background work may have ended earlier, for example during an evaluation
            self._unnoticed += now - max(self._saver.ended, self._seen_busy)
        if failed or not busy:
            self._advance(display, last=False)

    def finish(self, display: Display) -> None:
        """Wait until a save in the background is complete, and old checkpoints are removed. All ranks call it."""
        self._finish(display, last=False)
        self.settle(display)

    def _finish(self, display: Display, *, last: bool, another: bool = False) -> None:
        while self._saver.under_way:
            self._advance(display, last=last, another=another)

    def settle(self, display: Display) -> None:
        """Wait for the removal of old checkpoints in the background. Called before each save and at the end."""
        removal, self._removal = self._removal, None
        if removal is not None:
            for note in removal.result():
                display.message(note)

    def _advance(self, display: Display, *, last: bool, another: bool = False) -> None:
        with self._tolerating(display, last=last, another=another):
            path = self._saver.advance()
            if path is not None:
                self._failures, self._newest = 0, path
                seconds = time.perf_counter() - self._began - self._unnoticed
                self._longest = max(self._longest, seconds)
                still = f", training was paused for {self._stood_still:.2f} s" if self._settings.async_save else ""
                display.message(f"saved {path} in {seconds:.1f} s{still}")
                self.log_progress(f"saved {path.name}")
                self._remove_old()

    @contextmanager
    def _tolerating(self, display: Display, *, last: bool, another: bool = False) -> Iterator[None]:
        """Report a CheckpointError of the block instead of raising it, as long as failures are tolerated.

        Args:
            last: this is the last save of the run; its failure is always raised.
            another: the last save follows at once; a failure of this one is always tolerated.
        """
        try:
            yield
        except CheckpointError as error:
            self._failures += 1
            tolerated = self._settings.tolerated_save_failures
            if last or (self._failures > tolerated and not another):
                newest = "none" if self._newest is None else self._newest.name
                raise CheckpointError(f"{error}\nThe last checkpoint that this run has saved: {newest}") from error
            display.message(
                f"WARNING: {error}\nTraining continues, unsaved: failure {self._failures} of {tolerated} that "
                "--tolerated-save-failures allows in a row"
            )

    def _remove_old(self) -> None:
        """Start the removal of old checkpoints in the background, since it may take long on some file systems."""
        interval = self._settings.save_retain_interval
        if interval is not None and self._rank == 0:
            self._removal = in_thread(partial(checkpoint.remove_old, self._directory, interval))

    def log_progress(self, text: str) -> None:
        """Append a line with time, job and number of ranks to DIR/progress.txt, if `--log-progress` is given.

        If the disk is full, the line is lost and the run continues.
        """
        if not self._settings.log_progress or self._rank != 0 or not isinstance(self._directory, Path):
            return
        when, job = time.strftime("%Y-%m-%d %H:%M:%S"), os.environ.get("SLURM_JOB_ID", "none")
        with suppress(OSError), open_itself(self._directory / "progress.txt", "a", encoding="utf-8") as file:
            file.write(f"{when}\tjob {job}\t{self._world_size} ranks\t{text}\n")

    def close(self) -> None:
        """Abandon a save that is in progress, because the run ends before it is complete."""
        self._saver.close()
