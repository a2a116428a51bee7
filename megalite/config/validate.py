"""Check of a configuration before a run starts.

This module has the relations between fields of several sections. It calls the checks of the other modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megalite.config.checkpoint import checkpoint_problems
from megalite.config.data import data_problems, tokenizer_problems
from megalite.config.fields import needs, range_problems
from megalite.config.idle_flags import why_no_attention, without_idle_flags
from megalite.config.kinds.table import splits
from megalite.config.layer_specs import PATTERN_FLAG
from megalite.config.monitoring import logging_problems, profiling_problems, sample_problems
from megalite.config.offload import offload_problems
from megalite.config.optimizer import optimizer_problems
from megalite.config.parallel import context_parallel_problems
from megalite.config.pipeline_layout import pipeline_problems
from megalite.config.recovery import recovery_problems
from megalite.config.reporting import reporting_problems
from megalite.config.run import RunConfig, TaskConfig, section_types
from megalite.config.training import training_length_problems, training_problems
from megalite.config.validate_adapters import adapter_problems
from megalite.config.validate_alarms import alarm_problems
from megalite.config.validate_bitwise import bitwise_problems
from megalite.config.validate_corruption import corruption_problems
from megalite.config.validate_distillation import distillation_problems
from megalite.config.validate_division import division_problems, least_micro_batches
from megalite.config.validate_elastic import elastic_problems
from megalite.config.validate_evaluation import validation_problems
from megalite.config.validate_experts import expert_run_problems
from megalite.config.validate_logits import logit_problems
from megalite.config.validate_low_precision import low_precision_problems
from megalite.config.validate_model import (
    LEAST_ITEM_BYTES,
    MAX_BYTES,
    idle_positions,
    network_problems,
    relation_problems,
    with_router_weights,
)
from megalite.config.validate_offload import activation_problems, offload_switch_problems
from megalite.config.validate_prediction import prediction_problems
from megalite.config.validate_preferences import preference_problems
from megalite.config.validate_rates import rate_problems
from megalite.config.validate_survivors import survivor_problems
from megalite.config.validate_synchronization import synchronization_problems, with_sites
from megalite.errors import ConfigurationError

_MICRO_BATCHES = 100_000
"""Largest number of micro-batches of one rank in a step: a step is a list with entries for all of them."""


def resolve(config: RunConfig, world_size: int, node_ranks: int | None = None) -> RunConfig:
    """Return the configuration of a run on `world_size` ranks, checked, with its dependent values filled in.

    Flags without an effect are turned off. The default global batch size is one micro-batch per data-parallel rank.
    `node_ranks`: the number of ranks on this rank's node; None: it is not known.

    Raises:
        ConfigurationError: see `validate`.
    """
    check_numbers(config)
    config, _ = without_idle_flags(config)
    config = replace(config, model=with_router_weights(config.model))
    if not config.synchronization.is_plain:
        config = with_sites(config, world_size, node_ranks)
    training = config.training
    if training.global_batch_size is None:
        schedule = training.batch_size_schedule(config.data.seq_length)
        workers = config.synchronization.workers(world_size)
        if config.recovery.elastic and not schedule:
            raise ConfigurationError(
                "--elastic needs --global-batch-size: its default would change with the number of ranks"
            )
        least = training.micro_batch_size * least_micro_batches(config.parallel, workers)
        size = schedule[-1][1] if schedule else least
        config = replace(config, training=replace(training, global_batch_size=size))
    validate(config, world_size)
    return config


def validate(config: RunConfig, world_size: int) -> None:
    """Check a configuration that `resolve` has filled in, for a run on `world_size` ranks.

    Relations are checked only after every single number is in its range.

    Raises:
        ConfigurationError: some relations do not hold; one line per relation, with the numbers and the flag to change.
    """
    check_numbers(config)
    workers = config.synchronization.workers(world_size)
    _raise(_sizes(config, workers))
    model, data, training, save = config.model, config.data, config.training, config.checkpoint.save
    tensorboard_dir = config.logging.tensorboard_dir
    problems = (
        division_problems(config, workers, data.seq_length),
        profiling_problems(config.profiling, save, tensorboard_dir, training.train_iters, world_size),
        context_parallel_problems(config.parallel, model, data.seq_length),
        expert_run_problems(config),
        _positions(config),
        relation_problems(model),
        prediction_problems(config),
        distillation_problems(config, workers),
        idle_positions(model),
        _layout(config),
        _communication(config),
        synchronization_problems(config, world_size),
        logit_problems(config),
        bitwise_problems(config),
        pipeline_problems(model, config.parallel),
        training_length_problems(training),
        training_problems(training, data.seq_length),
        rate_problems(config, model.hidden_size),
        optimizer_problems(config.optimizer, training),
        _mean(config),
        _offload(config),
        activation_problems(config),
        data_problems(data),
        tokenizer_problems(data, model.vocab_size),
        preference_problems(config),
        validation_problems(data, training),
        _recompute(config),
        _watchdog(config),
        checkpoint_problems(config.checkpoint),
        logging_problems(config.logging),
        sample_problems(config.logging, data.tokenizer_type, config.parallel, config.synchronization),
        reporting_problems(config.reporting, save),
        recovery_problems(config.recovery, config.checkpoint),
        elastic_problems(config),
        survivor_problems(config),
        corruption_problems(config, world_size),
        alarm_problems(config),
        adapter_problems(config),
        low_precision_problems(config),
    )
    _raise(problem for of_one_kind in problems for problem in of_one_kind)


def validate_task(config: TaskConfig, world_size: int) -> None:
    """Check the configuration of a run of a task that is not a GPT. Raises ConfigurationError as `validate` does."""
    check_numbers(config)
    problems = (
        division_problems(config, world_size, seq_length=1),
        _communication(config),
        synchronization_problems(config, world_size),
        bitwise_problems(config),
        training_problems(config.training, seq_length=1),
        rate_problems(config, hidden_size=1),
        optimizer_problems(config.optimizer, config.training),
        _mean(config),
        _offload(config),
        offload_switch_problems(config.offload),
        _watchdog(config),
        checkpoint_problems(config.checkpoint),
        logging_problems(config.logging),
        reporting_problems(config.reporting, config.checkpoint.save),
        recovery_problems(config.recovery, config.checkpoint),
        corruption_problems(config, world_size),
        alarm_problems(config),
    )
    _raise(problem for of_one_kind in problems for problem in of_one_kind)


def _mean(config: TaskConfig) -> Iterator[str]:
    """Yield with what a mean of the weights is lost, or is not that of steps with one set of weights."""
    chosen, flag = config.synchronization, f"--ema-decay {config.optimizer.ema_decay}"
    if config.optimizer.ema_decay is None:
        return
    if not config.checkpoint.save_optim:
        yield f"{flag} with --no-save-optim: the mean would not be saved; drop one of them"
    if chosen.has_replicas or chosen.has_servers:
        way = f"local-update {chosen.local_update}" if chosen.has_replicas else f"asynchronous {chosen.asynchronous}"
        yield (
            f"{flag} with --{way}: a step has not one set of weights there; drop one of them "
            "(megalite-merge-checkpoints averages checkpoints)"
        )


def _offload(config: TaskConfig) -> Iterator[str]:
    return offload_problems(config.offload, config.parallel, config.optimizer, config.synchronization, config.kernels)


def _raise(problems: Iterable[str]) -> None:
    message = "\n".join(problems)
    if message:
        raise ConfigurationError(message)


def check_numbers(config: TaskConfig) -> None:
    """Raise ConfigurationError, with one line per number, if single numbers are not in their ranges."""
    sections = (getattr(config, section) for section in section_types() if hasattr(config, section))
    _raise(problem for section in sections for problem in range_problems(section))


def _sizes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each size that is too large for a rank, before anything of that size is allocated."""
    model, training, parallel = config.model, config.training, config.parallel
    yield from network_problems(model, parallel.model_parallel_size // parallel.context_parallel_size)
    micro_batch, length = training.micro_batch_size, config.data.seq_length
    batch = max((size for _, size in training.batch_size_schedule(length)), default=training.global_batch_size)
    split = max(model.ffn_size, model.num_attention_heads * model.head_dim, model.vocab_size or 0)
    widest = max(model.hidden_size, split // parallel.tensor_model_parallel_size)
    if LEAST_ITEM_BYTES * micro_batch * length * widest > MAX_BYTES:
        yield (
            f"--micro-batch-size {micro_batch} x --seq-length {length} tokens of {widest} values each are more than a "
            "rank can hold"
        )
    if batch is not None and batch // (micro_batch * max(parallel.data_parallel_size(world_size), 1)) > _MICRO_BATCHES:
        yield (
            f"--global-batch-size {batch} on {world_size} ranks: more than {_MICRO_BATCHES:,} micro-batches of "
            f"--micro-batch-size {micro_batch} a step"
        )
    if (batch or 1) * (training.train_iters or 1) > 2**53:
        yield f"--train-iters {training.train_iters} of --global-batch-size {batch}: more than 2^53 samples"


def _positions(config: RunConfig) -> Iterator[str]:
    rows, seq_length = config.model.max_position_embeddings, config.data.seq_length
    if rows is not None and rows < seq_length:
        yield f"--max-position-embeddings {rows} is less than --seq-length {seq_length}"


def _layout(config: RunConfig) -> Iterator[str]:
    """Yield each size that tensor-parallel ranks cannot divide, and what needs classes of devices."""
    if config.parallel.device_classes is None:
        yield from needs(config.parallel, "allow_mixed_groups", "--device-classes")
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    if not model.has_attention:
        yield from needs(parallel, "cp_balance", f"attention, but {why_no_attention(model)}")
    widths = [*splits(model)]
    sizes = [(width.flag, width.size) for width in widths if width.flag]
    if parallel.sequence_parallel and parallel.context_parallel_size == 1:  # otherwise its own check has more to say
        sizes.append(("--seq-length", config.data.seq_length))
    for flag, size in sizes:
        if size % tensor:
            yield f"{flag} {size} is not divisible by --tensor-model-parallel-size {tensor}"
    for width in widths:
        if not width.flag:
            yield from width.problems(tensor)


def _communication(config: TaskConfig) -> Iterator[str]:
    """Yield a line for each relation of data-parallel communication that does not hold."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        yield "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy no_shard: drop one"
    if not parallel.overlap_grad_reduce:
        yield from needs(parallel, "overlap_param_gather", "--overlap-grad-reduce")
    if parallel.overlap_param_gather and parallel.zero_stage == 0:
        yield "--overlap-param-gather needs --use-distributed-optimizer (or another --data-parallel-sharding-strategy)"
    if not config.training.bf16:
        yield from needs(parallel, "grad_reduce_in_bf16", "--bf16")


def _recompute(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the recomputation of activations."""
    training, layers = config.training, config.model.num_layers
    method, number = training.recompute_method, training.recompute_num_layers
    if training.recompute_granularity == "full":
        if method is None or number is None:
            yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
        elif number > layers:
            yield f"--recompute-num-layers {number} is more than {config.model.layers_flag}"
    elif method is not None or number is not None:
        yield "--recompute-method and --recompute-num-layers need --recompute-granularity full"
    if training.recompute_granularity != "selective":
        yield from needs(training, "recompute_modules", "--recompute-granularity selective")
    if config.model.num_experts is None:
        for module in training.recompute_modules:
            if module.startswith("moe"):
                yield f"--recompute-modules {module} needs --num-experts"
    if (parts := training.mlp_chunks_for_training) > 1:
        yield from _parts_of_sequence(config, parts)


def _parts_of_sequence(config: RunConfig, parts: int) -> Iterator[str]:
    """Yield why feed-forward layers cannot run on so many parts of the sequence."""
    tokens = config.data.seq_length // config.parallel.sequence_parts
    if parts > tokens:
        yield (
            f"--mlp-chunks-for-training {parts} is more than the {tokens} tokens of a sample that a rank has between "
            f"products (--seq-length {config.data.seq_length} / {config.parallel.sequence_parts} ranks): give at most "
            f"{tokens}"
        )
    if not config.model.has_dense_layers:
        why = "--num-experts" if config.model.hybrid_layer_pattern is None else PATTERN_FLAG
        yield (
            f"--mlp-chunks-for-training {parts} changes nothing where no layer is dense ({why}): leave it out; "
            "--recompute-granularity selective --recompute-modules moe saves their memory"
        )


def _watchdog(config: TaskConfig) -> Iterator[str]:
    watchdog = config.watchdog
    if not watchdog.watchdog and watchdog.watchdog_min_seconds != type(watchdog).watchdog_min_seconds:
        yield f"--watchdog-min-seconds {watchdog.watchdog_min_seconds:g} needs the watchdog: drop --no-watchdog"
    if config.logging.performance_monitor and not watchdog.timing_interval:
        yield "--performance-monitor needs --timing-interval above 0: it shows what is measured then"
