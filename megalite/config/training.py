"""Options of the training loop: batches, length, evaluation, exits, precision, recomputation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    ShareBelowOne,
    at_most,
    changed,
    flag_of,
)
from megalite.errors import ConfigurationError
from megalite.small_files import shown

_COUNT = r"(\d+\.?\d*(?:[eE]\d{1,2})?|\.\d+)([KMBTkmbt]?)"
_NEEDS_SAMPLES = "needs --train-samples: steps of different sizes do not say how much is trained on"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class TrainingConfig:
    """Options of the training loop: its length, precision, evaluations and exits."""

    micro_batch_size: PositiveInt
    """Samples that one forward of one rank processes."""
    global_batch_size: PositiveInt | None = None
    """Samples of one step over all ranks; unset: micro-batch-size x data-parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: increase the global batch from START by INCREMENT, evenly over so many samples."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """Sizes of the global batch, each after the tokens consumed from which on it is used: "0:384 200B:768" (K, M, B, T
    stand for thousands to trillions)."""
    train_iters: PositiveInt | None = None
    """Steps to train; either this or train-samples."""
    train_samples: PositiveInt | None = None
    """Samples to train on; either this or train-iters."""
    eval_iters: NonNegativeInt = 100
    """Global batches of one evaluation; 0: never evaluate."""
    eval_global_batch_size: PositiveInt | None = None
    """Samples of a batch of an evaluation, over all ranks; unset: the (last) global batch size of training."""
    eval_interval: PositiveInt = 1000
    """Steps between evaluations."""
    full_validation: bool = False
    """Read every validation set once and whole in each evaluation, instead of eval-iters batches of it."""
    multiple_validation_sets: bool = False
    """Evaluate each prefix of the validation data by itself, as a set with a loss of its own."""
    validation_set_names: tuple[str, ...] = ()
    """Names of these sets, in their order; unset: the shortest ends of the prefixes that tell them apart."""
    exit_interval: PositiveInt | None = None
    """Save and exit when the step number is a multiple of this."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save and exit after this many minutes."""
    seed: Annotated[NonNegativeInt, Range("below 2^32", lambda value: value < 2**32)] = 1234
    """Seed of initial weights, data order and dropout."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 master weights."""
    fp16: bool = False
    """Compute in fp16, with the optimizer in fp32 and a loss scale against underflow."""
    loss_scale: PositiveFloat | None = None
    """Constant loss scale of fp16; unset: a dynamic one."""
    initial_loss_scale: PositiveFloat = 2.0**32
    """Initial value of a dynamic loss scale."""
    min_loss_scale: PositiveFloat = 1.0
    """Smallest value of a dynamic loss scale."""
    loss_scale_window: PositiveInt = 1000
    """Steps without an overflow after which a dynamic loss scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows, since a dynamic loss scale last doubled, after which it halves."""
    label_smoothing: ShareBelowOne = 0.0
    """Share of each label's probability that is spread evenly over all tokens, in training only."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Add this times the square of log(sum(exp(logits))) to the loss of each token, in training only."""
    fp64: bool = False
    """Compute in float64, to compare layouts to the last digits."""
    rerun_mode: Literal["validate_results", "disabled"] = "validate_results"
    """Run a step whose gradient is not finite again and report the origin (validate_results), or do not (disabled)."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms on GPUs (on CPUs all are, at a fixed number of threads)."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: of entire layers (full), or only of the attention core and of recurrent layers
    but for their recurrence (selective)."""
    recompute_modules: tuple[Literal["core_attn", "moe", "moe_act"], ...] = ("core_attn",)
    """Parts of each layer that selective recomputes: the core of attention, layers with experts completely, or their
    activation (which is always recomputed)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Layers that full recomputes. uniform: all, in chunks of recompute-num-layers; block: only the first ones."""
    recompute_num_layers: PositiveInt | None = None
    """Layers in a chunk (uniform), or layers recomputed (block)."""
    mlp_chunks_for_training: PositiveInt = 1
    """Parts of the sequence on which dense feed-forward layers and their norms run one after another, each recomputed
    in backward: their wide activations then take memory for one part at a time. 1: on the whole sequence."""
    empty_unused_memory_level: Annotated[NonNegativeInt, at_most(2)] = 0
    """Return cached memory of the GPU that is not in use: 1: before each update and after evaluations; 2: also after
    each update. It is slow, and for GPUs that are shared or whose memory is fragmented."""
    manual_gc: bool = False
    """Run Python's garbage collection on all ranks in the same steps, instead of whenever Python decides."""
    manual_gc_interval: NonNegativeInt = 0
    """Steps between such collections; 0: only before evaluations."""
    manual_gc_eval: bool = True
    """Collect garbage also before each evaluation, if manual-gc is on."""
    moe_record_routing: str | None = None
    """Folder into which each training step writes the experts that its tokens chose, one file per sample."""
    moe_replay_routing: str | None = None
    """Folder with such files, or an inference engine's: tokens take these experts instead of choosing."""

    @property
    def evaluation_batch_size(self) -> int | None:
        """Samples of a batch of an evaluation."""
        return self.eval_global_batch_size or self.global_batch_size

    def batch_size_schedule(self, seq_length: int) -> tuple[tuple[int, int], ...]:
        """Return the sizes of `step_batch_size_schedule`, each after the consumed samples from which on it is used.

        A threshold in tokens is rounded down to samples, as in Megatron-LM. Empty if there is no schedule.

        Raises:
            ConfigurationError: it is not a schedule.
        """
        text = " ".join(self.step_batch_size_schedule)
        entries = text.replace(",", " ").split()
        found = [re.fullmatch(rf"{_COUNT}:{_COUNT}", entry, re.ASCII) for entry in entries]
        if not all(found) or bool(entries) != bool(self.step_batch_size_schedule):
            raise ConfigurationError(
                f'--step-batch-size-schedule {shown(text)}: write TOKENS:SIZE, as in "0:384 200B:768"'
            )
        numbers = [tuple(_count(*pair) for pair in (each.group(1, 2), each.group(3, 4))) for each in found if each]
        return tuple(sorted((tokens // seq_length, size) for tokens, size in numbers))

    @property
    def dtype(self) -> str:
        """Name of torch's dtype for weights and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"


def training_length_problems(training: TrainingConfig) -> Iterator[str]:
    """Yield a line if the length of the run is not given once."""
    if (training.train_iters is None) == (training.train_samples is None):
        not_both = "" if training.train_iters is None else ", not both"
        yield f"give the length as --train-iters or as --train-samples{not_both}"


def training_problems(training: TrainingConfig, seq_length: int) -> Iterator[str]:
    """Yield a line for each other relation that does not hold."""
    chosen = [flag for flag in ("bf16", "fp16", "fp64") if getattr(training, flag)]
    if len(chosen) > 1:
        yield f"--{' and --'.join(chosen)} are {len(chosen)} precisions: choose one"
    dynamic = "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    if not training.fp16:
        for name in changed(training, f"loss_scale {dynamic}"):
            yield f"{flag_of(name)} scales the loss of --fp16: add --fp16, or leave it out"
    if training.loss_scale is not None:
        for name in changed(training, dynamic):
            yield f"{flag_of(name)} is for a dynamic loss scale, but --loss-scale makes it constant: drop one"
    if training.min_loss_scale > training.initial_loss_scale:
        yield (
            f"--min-loss-scale {training.min_loss_scale:g} is above --initial-loss-scale "
            f"{training.initial_loss_scale:g}"
        )
    if training.manual_gc_interval and not training.manual_gc:
        yield f"--manual-gc-interval {training.manual_gc_interval} needs --manual-gc"
    yield from _ramp(training)
    yield from _batch_size_schedule(training, seq_length)
    records, replays = training.moe_record_routing, training.moe_replay_routing
    for flag, folder in (("--moe-record-routing", records), ("--moe-replay-routing", replays)):
        if folder is not None and "://" in folder:
            yield f"{flag} {folder}: give a folder of a file system"
    if records is not None and records == replays:
        yield f"--moe-record-routing {records} is the folder of --moe-replay-routing: give another"


def _count(number: str, unit: str) -> int:
    """Return a number with a unit, rounded down."""
    return int(float(number) * _UNITS[unit.upper()])


def _batch_size_schedule(training: TrainingConfig, seq_length: int) -> Iterator[str]:
    """Yield what is wrong with --step-batch-size-schedule."""
    flag = f'--step-batch-size-schedule "{" ".join(training.step_batch_size_schedule)}"'
    schedule = training.batch_size_schedule(seq_length)
    if not schedule:
        return
    starts, sizes = zip(*schedule, strict=True)
    if starts[0] != 0 or len(set(starts)) < len(starts):
        yield f"{flag}: the first size must begin at 0 tokens, and others at least a sample later each"
    if min(sizes) < 1:
        yield f"{flag}: a batch has at least one sample"
    if training.global_batch_size not in (None, sizes[-1]):
        yield (
            f"{flag} gives the sizes of the batches: leave --global-batch-size {training.global_batch_size} out "
            "(Megatron-LM refuses both together, too, also in its own example)"
        )
    if training.rampup_batch_size is not None:
        yield f"{flag} and --rampup-batch-size both give the sizes of the batches: drop one"
    if training.train_samples is None:
        yield f"{flag} {_NEEDS_SAMPLES}"


def _ramp(training: TrainingConfig) -> Iterator[str]:
    """Yield what is wrong with --rampup-batch-size."""
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    if training.train_samples is None:
        yield f"{flag} {_NEEDS_SAMPLES}"
    elif training.train_samples < start:
        yield f"--train-samples {training.train_samples} is less than the first batch of {flag}"
    final = training.global_batch_size or start
    if min(start, increment, samples) < 1:
        yield f"{flag}: the start, the increment and the samples must be at least 1"
    elif start > final or (final - start) % increment:
        yield f"{flag} does not go from {start} in steps of {increment} to --global-batch-size {final}"
