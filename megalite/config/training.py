"""The loop: batches, length, evaluation, exits, precision, recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainingConfig:
    """The course of the run: how much, in what precision, when to evaluate and when to stop."""

    micro_batch_size: int
    """Samples one forward of one rank takes."""
    global_batch_size: int | None = None
    """Samples of one step over all ranks; unset: micro-batch-size x data-parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Grow the global batch from the first number, by the second in equal parts, over so many samples."""
    train_iters: int | None = None
    """Steps to train; either this or train-samples."""
    train_samples: int | None = None
    """Samples to train on; either this or train-iters."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0: never evaluate."""
    eval_interval: int = 1000
    """Steps between evaluations."""
    exit_interval: int | None = None
    """Save and exit when the step number is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 master weights."""
    fp16: bool = False
    """Weights and activations in fp16, the optimizer in fp32, the loss scaled against underflow."""
    loss_scale: float | None = None
    """With fp16: a constant loss scale; unset: a dynamic one."""
    initial_loss_scale: float = 2.0**32
    """Start of a dynamic loss scale."""
    min_loss_scale: float = 1.0
    """A dynamic loss scale never goes below."""
    loss_scale_window: int = 1000
    """Steps without an overflow after which a dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflows since a dynamic loss scale last grew before it halves."""
    label_smoothing: float = 0.0
    """In training, of each label's probability the share that all tokens get alike; evaluation is without."""
    z_loss_coeff: float = 0.0
    """In training, this times the square of log(sum(exp(logits))) is added to a token's loss; evaluation is without."""
    fp64: bool = False
    """Compute in float64, to compare layouts to the last digits."""
    rerun_mode: Literal["validate_results", "disabled"] = "validate_results"
    """Run a step whose gradient is not finite once more, watched, and tell where it came from; or disabled."""
    deterministic_mode: bool = False
    """On GPUs use deterministic algorithms alone (on CPUs they are, at a fixed number of threads)."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute in backward instead of keeping: whole layers, or the attention core alone (selective)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: recompute every chunk of recompute-num-layers layers, or the first recompute-num-layers layers."""
    recompute_num_layers: int | None = None
    """Layers in a chunk (uniform), or layers recomputed (block)."""
    manual_gc: bool = False
    """Collect Python's garbage at fixed steps, on all ranks at once, instead of whenever it falls due."""
    manual_gc_interval: int = 0
    """Steps between such collections; 0: none but those around evaluation."""
    manual_gc_eval: bool = True
    """With manual-gc: also collect before an evaluation."""

    @property
    def dtype(self) -> str:
        """Name of torch's dtype for weights and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"
