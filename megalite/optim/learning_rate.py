"""Learning rates and weight decay as pure functions of the consumed samples. There is no state to save or restore.

The schedules are those of Megatron-LM (optimizer_param_scheduler.py), including their boundary cases: the same flags
give the same numbers. In particular, the learning rate of a step does not count the samples of this step. With a
warm-up from 0, the first step of a run has the learning rate 0 and changes only the optimizer's moments. Megatron-LM
has no noam schedule; here it counts steps from 1, as in its paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megalite.config.optimizer import OptimizerConfig, noam_maximum
from megalite.config.training import TrainingConfig
from megalite.errors import MegaliteError
from megalite.optim.layout import ParameterGroup

# Each function maps the fraction of the decay that has passed (0 to 1) to the remaining height (1 to 0).
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1.0 - passed,
    "cosine": lambda passed: 0.5 * (math.cos(math.pi * passed) + 1.0),
    "exponential": lambda passed: 2.0 * 0.5**passed - 1.0,
    "minus_sqrt": lambda passed: 1.0 - math.sqrt(passed),
}


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay of one optimizer step."""

    learning_rate: float
    token_table_learning_rate: float
    """Learning rate of the word embedding and the output layer (Megatron-LM's decoupled learning rate)."""
    weight_decay: float
    """Weight decay of the parameters that are decayed."""

    def of(self, group: ParameterGroup) -> tuple[float, float]:
        """Return the learning rate and the weight decay of a parameter group."""
        rate = self.token_table_learning_rate if group.is_embedding_or_output else self.learning_rate
        return rate, self.weight_decay if group.weight_decay else 0.0


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then a decay. All lengths are in samples, counted from the start of the run.

    `style` is one of:

    - constant, linear, cosine, inverse-square-root.
    - WSD (warm-up, stable, decay): the rate stays at the maximum until `wsd_decay_samples` before the end, then decays
      by `wsd_style` (linear, cosine, exponential, minus_sqrt).
    - noam (Vaswani et al. 2017, equation 3): the rate is proportional to min(step / warmup, sqrt(warmup / step)). Steps
      are counted from 1, so the maximum is reached at the last step of the warm-up. After the warm-up the rate is never
      below the minimum. One step is `step_samples` samples; during a ramp-up of the batch size, a smaller batch counts
      as the corresponding fraction of a step.

    After `decay_samples` the rate is the minimum, except with constant and noam, which have no end.
    """

    maximum: float
    minimum: float = 0.0
    initial: float = 0.0
    warmup_samples: float = 0.0
    decay_samples: float = 0.0
    style: str = "linear"
    wsd_style: str = "exponential"
    wsd_decay_samples: float = 0.0
    step_samples: int = 0
    """Number of samples per step, for noam."""

    def at(self, consumed_samples: int) -> float:
        """Return the learning rate of the step that starts after `consumed_samples` samples."""
        if self.style == "noam":
            return self._noam(consumed_samples + self.step_samples)
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

    def _noam(self, samples: int) -> float:
        """Return the rate of noam; `samples` includes the samples of this step."""
        if samples < self.warmup_samples:
            return self.maximum * samples / self.warmup_samples
        return max(self.minimum, self.maximum * math.sqrt(self.warmup_samples / samples))

    def _height(self, consumed_samples: int) -> float:
        """Return the position of the rate between the minimum (0) and the maximum (1)."""
        if self.style == "WSD":
            start, shape = self.decay_samples - self.wsd_decay_samples, SHAPES[self.wsd_style]
        else:
            start, shape = self.warmup_samples, SHAPES[self.style]
        if consumed_samples <= start:
            return 1.0
        return shape((consumed_samples - start) / (self.decay_samples - start))


Factor = Callable[[int], float]
"""Function from the number of steps before a step to the factor of its learning rate."""


@dataclass(frozen=True)
class FactorSchedule(LearningRateSchedule):
    """Schedule that a program gives as a function: the rate is `maximum` times its factor."""

    factor: Factor = lambda step: 1.0

    def at(self, consumed_samples: int) -> float:
        """Return the learning rate of a step. Raises MegaliteError if the function returns no possible factor."""
        return self.maximum * factor_at(self.factor, consumed_samples // self.step_samples)


def factor_at(factor: Factor, step: int) -> float:
    """Return the factor of a step. Raises MegaliteError if it is no finite number of at least 0."""
    found = factor(step)
    if not isinstance(found, int | float) or not 0.0 <= found < math.inf:
        raise MegaliteError(f"the schedule returned {found!r} for step {step}: return a factor of lr, at least 0")
    return float(found)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Increase from `start` to `end` over `samples` (linear, or half a cosine period), or constant at `end`."""

    start: float
    end: float
    samples: float = 0.0
    style: str = "constant"

    def at(self, consumed_samples: int) -> float:
        """Return the weight decay of the step that starts after `consumed_samples` samples."""
        if self.style == "constant" or consumed_samples >= self.samples:
            return self.end
        return self.start + (self.end - self.start) * (1.0 - SHAPES[self.style](consumed_samples / self.samples))


@dataclass(frozen=True)
class RateSchedules:
    """Schedules of the hyperparameters that change during a run."""

    learning_rate: LearningRateSchedule
    token_tables: LearningRateSchedule
    """Learning rate of the word embedding and the output layer."""
    weight_decay: WeightDecaySchedule

    def at(self, consumed_samples: int) -> Rates:
        """Return the rates of the step that starts after `consumed_samples` samples."""
        return Rates(
            self.learning_rate.at(consumed_samples),
            self.token_tables.at(consumed_samples),
            self.weight_decay.at(consumed_samples),
        )


def rate_schedules(
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    *,
    hidden_size: int,
    global_batch_size: int,
    factor: Factor | None = None,
) -> RateSchedules:
    """Return the schedules of a run.

    An iteration counts as `global_batch_size` samples. If no length of the decay is given, the decay lasts for the full
    run. A warm-up fraction is a fraction of the decay. With a `factor`, the learning rate is `optimizer.lr` times it.
    """
    run = _samples(training.train_iters, training.train_samples, global_batch_size)
    decay = _samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples, global_batch_size) or run
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    else:
        warmup = _samples(optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, global_batch_size)
    multiplier = optimizer.learning_rate_multiplier(global_batch_size)
    noam = optimizer.lr_decay_style == "noam"
    highest = multiplier * (noam_maximum(1.0, hidden_size, warmup / global_batch_size) if noam else 1.0)
    schedule = LearningRateSchedule(
        maximum=optimizer.lr * highest,
        minimum=optimizer.min_lr * multiplier,
        initial=optimizer.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        style=optimizer.lr_decay_style,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_decay_samples=_samples(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples, global_batch_size),
        step_samples=global_batch_size,
    )
    if factor is not None:
        schedule = FactorSchedule(schedule.maximum, step_samples=global_batch_size, factor=factor)
    token_tables = schedule
    if optimizer.decoupled_lr is not None:
        minimum = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        token_tables = replace(schedule, maximum=optimizer.decoupled_lr * highest, minimum=minimum * multiplier)
    weight_decay = WeightDecaySchedule(optimizer.weight_decay, optimizer.weight_decay)
    if optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None:
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        weight_decay = WeightDecaySchedule(start, end, run, optimizer.weight_decay_incr_style)
    return RateSchedules(schedule, token_tables, weight_decay)


def rate_notes(optimizer: OptimizerConfig, schedules: RateSchedules, global_batch_size: int) -> tuple[str, ...]:
    """Return one line per flag that makes the learning rates differ from the values given in flags."""
    notes = []
    if optimizer.lr_scaling_rule is not None:
        ratio = f"{global_batch_size} / {optimizer.lr_scaling_base_batch_size}"
        multiplier = optimizer.learning_rate_multiplier(global_batch_size)
        notes.append(
            f"--lr-scaling-rule {optimizer.lr_scaling_rule}: learning rates (but --lr-warmup-init) are multiplied by "
            f"{ratio if optimizer.lr_scaling_rule == 'linear' else f'sqrt({ratio})'} = {multiplier:.6g}: --lr "
            f"{optimizer.lr:g} counts as {optimizer.lr * multiplier:.6g}"
        )
    if optimizer.lr_decay_style == "noam":
        schedule = schedules.learning_rate
        notes.append(
            f"--lr-decay-style noam: the learning rate rises to {schedule.maximum:.6g} within "
            f"{schedule.warmup_samples / global_batch_size:.6g} steps; --lr {optimizer.lr:g} is the formula's factor"
        )
    return tuple(notes)


def _samples(iterations: int | None, samples: int | None, global_batch_size: int) -> float:
    """Return a length in samples, from a length given in iterations or in samples; 0 if neither is given."""
    return float(iterations * global_batch_size if iterations else samples or 0)
