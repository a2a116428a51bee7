"""Check of a configuration before a run starts.

This module has the relations between fields of several sections. It calls the checks of the other modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megalite.config.checkpoint import checkpoint_problems
from megalite.config.data import data_problems, evaluation_problems, tokenizer_problems
from megalite.config.fields import changed, flag_of, given, needs, range_problems
from megalite.config.kinds.attention import OF_ATTENTION
from megalite.config.kinds.experts import what_has_experts
from megalite.config.kinds.table import splits
from megalite.config.layer_specs import ATTENTION_LETTER, PATTERN_FLAG, kinds_with_core
from megalite.config.model import ModelConfig
from megalite.config.monitoring import logging_problems, profiling_problems, sample_problems
from megalite.config.offload import offload_problems
from megalite.config.optimizer import optimizer_problems
from megalite.config.parallel import ParallelConfig, context_parallel_problems
from megalite.config.pipeline_layout import pipeline_problems, virtual_stages, why_nothing_is_aligned
from megalite.config.recovery import recovery_problems
from megalite.config.reporting import reporting_problems
from megalite.config.run import RunConfig, TaskConfig, section_types
from megalite.config.synchronization import SynchronizationConfig
from megalite.config.training import training_length_problems, training_problems
from megalite.config.validate_model import (
    LEAST_ITEM_BYTES,
    MAX_BYTES,
    has_idle_softmax,
    idle_positions,
    network_problems,
    relation_problems,
    with_router_weights,
)
from megalite.config.validate_offload import activation_problems, offload_switch_problems
from megalite.config.validate_prediction import prediction_problems
from megalite.config.validate_rates import rate_problems
from megalite.errors import ConfigurationError
from megalite.small_files import shown

_MICRO_BATCHES = 100_000
"""Largest number of micro-batches of one rank in a step: a step is a list with entries for all of them."""
_TORCHRUN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone"
_IDLE_WITH_ONE_RANK = {
    "tensor_model_parallel_size": "sequence_parallel",
    "pipeline_model_parallel_size": "account_for_* overlap_p2p_communication align_grad_reduce",
    "context_parallel_size": "cp_* hierarchical_context_parallel_sizes",
}


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
        from megalite.config.validate_synchronization import with_sites

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


def without_idle_flags(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Turn off flags that have no effect, as Megatron-LM does. Returns the configuration and a line about each flag."""
    lines: list[str] = []
    for section, names, why in _idle(config):
        options = getattr(config, section)
        lines += [f"{flag}: changes nothing{why}" for flag in given(options, names)]
        defaults = {name: getattr(type(options), name) for name in changed(options, names)}
        config = replace(config, **{section: replace(options, **defaults)})
    return config, tuple(lines)


def _idle(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield section and names of fields that have no effect, with the reason."""
    for axis, names in _IDLE_WITH_ONE_RANK.items():
        if getattr(config.parallel, axis) == 1:
            yield "parallel", names, f", since {flag_of(axis)} is 1"
    if not config.model.has_attention:
        since = f", since {_why_no_attention(config.model)}"
        yield "model", OF_ATTENTION, since
        yield "parallel", "cp_comm_type hierarchical_context_parallel_sizes", since
    if config.model.has_latents:
        yield "model", "kv_channels", ", since attention is over latents (--qk-head-dim and others are its widths)"
        if config.model.position_embedding_type == "rope" and config.model.rotary_scaling_factor == 1:
            yield "model", "mscale mscale_all_dim", ", since --rotary-scaling-factor is 1"
    if not config.model.qk_layernorm:
        yield "model", "apply_wd_to_qk_layernorm", " without --qk-layernorm"
    if config.model.hybrid_layer_pattern is not None:
        yield "model", "experimental_attention_variant linear_attention_freq", f", since {PATTERN_FLAG} has all layers"
    if config.model.num_experts is None:
        yield "parallel", "expert_tensor_parallel_size", " without --num-experts"
    if has_idle_softmax(config.model):
        yield (
            "model",
            "moe_router_pre_softmax",
            f", since --moe-router-score-function is {config.model.moe_router_score_function}",
        )
    if config.training.recompute_granularity is None:
        yield "training", "recompute_method recompute_num_layers", " without --recompute-granularity full"
    elif _recomputes_nothing(config):
        names = "recompute_granularity recompute_modules"
        yield "training", names, ", since no layer is attention, Mamba-2 or a delta net"
    if why := why_nothing_is_aligned(_chunks(config), config.parallel):
        yield "parallel", "align_grad_reduce", f" {why}"
    if not config.optimizer.narrow:
        yield "optimizer", "use_precision_aware_optimizer", ", since its dtypes are all fp32"
    if not config.reporting.reports("wandb"):
        yield "reporting", "wandb_*", " without --wandb-project or --report-to wandb"
    if not config.reporting.reports("opentelemetry"):
        yield "reporting", "otel_service_name", " without --otel-enabled or --report-to opentelemetry"
    if config.checkpoint.save is None:
        yield "checkpoint", "ckpt_format save_interval save_retain_interval", " without --save"
    if config.checkpoint.finetune:
        yield "checkpoint", "load_optim", ", since --finetune takes the weights alone"


def _why_no_attention(model: ModelConfig) -> str:
    if (pattern := model.hybrid_layer_pattern) is not None:
        return f"{PATTERN_FLAG} {shown(pattern)} has no attention ({ATTENTION_LETTER})"
    return f"--linear-attention-freq {model.linear_attention_freq} leaves no layer attention"


def _recomputes_nothing(config: RunConfig) -> bool:
    """Tell whether layers are known and --recompute-granularity selective computes nothing of them again."""
    training, kinds = config.training, config.model.kinds
    only_cores = training.recompute_granularity == "selective" and "moe" not in training.recompute_modules
    return only_cores and bool(kinds) and not kinds & kinds_with_core()


def _chunks(config: RunConfig) -> int:
    """Return the number of stages per rank; more than one if they cannot be divided, which `validate` reports."""
    try:
        return virtual_stages(config.model, config.parallel)
    except ConfigurationError:
        return 2


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
        _division(config, workers, data.seq_length),
        profiling_problems(config.profiling, save, tensorboard_dir, training.train_iters, world_size),
        context_parallel_problems(config.parallel, model, data.seq_length),
        _experts(config),
        _positions(config),
        relation_problems(model),
        prediction_problems(config),
        idle_positions(model),
        _layout(config),
        _communication(config),
        _synchronization(config, world_size),
        _bitwise(config),
        pipeline_problems(model, config.parallel),
        training_length_problems(training),
        training_problems(training, data.seq_length),
        rate_problems(config, model.hidden_size),
        optimizer_problems(config.optimizer, training),
        _offload(config),
        activation_problems(config),
        data_problems(data),
        tokenizer_problems(data, model.vocab_size),
        evaluation_problems(data, training.eval_iters),
        _recompute(config),
        _watchdog(config),
        checkpoint_problems(config.checkpoint),
        logging_problems(config.logging),
        sample_problems(config.logging, data.tokenizer_type, config.parallel, config.synchronization),
        reporting_problems(config.reporting, save),
        recovery_problems(config.recovery, config.checkpoint),
        _elastic(config),
        _survivors(config),
        _corruption(config, world_size),
        _alarms(config),
    )
    _raise(problem for of_one_kind in problems for problem in of_one_kind)


def validate_task(config: TaskConfig, world_size: int) -> None:
    """Check the configuration of a run of a task that is not a GPT. Raises ConfigurationError as `validate` does."""
    check_numbers(config)
    problems = (
        _division(config, world_size, seq_length=1),
        _communication(config),
        _synchronization(config, world_size),
        _bitwise(config),
        training_problems(config.training, seq_length=1),
        rate_problems(config, hidden_size=1),
        optimizer_problems(config.optimizer, config.training),
        _offload(config),
        offload_switch_problems(config.offload),
        _watchdog(config),
        checkpoint_problems(config.checkpoint),
        logging_problems(config.logging),
        reporting_problems(config.reporting, config.checkpoint.save),
        recovery_problems(config.recovery, config.checkpoint),
        _corruption(config, world_size),
        _alarms(config),
    )
    _raise(problem for of_one_kind in problems for problem in of_one_kind)


def _elastic(config: RunConfig) -> Iterable[str]:
    """Return a line for each option that does not fit a number of nodes that changes."""
    if not config.recovery.elastic:
        return ()
    from megalite.config.validate_elastic import elastic_problems  # few runs are elastic

    return elastic_problems(config, _chunks(config))


def _survivors(config: RunConfig) -> Iterable[str]:
    """Return a line for each option with which survivors of a failure cannot finish their step."""
    if not config.recovery.survivors_finish_step:
        return ()
    from megalite.config.validate_survivors import survivor_problems  # few runs do

    return survivor_problems(config)


def _corruption(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation of the search for silent corruption that does not hold."""
    if config.corruption.is_watched:
        from megalite.config.validate_corruption import corruption_problems  # few runs search

        yield from corruption_problems(config, world_size)
    if not config.corruption.finds_right_steps:
        hashes = "--check-weight-hash-across-dp-replicas-interval"
        yield from needs(config.corruption, "on_corruption", f"{hashes} or --rerun-on-replica-interval")


def _alarms(config: TaskConfig) -> Iterable[str]:
    """Return a line for each relation of the alarms that does not hold."""
    if not changed(config.alarms, "*"):
        return ()
    from megalite.config.validate_alarms import alarm_problems  # few runs have them

    return alarm_problems(config)


def _synchronization(config: TaskConfig, world_size: int) -> Iterable[str]:
    """Return a line for each relation of the options of synchronization that does not hold."""
    if config.synchronization == SynchronizationConfig():
        return ()
    from megalite.config.validate_synchronization import synchronization_problems

    return synchronization_problems(config, world_size)


def _bitwise(config: TaskConfig) -> Iterable[str]:
    """Return a line for each option that does not go with sums in fixed point."""
    if not config.parallel.bitwise_elastic:
        return ()
    from megalite.config.validate_bitwise import bitwise_problems  # few runs need it

    return bitwise_problems(config)


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


def _division(config: TaskConfig, world_size: int, seq_length: int) -> Iterator[str]:
    """Yield what does not divide: ranks by groups, and batches by micro-batches and data-parallel ranks."""
    training, parallel = config.training, config.parallel
    if uneven := list(_uneven_groups(parallel, world_size)):
        yield from uneven
        return
    copies = parallel.data_parallel_size(world_size)
    if parallel.data_parallel_shares is not None:
        from megalite.config.validate_shares import share_problems

        if problems := list(share_problems(config, world_size)):
            yield from problems
            return
    unit, words = (1, "1") if config.recovery.elastic else _share_unit(parallel, world_size)
    batch = training.global_batch_size or training.micro_batch_size * least_micro_batches(parallel, world_size)
    sizes, grows = [("--global-batch-size", batch)], training.rampup_batch_size or training.step_batch_size_schedule
    if training.rampup_batch_size is not None:
        start, increment, _ = training.rampup_batch_size
        sizes += [("--rampup-batch-size: the start", start), ("--rampup-batch-size: the increment", increment)]
    schedule = training.batch_size_schedule(seq_length)
    # A run that continues may be past the first sizes of a schedule, which may be too small for its ranks.
    continues = config.checkpoint.load is not None or config.checkpoint.resume is not None
    multiple, least = training.micro_batch_size * unit, training.micro_batch_size * copies
    fits = [size % multiple == 0 and size >= least for _, size in schedule]
    first = fits.index(True) if continues and True in fits else 0
    sizes += [("--step-batch-size-schedule: the size", size) for _, size in schedule[first:]]
    if training.eval_global_batch_size is not None:
        sizes.append(("--eval-global-batch-size", training.eval_global_batch_size))
    for name, size in sizes:
        if size % multiple:
            yield f"{name} {size} is not a multiple of --micro-batch-size {training.micro_batch_size} x {words}"
        elif size < least and "increment" not in name:
            yield f"{name} {size} has fewer micro-batches than {copies} data-parallel ranks"
    yield from _instances(parallel, world_size)
    if training.train_samples is not None and training.train_samples < batch and not grows:
        yield f"--train-samples {training.train_samples} is less than one --global-batch-size {batch}"


def _share_unit(parallel: ParallelConfig, world_size: int) -> tuple[int, str]:
    """Return the number of micro-batches of which a step must have a multiple, with its origin in words."""
    if parallel.data_parallel_shares is not None:
        from megalite.config.validate_shares import batch_unit

        return batch_unit(parallel, world_size)
    copies = max(parallel.data_parallel_size(world_size), 1)
    return copies, f"{copies} data-parallel ranks"


def least_micro_batches(parallel: ParallelConfig, world_size: int) -> int:
    """Return the least number of micro-batches in a step, with at least one for each data-parallel rank."""
    return max(_share_unit(parallel, world_size)[0], parallel.data_parallel_size(world_size), 1)


def _uneven_groups(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    shared = "tensor_model" if parallel.expert_tensor_parallel_size is None else "expert_tensor"
    groups = {  # if both sizes are equal, the second entry replaces the first
        parallel.expert_tensor_model_pipeline_parallel_size: (f"{shared}_parallel_size", "expert_model_parallel_size"),
        parallel.model_parallel_size: ("tensor_model_parallel_size", "context_parallel_size"),
    }
    for size, names in [(size, names) for size, names in groups.items() if world_size % size]:
        sizes = {name: getattr(parallel, name) for name in (*names, "pipeline_model_parallel_size")}
        flags = " x ".join(f"{flag_of(name)} {number}" for name, number in sizes.items() if number > 1)
        start = f": start {size} processes, as by {_TORCHRUN} --nproc-per-node {size}" if world_size == 1 else ""
        yield f"{world_size} ranks cannot be divided into groups of {flags}{start}"


def _instances(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the instances of hybrid sharding."""
    instances, copies = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size(world_size)
    peers = copies * parallel.context_parallel_size
    of_experts = world_size // parallel.expert_tensor_model_pipeline_parallel_size
    if peers % instances:
        kinds = "data-parallel" if peers == copies else "data- and context-parallel"
        yield f"--num-distributed-optimizer-instances {instances} does not divide {peers} {kinds} ranks"
    elif of_experts % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the experts' data-parallel size, "
            f"{of_experts}"
        )
    elif peers == instances > 1:
        yield f"--num-distributed-optimizer-instances {instances}: with one rank in each nothing is sharded"
    if instances > 1 and parallel.zero_stage == 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} needs shards: --use-distributed-optimizer or another "
            "--data-parallel-sharding-strategy than no_shard"
        )


def _experts(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with experts beside the layout, the losses and the other options of a run."""
    model, parallel = config.model, config.parallel
    tensor, sizes = parallel.tensor_model_parallel_size, parallel.mesh_sizes
    if model.num_experts is None:
        needed = what_has_experts(model)
        yield from needs(parallel, "expert_model_parallel_size", needed)
        yield from needs(config.checkpoint, "moe_use_upcycling", needed)
        yield from needs(config.training, "moe_record_routing moe_replay_routing", needed)
        return
    if tensor > 1 and not parallel.sequence_parallel:
        yield f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel"
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) == len(weights) and kinds != ("aux_loss",):  # the default, which may not have been given
        for kind, weight in zip(kinds, weights, strict=True):
            if not weight and kind not in ("none", "sinkhorn", "quantile_balancing"):
                yield f"--moe-router-load-balancing-type {kind} does nothing with --moe-aux-loss-coeff 0: drop it"
    if model.hybrid_layer_pattern is not None:
        yield from needs(config.checkpoint, "moe_use_upcycling", f"the flags of a GPT, without {PATTERN_FLAG}")
    if model.moe_latent_size is not None:
        yield from needs(config.checkpoint, "moe_use_upcycling", "experts of the full width, without --moe-latent-size")
    feed_forwards = _feed_forwards(model)
    if "moe" not in feed_forwards:
        if model.hybrid_layer_pattern is not None:  # reported by `relation_problems`
            return
        yield f"--moe-layer-freq {model.moe_layer_freq} gives no layer experts: drop --num-experts"
        return
    if model.num_experts % sizes["expert_parallel_size"]:
        ranks = f"--expert-model-parallel-size {sizes['expert_parallel_size']}"
        yield f"--num-experts {model.num_experts} is not divisible by {ranks}"
    if model.expert_ffn_size % sizes["expert_tensor_parallel_size"]:
        yield from _uneven_experts(config, "dense" in feed_forwards)
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size {tensor}"
        )


def _uneven_experts(config: RunConfig, has_dense_layers: bool) -> Iterator[str]:
    """Yield that the ranks of an expert do not divide its width, unless the line on dense layers says the same."""
    own, parallel = config.model.moe_ffn_hidden_size, config.parallel
    width = f"{flag_of('ffn_hidden_size' if own is None else 'moe_ffn_hidden_size')} {config.model.expert_ffn_size}"
    ranks = parallel.expert_tensor_parallel_size
    if ranks is not None:
        yield f"{width} is not divisible by --expert-tensor-parallel-size {ranks}"
    elif own is not None or not has_dense_layers:
        tensor = parallel.tensor_model_parallel_size
        yield (
            f"{width} is not divisible by --tensor-model-parallel-size {tensor}: --expert-tensor-parallel-size 1 "
            "does not split experts"
        )


def _feed_forwards(model: ModelConfig) -> set[str]:
    """Return the kinds of feed-forward layers of the network; all kinds if the layers are not known."""
    try:
        return {layer.feed_forward for layer in model.all_layers if layer.feed_forward is not None}
    except ConfigurationError:  # reported by `relation_problems`
        return {"dense", "moe"}


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
        yield from needs(parallel, "cp_balance", f"attention, but {_why_no_attention(model)}")
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
            yield f"--recompute-num-layers {number} is more than {config.model.depth}"
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
        yield (
            f"--mlp-chunks-for-training {parts} changes nothing where no layer is dense: leave it out; "
            "--recompute-granularity selective --recompute-modules moe saves their memory"
        )


def _watchdog(config: TaskConfig) -> Iterator[str]:
    watchdog = config.watchdog
    if not watchdog.watchdog and watchdog.watchdog_min_seconds != type(watchdog).watchdog_min_seconds:
        yield f"--watchdog-min-seconds {watchdog.watchdog_min_seconds:g} needs the watchdog: drop --no-watchdog"
    if config.logging.performance_monitor and not watchdog.timing_interval:
        yield "--performance-monitor needs --timing-interval above 0: it shows what is measured then"
