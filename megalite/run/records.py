"""The records of a run, in metrics.jsonl and its sinks, and the decisions in its ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from megalite.config.run import TaskConfig
from megalite.entry_points import entry_point
from megalite.lifecycle.control_files import has_file
from megalite.storage import AnyPath, open_directory
from megalite.training.ledger import Decision, Ledger
from megalite.training.metrics import Metrics, MetricsWriter, Sink
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import DATA, EVALUATION, SAVE, START, STEP

LEDGER = "ledger.jsonl"
"""File of the run directory with decisions that depart from the plain rule, if there are any."""
_TIMES = {
    "data_time_s": (STEP, DATA),
    "save_time_s": (SAVE, SAVE),
    "evaluation_time_s": (EVALUATION, EVALUATION),
    "start_time_s": (START, START),
}
"""Sections whose seconds records have, with the section around them."""
LEAST_TIME = 1e-3
"""Seconds of a section that a record does not tell: a look at a save in the background takes less."""


class Records:
    """Writer of the records and decisions of a trainer's run. Rank 0 writes, and `tell` shows its warnings."""

    def __init__(self, trainer: Trainer, tell: Callable[[str], None]) -> None:
        self.trainer, self._tell = trainer, tell
        self._metrics, self._files = MetricsWriter(), ExitStack()
        self._ledger: Ledger | None = None

    def open(self, decisions: Sequence[Decision] = ()) -> None:
        """Open the files, without the lines of steps that are run again.

        `decisions`: are recorded, behind those of the checkpoint's loading, as of the next step: another start from
        here, or going back to here, replaces them.
        """
        trainer, directory = self.trainer, self.trainer.directory
        self._metrics = self._files.enter_context(self._open_metrics())
        self._warn(self._metrics.note)
        if trainer.mesh.rank == 0 and directory is not None and has_file(directory / LEDGER):
            self._open_ledger(directory)
        found = trainer.loaded.decisions
        trainer.loaded = replace(trainer.loaded, records=None, decisions=())  # the file has been checked
        if found or decisions:
            self.write_decisions([*found, *decisions], trainer.iteration + 1)

    def write(self, metrics: Metrics) -> None:
        """Write a record, with what this rank has spent since the last one."""
        times = {}
        for key, section in _TIMES.items():
            if (seconds := self.trainer.sections.spent.pop(section, 0.0)) > LEAST_TIME:
                times[key] = seconds
        self._warn(self._metrics.write(replace(metrics, extra={**metrics.extra, **times})))

    def write_decisions(self, decisions: Sequence[Decision], step: int | None = None) -> None:
        """Write decisions that a step, or what follows it, has made into DIR/ledger.jsonl.

        `step`: None for the last one.
        """
        directory, last = self.trainer.directory, self.trainer.iteration
        if self.trainer.mesh.rank == 0 and directory is not None:
            self._warn((self._ledger or self._open_ledger(directory)).write(last if step is None else step, decisions))

    def publish(self) -> None:
        """Publish all lines so far, before a checkpoint."""
        self._metrics.publish()
        if self._ledger is not None:
            self._ledger.publish()

    def close(self, *error: Any) -> None:
        """Close the files, as at the end of a block. `error`: that of the block, if there is one.

        Raises CheckpointError if they cannot be written, and there is no error yet.
        """
        self._ledger = None
        self._files.__exit__(*(error or (None, None, None)))

    def _open_metrics(self) -> MetricsWriter:
        """Return the writer of the records on rank 0, and one that writes nothing on the others."""
        trainer = self.trainer
        if trainer.mesh.rank != 0:
            return MetricsWriter()
        config, directory = trainer.config, trainer.directory

        def open_sinks() -> Sequence[Sink]:
            wanted = config.reporting.wanted(config.checkpoint.save, config.logging.tensorboard_dir)
            of_run = directory, trainer.iteration, trainer.consumed_samples, trainer.mesh.world_size
            return entry_point("sinks")(config, wanted, *of_run, self._tell) if wanted else ()

        return MetricsWriter(
            metrics_path(config, directory),
            trainer.iteration,
            evaluation_left=trainer.evaluation_left,
            recorded=trainer.loaded.records,
            open_sinks=open_sinks,
        )

    def _open_ledger(self, directory: AnyPath) -> Ledger:
        self._ledger = self._files.enter_context(Ledger(directory / LEDGER, self.trainer.iteration))
        self._warn(self._ledger.note)
        return self._ledger

    def _warn(self, note: str | None) -> None:
        if note is not None:
            self._tell(note)


def metrics_path(config: TaskConfig, directory: AnyPath | None) -> AnyPath | None:
    """Return the file that the metrics of a run are written to, or None if there is none."""
    if config.logging.metrics_path:
        return open_directory(config.logging.metrics_path)
    return None if directory is None else directory / "metrics.jsonl"
