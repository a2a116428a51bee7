"""Notes on flags that count samples or steps, when samples have another length than before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megalite.config import RunConfig
from megalite.config.fields import flag_of

_COUNTING_SAMPLES = ("train_samples", "rampup_batch_size")


def unit_notes(saved: Mapping[str, Any], config: RunConfig, former: int) -> tuple[str, ...]:
    """Return notes on flags whose numbers mean something else now.

    Args:
        saved: the configuration of the checkpoint.
        config: that of this run.
        former: tokens of a sample in the checkpoint's run.
    """
    length, training = config.data.seq_length, config.training
    names = [each for each in _COUNTING_SAMPLES if getattr(training, each) is not None]
    names += [each.name for each in fields(config.optimizer) if each.name.endswith("_samples")]
    given = [name for name in names if getattr(config.optimizer, name, True)]
    notes = []
    if given:
        notes.append(
            f"{', '.join(map(flag_of, given))} count samples of {length:,} tokens now, not of {former:,}: to keep a "
            f"place in the run, multiply the former numbers by {former} / {length}"
        )
    batch, before = training.global_batch_size or 0, saved.get("training", {}).get("global_batch_size")
    if before and batch * length != before * former:
        notes.append(
            f"a step has {batch * length:,} tokens now, and had {before * former:,}: what is given in steps "
            "(--train-iters, --lr-decay-iters, --lr-warmup-iters) is at another place of the run; "
            f"--global-batch-size {before * former / length:g} would keep it"
        )
    return tuple(f"WARNING: --seq-length {length}: {note}" for note in notes)
