"""Check of the relations between the flags of learning rates and weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import flag_of, needs
from megalite.config.optimizer import OptimizerConfig, noam_maximum
from megalite.config.run import TaskConfig


def rate_problems(config: TaskConfig, hidden_size: int) -> Iterator[str]:
    """Yield a line for each relation that does not hold. `hidden_size` is the width of the network, for noam."""
    optimizer, by_iters = config.optimizer, config.training.train_samples is None
    other, unit = ("samples", "iters") if by_iters else ("iters", "samples")
    for phase in ("decay", "warmup", "wsd_decay"):
        if getattr(optimizer, f"lr_{phase}_{other}"):
            flag = flag_of(f"lr_{phase}_")
            yield f"{flag}{other} does not go with --train-{unit}: use {flag}{unit}"
    if optimizer.lr_warmup_fraction is not None and (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples):
        yield f"give the warm-up as --lr-warmup-fraction or as --lr-warmup-{unit}, not both"
    yield from _phases(config, unit)
    yield from _idle(config, unit)
    if optimizer.lr_decay_style == "noam":
        yield from _noam(config, unit, hidden_size)
    else:
        yield from _bounds(config)
    yield from _decoupled(optimizer)
    if (optimizer.lr_scaling_rule is None) != (optimizer.lr_scaling_base_batch_size is None):
        yield "--lr-scaling-rule and --lr-scaling-base-batch-size need each other"
    yield from _weight_decay(optimizer)


def _lengths(config: TaskConfig, unit: str) -> tuple[float, int | None]:
    """Return the lengths of the warm-up and of the entire schedule (None if unknown), in iterations or samples."""
    optimizer = config.optimizer
    whole = getattr(optimizer, f"lr_decay_{unit}") or getattr(config.training, f"train_{unit}")
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * (whole or 0), whole
    return getattr(optimizer, f"lr_warmup_{unit}"), whole


def _phases(config: TaskConfig, unit: str) -> Iterator[str]:
    """Check that warm-up and the last phase of WSD fit into the decay."""
    optimizer = config.optimizer
    warmup, decay = _lengths(config, unit)
    last = getattr(optimizer, f"lr_wsd_decay_{unit}")
    if decay is not None and warmup >= decay and optimizer.lr_decay_style not in ("constant", "noam"):
        yield f"a warm-up of {warmup} {unit} is not shorter than the whole schedule of {decay} (--lr-decay-{unit})"
    if (optimizer.lr_decay_style == "WSD") != (last is not None):
        yield f"--lr-decay-style WSD and --lr-wsd-decay-{unit} need each other"
    elif decay is not None and last is not None and warmup + last > decay:
        yield f"warm-up {warmup} and --lr-wsd-decay-{unit} {last} do not fit into the decay's {decay} {unit}"


def _idle(config: TaskConfig, unit: str) -> Iterator[str]:
    """Refuse flags that the schedule does not read."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_init and not _lengths(config, unit)[0]:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} needs a warm-up: --lr-warmup-{unit} or --lr-warmup-fraction"
    if optimizer.lr_decay_style == "constant":
        for name in ("min_lr", "decoupled_min_lr", f"lr_decay_{unit}"):
            if getattr(optimizer, name) and not (name.startswith("lr_decay") and optimizer.lr_warmup_fraction):
                yield f"{flag_of(name)}: leave it out, --lr-decay-style constant has no decay"


def _noam(config: TaskConfig, unit: str, hidden_size: int) -> Iterator[str]:
    """Yield what is wrong with the decay of noam, whose highest rate follows from a formula."""
    optimizer, warmup = config.optimizer, _lengths(config, unit)[0]
    if not warmup:
        yield f"--lr-decay-style noam needs a warm-up: --lr-warmup-{unit} or --lr-warmup-fraction"
    if optimizer.lr_warmup_init:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init}: leave it out, noam's formula says where the warm-up starts"
    if getattr(optimizer, f"lr_decay_{unit}"):
        yield f"--lr-decay-{unit}: leave it out, noam decays without an end, down to --min-lr"
    # The highest learning rate is far below the factor --lr, so a minimum that suits another style may be too high.
    batch_size = config.training.global_batch_size or config.training.micro_batch_size
    steps = warmup if unit == "iters" else warmup / batch_size
    for prefix in ("", "decoupled_"):
        factor, lowest = getattr(optimizer, f"{prefix}lr"), getattr(optimizer, f"{prefix}min_lr")
        if None in (factor, lowest) or not steps:
            continue
        highest = noam_maximum(factor, hidden_size, steps)
        if lowest > highest:
            flag = prefix.replace("_", "-")
            yield (
                f"--{flag}min-lr {lowest} is above noam's highest learning rate: --{flag}lr {factor} / "
                f"sqrt(--hidden-size {hidden_size} x {steps:g} warm-up steps) = {highest:.3g}"
            )


def _bounds(config: TaskConfig) -> Iterator[str]:
    """Refuse learning rates above the highest learning rate."""
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}"
    batch_size = config.training.global_batch_size or config.training.micro_batch_size
    multiplier = optimizer.learning_rate_multiplier(batch_size)
    scaled = "" if multiplier == 1.0 else f" x {multiplier:g} of --lr-scaling-rule"
    for flag, highest in (("--lr", optimizer.lr), ("--decoupled-lr", optimizer.decoupled_lr)):
        if highest and optimizer.lr_warmup_init > highest * multiplier:
            yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above {flag} {highest}{scaled}"


def _decoupled(optimizer: OptimizerConfig) -> Iterator[str]:
    highest, lowest = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if highest is None:
        if lowest is not None:
            yield f"--decoupled-min-lr {lowest} needs --decoupled-lr"
    elif lowest is None:
        if optimizer.min_lr > highest:
            yield f"--min-lr {optimizer.min_lr} is above --decoupled-lr {highest} (or give --decoupled-min-lr)"
    elif lowest > highest:
        yield f"--decoupled-min-lr {lowest} is above --decoupled-lr {highest}"


def _weight_decay(optimizer: OptimizerConfig) -> Iterator[str]:
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        yield from needs(optimizer, "start_weight_decay end_weight_decay", "--weight-decay-incr-style linear or cosine")
        return
    if start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    elif start > end:
        yield f"--start-weight-decay {start} is above --end-weight-decay {end}: weight decay can only rise"
    if optimizer.weight_decay != OptimizerConfig.weight_decay:
        yield f"--weight-decay {optimizer.weight_decay}: leave it out, --weight-decay-incr-style {style} ignores it"
