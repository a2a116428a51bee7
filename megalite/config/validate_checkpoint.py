"""Relations between the flags of saving and loading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from megalite.config.checkpoint import CheckpointConfig, is_url
from megalite.config.run import RunConfig

_OF_SAVE = """save_interval save_retain_interval save_optim async_save ckpt_format tolerated_save_failures log_progress
    resume"""
_OF_LOAD = "ckpt_step finetune load_optim"
_OF_EITHER = "exit_on_missing_checkpoint load_casts use_checkpoint_args"


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """A line for each relation that does not hold."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        for flag in _given(checkpoint, _OF_SAVE):
            yield f"{flag} needs --save, the run directory"
    elif is_url(checkpoint.save) and checkpoint.ckpt_format != "megalite":
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} needs a --save that is a folder, not {checkpoint.save}, where "
            "its .metadata would be overwritten before the new checkpoint is there"
        )
    if checkpoint.save is not None and is_url(checkpoint.save) and checkpoint.log_progress:
        yield f"--log-progress appends to a file in --save, which must be a folder, not {checkpoint.save}"
    if config.logging.tensorboard_dir is not None and is_url(config.logging.tensorboard_dir):
        yield f"--tensorboard-dir {config.logging.tensorboard_dir}: TensorBoard's files grow, which needs a folder"
    metrics = config.logging.metrics_path
    if metrics is not None and not is_url(metrics) and os.path.isdir(metrics):
        yield f"--metrics-path {metrics} is a folder: give a file, as {metrics.rstrip('/')}/metrics.jsonl"
    if checkpoint.load is None:
        for flag in _given(checkpoint, _OF_LOAD):
            yield f"{flag} needs --load, the run directory to load from"
        if checkpoint.resume is None:
            for flag in _given(checkpoint, _OF_EITHER):
                yield f"{flag} needs --load or --resume auto"
    yield from _one_directory(checkpoint)
    yield from _intervals(checkpoint)


def _one_directory(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Refuse options that --load and --save of one directory leave without a meaning."""
    if checkpoint.loads_where_it_saves and checkpoint.resume == "auto":
        for flag in _given(checkpoint, _OF_LOAD):
            yield (
                f"{flag} is for the checkpoint of --load, and --resume auto continues the newest of --save, which is "
                "the same directory: drop one of the two, or save elsewhere"
            )
    elif checkpoint.loads_where_it_saves and checkpoint.finetune:
        yield "--finetune begins a new run at step 0: save it into another directory than --load"
    if not checkpoint.save_optim and checkpoint.resume == "auto":
        yield "--resume auto continues with the optimizer's state, which --no-save-optim does not save: drop one"


def _intervals(checkpoint: CheckpointConfig) -> Iterator[str]:
    retained, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retained is not None and interval is None:
        yield f"--save-retain-interval {retained} needs --save-interval"
    elif retained is not None and interval is not None and retained % interval:
        yield f"--save-retain-interval {retained} is no multiple of --save-interval {interval}: few steps are of both"


def _given(checkpoint: CheckpointConfig, names: str) -> Iterator[str]:
    """Return those of the named flags that differ from their defaults, as they were given."""
    kinds = {field.name: field.default for field in fields(checkpoint)}
    for name in names.split():
        value, flag = getattr(checkpoint, name), name.replace("_", "-")
        if value is False and kinds[name] is True:
            yield f"--no-{flag}"
        elif value != kinds[name]:
            yield f"--{flag}" if value is True else f"--{flag} {value}"
