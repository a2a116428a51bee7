"""The learning rate as a pure function of the samples consumed so far: nothing to save, nothing to restore.

The shapes and their edges are Megatron-LM's (optimizer_param_scheduler.py), so a schedule carried over gives the
same numbers. In particular the rate of a step is read before its samples are counted: with a warm-up from 0, the
first step of a run has the learning rate 0 and moves nothing but the optimizer's moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config import OptimizerConfig, TrainingConfig

# How far above the minimum the rate stands, from 1 to 0, when a fraction 0 to 1 of the decay has passed.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1.0 - passed,
    "cosine": lambda passed: 0.5 * (math.cos(math.pi * passed) + 1.0),
    "exponential": lambda passed: 2.0 * 0.5**passed - 1.0,
    "minus_sqrt": lambda passed: 1.0 - math.sqrt(passed),
}


@dataclass(frozen=True)
class Rates:
    """By what one step of the optimizer multiplies."""

    learning_rate: float
    token_table_learning_rate: float
    """Of the word embedding and the output layer (Megatron-LM's decoupled rate)."""
    weight_decay: float
    """Of what has any."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """A linear warm-up, then a decay. All lengths are in samples, counted from the start of the run.

    style: constant, linear, cosine, inverse-square-root, or WSD (warm-up, stable, decay), which holds the maximum
    until `wsd_decay_samples` before the end and then falls by `wsd_style` (linear, cosine, exponential, minus_sqrt).
    Beyond `decay_samples` the rate is the minimum, whatever the style (but constant).
    """

    maximum: float
    minimum: float = 0.0
    initial: float = 0.0
    warmup_samples: float = 0.0
    decay_samples: float = 0.0
    style: str = "linear"
    wsd_style: str = "exponential"
    wsd_decay_samples: float = 0.0

    def at(self, consumed_samples: int) -> float:
        """The learning rate of the step that starts when `consumed_samples` have been consumed."""
        if consumed_samples <= self.warmup_samples and self.warmup_samples > 0:
            return self.initial + (self.maximum - self.initial) * consumed_samples / self.warmup_samples
        if self.style == "constant":
            return self.maximum
        if consumed_samples > self.decay_samples:
            return self.minimum
        if self.style == "inverse-square-root":
            ratio = max(self.warmup_samples, 1.0) / max(consumed_samples, 1)
            return max(self.minimum, self.maximum * math.sqrt(ratio))
        return self.minimum + (self.maximum - self.minimum) * self._height(consumed_samples)

    def _height(self, consumed_samples: int) -> float:
        """Where the rate stands between the minimum, 0, and the maximum, 1."""
        if self.style == "WSD":
            start, shape = self.decay_samples - self.wsd_decay_samples, _SHAPES[self.wsd_style]
        else:
            start, shape = self.warmup_samples, _SHAPES[self.style]
        if consumed_samples <= start:
            return 1.0
        return shape((consumed_samples - start) / (self.decay_samples - start))


def learning_rate_schedule(
    optimizer: OptimizerConfig, training: TrainingConfig, global_batch_size: int
) -> LearningRateSchedule:
    """The schedule of a run. Lengths given in iterations count `global_batch_size` samples each; where no length of
    the decay is given it is the whole run's, and a warm-up fraction is a fraction of the decay."""
    run = _samples(training.train_iters, training.train_samples, global_batch_size)
    decay = _samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples, global_batch_size) or run
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    else:
        warmup = _samples(optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, global_batch_size)
    wsd_decay = _samples(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples, global_batch_size)
    return LearningRateSchedule(
        maximum=optimizer.lr,
        minimum=optimizer.min_lr,
        initial=optimizer.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        style=optimizer.lr_decay_style,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_decay_samples=wsd_decay,
    )


def _samples(iterations: int | None, samples: int | None, global_batch_size: int) -> float:
    """A length that a user gives either in iterations or in samples; 0 where neither is given."""
    return float(iterations * global_batch_size if iterations else samples or 0)
