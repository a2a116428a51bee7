"""Sinks of a run, from its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.config.reporting import SinkName
from megalite.config.run import TaskConfig
from megalite.errors import CheckpointError
from megalite.extras.sinks.curves import Curves
from megalite.extras.sinks.description import Description, configuration_text
from megalite.extras.sinks.link import ServiceProcess
from megalite.small_files import reason
from megalite.storage import AnyPath
from megalite.training.metrics import Sink


def sinks(
    config: TaskConfig,
    wanted: Sequence[SinkName],
    directory: AnyPath | None,
    iteration: int,
    consumed_samples: int,
    world_size: int,
    tell: Callable[[str], None],
) -> list[Sink]:
    """Return the sinks that are wanted, of a run that continues after `iteration`. Rank 0 calls this.

    Args:
        directory: the run directory.
        consumed_samples: samples until the first step.
        tell: takes a message to the user.

    Raises:
        CheckpointError: TensorBoard's files cannot be written.
    """
    made: list[Sink] = []
    if "tensorboard" in wanted:
        made.append(_tensorboard(config, directory, iteration, consumed_samples))
    services = tuple(name for name in wanted if name != "tensorboard")
    if services:
        where = None if directory is None else str(directory)
        text = configuration_text(config)
        try:
            made.append(ServiceProcess(Description(services, where, consumed_samples, text, world_size), tell))
        except OSError as error:  # too many processes, or too little memory
            tell(f"WARNING: the process of the services of --report-to could not start ({error}): they get nothing")
    return made


def _tensorboard(config: TaskConfig, directory: AnyPath | None, iteration: int, consumed_samples: int) -> Sink:
    """Return the sink that writes TensorBoard's files. Raises CheckpointError."""
    from megalite.extras.sinks.tensorboard_events import TensorBoardEvents

    logging = config.logging
    assert logging.tensorboard_dir or isinstance(directory, Path)
    folder = Path(logging.tensorboard_dir) if logging.tensorboard_dir else Path(str(directory)) / "tensorboard"
    try:
        return TensorBoardEvents(
            folder,
            configuration_text(config),
            Curves(consumed_samples, () if logging.log_loss_scale_to_tensorboard else ("loss_scale",)),
            iteration=iteration,
            consumed_samples=consumed_samples,
            step_interval=logging.tensorboard_log_interval,
        )
    except OSError as error:
        raise CheckpointError(
            f"writing TensorBoard's events to {folder} failed: {reason(error)}. Free space, or choose another --save "
            "or --tensorboard-dir"
        ) from error
