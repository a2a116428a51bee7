"""Every relation between fields, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, get_args

from megalite.config import megatron_flags
from megalite.config.activations import FLAGS
from megalite.config.attention_windows import MOST_LAYERS
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.run import RunConfig, section_types
from megalite.config.tokenizer import FILES_AND_OPTIONS, TokenizerType
from megalite.config.training import TrainingConfig
from megalite.config.validate_checkpoint import checkpoint_problems
from megalite.config.validate_optimizer import optimizer_problems
from megalite.config.validate_pipeline import pipeline_problems, why_nothing_is_aligned
from megalite.config.validate_profiling import profiling_problems
from megalite.config.validate_rates import rate_problems
from megalite.config.validate_sizes import network_problems, size_problems
from megalite.config.watchdog import WatchdogConfig
from megalite.errors import ConfigurationError
from megalite.small_files import shown

_AT_LEAST_ONE = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups
    max_position_embeddings vocab_size make_vocab_size_divisible_by tensor_model_parallel_size ddp_bucket_size
    num_distributed_optimizer_instances pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank microbatch_group_size_per_virtual_pipeline_stage
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers profile_pipeline
    yarn_original_max_position_embeddings rope_scaling_original_max_position_embeddings
    distributed_timeout_minutes seq_length lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
    micro_batch_size global_batch_size train_iters train_samples eval_interval exit_interval recompute_num_layers
    save_interval save_retain_interval log_interval loss_scale_window hysteresis lr_scaling_base_batch_size
    muon_num_ns_steps profile_step_end tensorboard_log_interval"""
_AT_LEAST_ZERO = """tiktoken_num_special_tokens
    norm_epsilon init_method_std num_workers lr min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init
    decoupled_lr decoupled_min_lr weight_decay start_weight_decay end_weight_decay
    clip_grad eval_iters seed ckpt_step tolerated_save_failures manual_gc_interval mid_level_dataset_surplus
    mscale mscale_all_dim z_loss_coeff profile_step_start timing_interval"""
_ABOVE_ZERO = """loss_scale initial_loss_scale min_loss_scale rotary_base exit_duration_in_mins
    window_rotary_base query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping
    rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor rotary_seq_len_interpolation_factor
    yarn_beta_fast yarn_beta_slow yarn_attention_factor rotary_scaling_factor
    muon_extra_scale_factor adam_eps watchdog_min_seconds"""
_TO_COME = {
    "context_parallel_size": "context",
    "expert_model_parallel_size": "experts",
}
"""Axes of which the mesh, the buckets and checkpoints know, and the network does not yet. (Of the experts' tensor axis
too: see `_to_come`.)"""
_IDLE_WITHOUT_PIPELINE = {
    "account_for_embedding_in_pipeline_split": "account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "account-for-loss-in-pipeline-split",
    "overlap_p2p_communication": "no-overlap-p2p-communication",
    "align_grad_reduce": "no-align-grad-reduce",
}
_AT_MOST = {
    **dict.fromkeys(
        ("num_layers", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"), MOST_LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "tensor_model_parallel_size", "tiktoken_num_special_tokens"), 1_000_000),
    "num_workers": 1_000,
    "muon_num_ns_steps": 100,
}
"""Limits of what is listed or started one by one; all other whole numbers are at most 2^53."""
_SHARES = "lr_warmup_fraction fim_rate fim_spm_rate fim_fragment_rate"
_FROM_ZERO_BELOW_ONE = """hidden_dropout attention_dropout label_smoothing adam_beta1 adam_beta2 sgd_momentum
    muon_momentum"""


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """The configuration of a run on `world_size` ranks with what depends on others filled in: idle flags are off, the
    global batch size is at least one micro-batch a rank. Raises ConfigurationError as `validate` does."""
    check_numbers(config)
    config, _ = without_idle_flags(config)
    training = config.training
    if training.global_batch_size is None:
        copies = max(config.parallel.data_parallel_size(world_size), 1)
        config = replace(config, training=replace(training, global_batch_size=training.micro_batch_size * copies))
    validate(config, world_size)
    return config


def without_idle_flags(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`config` with flags off that have nothing to act on, as Megatron-LM does, and a line about each."""
    lines: list[str] = []
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        config = replace(config, parallel=replace(config.parallel, sequence_parallel=False))
        lines.append("--sequence-parallel: off, since --tensor-model-parallel-size is 1")
    if config.parallel.pipeline_model_parallel_size == 1:
        for name, flag in _IDLE_WITHOUT_PIPELINE.items():
            default = getattr(ParallelConfig, name)
            if getattr(config.parallel, name) != default:
                config = replace(config, parallel=replace(config.parallel, **{name: default}))
                lines.append(f"--{flag}: changes nothing, since --pipeline-model-parallel-size is 1")
    if not config.parallel.align_grad_reduce and (why := why_nothing_is_aligned(config.model, config.parallel)):
        config = replace(config, parallel=replace(config.parallel, align_grad_reduce=True))
        lines.append(f"--no-align-grad-reduce: changes nothing {why}")
    if config.optimizer.use_precision_aware_optimizer and not config.optimizer.narrow:
        config = replace(config, optimizer=replace(config.optimizer, use_precision_aware_optimizer=False))
        lines.append("--use-precision-aware-optimizer: off, since its dtypes are all fp32")
    if config.checkpoint.finetune and not config.checkpoint.load_optim:
        config = replace(config, checkpoint=replace(config.checkpoint, load_optim=True))
        lines.append("--no-load-optim: changes nothing, since --finetune takes the weights alone")
    return config, tuple(lines)


def validate(config: RunConfig, world_size: int) -> None:
    """Checks `config`, as `resolve` fills it in, for a run on `world_size` ranks.

    Raises ConfigurationError with one line for each relation that does not hold: the numbers and the flag to change.
    Relations are looked at once every number by itself is in its range.
    """
    check_numbers(config)
    _raise(size_problems(config, world_size))
    checks = (
        _to_come,
        _positions,
        _layout,
        pipeline_problems,
        _steps,
        _ramp,
        rate_problems,
        optimizer_problems,
        _data,
        _tokenizer,
        _evaluation,
        _precision,
        _recompute,
        checkpoint_problems,
    )
    of_ranks = (*_division(config, world_size), *profiling_problems(config, world_size))
    _raise([*of_ranks, *(problem for check in checks for problem in check(config))])


def _raise(problems: Iterable[str]) -> None:
    message = "\n".join(problems)
    if message:
        raise ConfigurationError(message)


def check_numbers(config: RunConfig) -> None:
    """Raise ConfigurationError, with a line for each, if numbers by themselves are not in their ranges."""
    _raise(problem for section in section_types() for problem in _ranges(getattr(config, section)))


def _ranges(section: Any) -> Iterator[str]:
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        wanted = _range_missed(field.name, value)
        if wanted:
            yield f"--{field.name.replace('_', '-')} {shown(value)}: must be {wanted}"


def _range_missed(name: str, value: float) -> str | None:
    """The range that `value` should be in but is not."""
    if isinstance(value, int) and value > _AT_MOST.get(name, 2**53):
        return f"at most {_AT_MOST[name]:,}" if name in _AT_MOST else "at most 2^53"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if name == "rotary_percent" and not 0 < value <= 1:
        return "above 0, at most 1"
    if name in _SHARES.split() and not 0 <= value <= 1:
        return "from 0 to 1"
    if name == "seed" and value >= 2**32:
        return "below 2^32"
    if name in _AT_LEAST_ONE.split() and value < 1:
        return "at least 1"
    if name in _AT_LEAST_ZERO.split() and value < 0:
        return "at least 0"
    if name in _ABOVE_ZERO.split() and value <= 0:
        return "above 0"
    if name in _FROM_ZERO_BELOW_ONE.split() and not 0 <= value < 1:
        return "at least 0 and below 1"
    return None


def _division(config: RunConfig, world_size: int) -> Iterator[str]:
    training, parallel = config.training, config.parallel
    if uneven := list(_uneven_groups(parallel, world_size)):
        yield from uneven
        return
    copies = parallel.data_parallel_size(world_size)
    batch = training.global_batch_size or training.micro_batch_size * copies
    sizes = [("--global-batch-size", batch)]
    if training.rampup_batch_size is not None:
        start, increment, _ = training.rampup_batch_size
        sizes += [("--rampup-batch-size: the start", start), ("--rampup-batch-size: the increment", increment)]
    for name, size in sizes:
        if size % (training.micro_batch_size * copies):
            yield (
                f"{name} {size} is not a multiple of --micro-batch-size {training.micro_batch_size} x "
                f"{copies} data-parallel ranks"
            )
    yield from _instances(parallel, world_size)
    if training.train_samples is not None and training.train_samples < batch and training.rampup_batch_size is None:
        yield f"--train-samples {training.train_samples} is less than one --global-batch-size {batch}"


def _uneven_groups(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    shared = "tensor_model" if parallel.expert_tensor_parallel_size is None else "expert_tensor"
    groups = {  # those of the experts only where they are others
        parallel.expert_tensor_model_pipeline_parallel_size: (f"{shared}_parallel_size", "expert_model_parallel_size"),
        parallel.model_parallel_size: ("tensor_model_parallel_size", "context_parallel_size"),
    }
    for names in [names for size, names in groups.items() if world_size % size]:
        sizes = {name: getattr(parallel, name) for name in (*names, "pipeline_model_parallel_size")}
        flags = " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1)
        yield f"{world_size} ranks do not divide into groups of {flags}"


def _instances(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    instances, copies = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size(world_size)
    peers = copies * parallel.context_parallel_size
    of_experts = world_size // parallel.expert_tensor_model_pipeline_parallel_size
    if peers % instances:
        kinds = "data-parallel" if peers == copies else "data- and context-parallel"
        yield f"--num-distributed-optimizer-instances {instances} does not divide {peers} {kinds} ranks"
    elif of_experts % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the {of_experts} data-parallel ranks "
            "of the experts"
        )
    elif peers == instances > 1:
        yield f"--num-distributed-optimizer-instances {instances}: with one rank in each nothing is sharded"
    if instances > 1 and parallel.zero_stage == 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} needs shards: --use-distributed-optimizer or another "
            "--data-parallel-sharding-strategy than no_shard"
        )


def _ramp(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    if training.train_samples is None:
        yield f"{flag} needs --train-samples: steps of different sizes do not tell how much is trained on"
    elif training.train_samples < start:
        yield f"--train-samples {training.train_samples} is less than the first batch of {flag}"
    final = training.global_batch_size or start
    if min(start, increment, samples) < 1:
        yield f"{flag}: the start, the increment and the samples must be at least 1"
    elif start > final or (final - start) % increment:
        yield f"{flag} does not lead from {start} in steps of {increment} to --global-batch-size {final}"


def number_problems(model: ModelConfig) -> list[str]:
    """List, as of flags, the numbers of a network that none can have, by themselves or together."""
    return list(_ranges(model)) or list(network_problems(model))


def model_problems(model: ModelConfig) -> list[str]:
    """List what is wrong with a network that a file describes: its numbers, and then their relations."""
    return number_problems(model) or list(_model(model))


def _to_come(config: RunConfig) -> Iterator[str]:
    for name, reason in _TO_COME.items():
        size = getattr(config.parallel, name)
        if size > 1:
            yield f"--{name.replace('_', '-')} {size}: {megatron_flags.reason(reason)}; it takes 1"
    tensor, of_experts = config.parallel.tensor_model_parallel_size, config.parallel.expert_tensor_parallel_size
    if of_experts not in (None, tensor):
        yield (
            f"--expert-tensor-parallel-size {of_experts}: {megatron_flags.reason('experts')}; it takes {tensor}, as "
            "--tensor-model-parallel-size"
        )


def _positions(config: RunConfig) -> Iterator[str]:
    model, seq_length = config.model, config.data.seq_length
    rows = model.max_position_embeddings
    if rows is not None and rows < seq_length:
        yield f"--max-position-embeddings {rows} is less than --seq-length {seq_length}"
    yield from _model(model)
    yield from _idle(model)


def _model(model: ModelConfig) -> Iterator[str]:
    heads = model.num_attention_heads
    if model.max_position_embeddings is None and model.position_embedding_type == "learned_absolute":
        yield "--position-embedding-type learned_absolute needs --max-position-embeddings, at least --seq-length"
    if model.kv_channels is None and model.hidden_size % heads:
        yield f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {heads} (or --kv-channels)"
    if model.group_query_attention and heads % model.num_query_groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {model.num_query_groups}"
    if not model.group_query_attention and model.num_query_groups != 1:
        yield f"--num-query-groups {model.num_query_groups} needs --group-query-attention"
    chosen = [flag for flag in FLAGS if getattr(model, flag)]
    if model.activation.flags != set(chosen):
        yield f"--{' and --'.join(chosen).replace('_', '-')} are of several activations: choose one"
    if model.window_attn_skip_freq is not None and model.window_size is None:
        yield "--window-attn-skip-freq needs --window-size"
    if model.window_rotary_base is not None and model.window_size is None:
        yield "--window-rotary-base needs --window-size"
    try:
        _ = model.layers
    except ConfigurationError as error:
        yield str(error)
    yield from _rotary(model)


def _rotary(model: ModelConfig) -> Iterator[str]:
    if model.position_embedding_type == "yarn":
        yield from _yarn(model)
    if model.rotary and int(model.head_dim * model.rotary_percent) < 2:
        yield f"--rotary-percent {model.rotary_percent} of {model.head_dim} channels a head leaves no pair to rotate"
    if not model.use_rope_scaling:
        return
    if model.rotary_seq_len_interpolation_factor is not None:
        yield "--use-rope-scaling and --rotary-seq-len-interpolation-factor are two scalings: choose one"
    elif model.rope_scaling_high_freq_factor <= model.rope_scaling_low_freq_factor:
        yield (
            f"--rope-scaling-high-freq-factor {model.rope_scaling_high_freq_factor} is not above "
            f"--rope-scaling-low-freq-factor {model.rope_scaling_low_freq_factor}"
        )


def _idle(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each flag that changes nothing: of positions of another kind, or scaled by 1."""
    kind, scaling = model.position_embedding_type, ("use_rope_scaling", "rotary_seq_len_interpolation_factor")
    if kind == "yarn":
        if model.rotary_scaling_factor <= 1:
            factor = model.rotary_scaling_factor
            yield f"--position-embedding-type yarn needs a --rotary-scaling-factor above 1, not {factor}"
        idle = [(name, "--position-embedding-type rope: YaRN is a scaling of its own") for name in scaling]
    else:
        idle = [(name, "--position-embedding-type yarn") for name in _of_yarn(model)]
    if not model.rotary:
        rope = ("rotary_base", "rotary_percent", "rotary_interleaved", "window_rotary_base", *scaling)
        idle += [(name, "--position-embedding-type rope") for name in rope]
    if not model.use_rope_scaling:
        llama3 = [field.name for field in fields(model) if field.name.startswith("rope_scaling_")]
        idle += [(name, "--use-rope-scaling") for name in llama3]
    for name, needed in idle:
        if getattr(model, name) != getattr(ModelConfig, name):
            yield f"--{name.replace('_', '-')} needs {needed}"


def _of_yarn(model: ModelConfig) -> list[str]:
    names = [field.name for field in fields(model) if field.name.startswith("yarn_")]
    return [*names, "rotary_scaling_factor", "mscale", "mscale_all_dim"]


def _yarn(model: ModelConfig) -> Iterator[str]:
    original, slow = model.yarn_original_max_position_embeddings, model.yarn_beta_slow
    if original is None:
        yield "--position-embedding-type yarn needs --yarn-original-max-position-embeddings"
    if model.rotary_base <= 1:
        yield f"--position-embedding-type yarn needs a --rotary-base above 1, not {model.rotary_base}"
    if model.yarn_beta_fast <= slow:
        yield f"--yarn-beta-fast {model.yarn_beta_fast} is not above --yarn-beta-slow {slow}"
    if original is not None and original < 2 * math.pi * slow:
        yield f"over --yarn-original-max-position-embeddings {original} nothing turns --yarn-beta-slow {slow} times"


def _layout(config: RunConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    split = [("num-attention-heads", model.num_attention_heads), ("ffn-hidden-size", model.ffn_size)]
    if parallel.sequence_parallel:
        split.append(("seq-length", config.data.seq_length))
    for flag, size in split:
        if size % tensor:
            yield f"--{flag} {size} does not divide over --tensor-model-parallel-size {tensor}"
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        yield "--use-distributed-optimizer shards what --data-parallel-sharding-strategy no_shard does not: drop one"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    if parallel.overlap_param_gather and parallel.zero_stage == 0:
        yield "--overlap-param-gather needs --use-distributed-optimizer (or another --data-parallel-sharding-strategy)"


def _steps(config: RunConfig) -> Iterator[str]:
    training = config.training
    if (training.train_iters is None) == (training.train_samples is None):
        yield f"give the length as --train-iters or as --train-samples{_not_both(training.train_iters is not None)}"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    each = any((data.train_data_path, data.valid_data_path, data.test_data_path))
    ways = sum(map(bool, (data.data_path, data.data_args_path, each, data.per_split_data_args_path, data.mock_data)))
    if ways == 0:
        yield "give the data as --data-path or as --mock-data"
    elif ways > 1:
        yield (
            "the data is given in more than one way: keep one of --data-path, --data-args-path, --train-data-path "
            + ("(with --valid-data-path and --test-data-path), --per-split-data-args-path and --mock-data")
        )
    if each and not data.train_data_path:
        yield "--valid-data-path and --test-data-path need --train-data-path"
    if data.split != DataConfig.split and not (data.divided or data.mock_data):
        yield f"--split {data.split!r} divides --data-path or --data-args-path: leave it out"
    try:
        data.split_shares()
    except ConfigurationError as error:
        yield str(error)
    yield from _forms_of_data(data)


def _forms_of_data(data: DataConfig) -> Iterator[str]:
    if data.sft and (data.mock_data or data.fim_data):
        yield f"--sft reads conversations: leave {'--mock-data' if data.mock_data else '--fim-data'} out"
    if data.sft and data.eod_mask_loss:
        yield "--eod-mask-loss is for token files: with --sft the loss counts on answers alone"
    if data.chat_template is not None and not data.sft:
        yield "--chat-template needs --sft"
    if not data.fim_data:
        for field in fields(data):
            if field.name.startswith("fim_") and getattr(data, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')} needs --fim-data"


def _tokenizer(config: RunConfig) -> Iterator[str]:
    data, kind = config.data, config.data.tokenizer_type
    if kind is None:
        yield f"give --tokenizer-type: {', '.join(get_args(TokenizerType))}"
        return
    for name, kinds in FILES_AND_OPTIONS.items():
        value, reads = getattr(data, name), kind in kinds.split()
        flag = "--" + name.replace("_", "-")
        if reads and value is None:
            yield f"--tokenizer-type {kind} needs {flag}, its file"
        elif not reads and value != getattr(DataConfig, name):
            given = " ".join(value) if isinstance(value, tuple) else value
            yield f"--tokenizer-type {kind} reads no {flag} ({given})"
    if kind == "NullTokenizer" and config.model.vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens in the data"


def _evaluation(config: RunConfig) -> Iterator[str]:
    data, training = config.data, config.training
    with suppress(ConfigurationError):  # a split that cannot be read is reported with the data
        if training.eval_iters and data.divided and data.split_shares()[1] == 0:
            yield f"--split {data.split!r} leaves nothing to validate on: give a second share, or --eval-iters 0"
    if training.eval_iters and data.train_data_path and not data.valid_data_path:
        yield "there is nothing to validate on: give --valid-data-path, or --eval-iters 0"


def _precision(config: RunConfig) -> Iterator[str]:
    training = config.training
    chosen = [flag for flag in ("bf16", "fp16", "fp64") if getattr(training, flag)]
    if len(chosen) > 1:
        yield f"--{' and --'.join(chosen)} are {len(chosen)} precisions: choose one"
    scaling = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    for name in scaling if not training.fp16 else ():
        if getattr(training, name) != getattr(TrainingConfig, name):
            yield f"--{name.replace('_', '-')} scales the loss of --fp16, which is not given"
    for name in scaling[1:] if training.loss_scale is not None else ():
        if getattr(training, name) != getattr(TrainingConfig, name):
            yield f"--{name.replace('_', '-')} steers a dynamic loss scale; --loss-scale makes it constant: drop one"
    if training.min_loss_scale > training.initial_loss_scale:
        yield (
            f"--min-loss-scale {training.min_loss_scale:g} is above --initial-loss-scale "
            f"{training.initial_loss_scale:g}"
        )
    if config.parallel.grad_reduce_in_bf16 and not config.training.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16"


def _recompute(config: RunConfig) -> Iterator[str]:
    training, layers = config.training, config.model.num_layers
    method, number = training.recompute_method, training.recompute_num_layers
    if training.recompute_granularity == "full":
        if method is None or number is None:
            yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
        elif number > layers:
            yield f"--recompute-num-layers {number} is more than --num-layers {layers}"
    elif method is not None or number is not None:
        yield "--recompute-method and --recompute-num-layers need --recompute-granularity full"
    watchdog = config.watchdog
    if not watchdog.watchdog and watchdog.watchdog_min_seconds != WatchdogConfig.watchdog_min_seconds:
        yield f"--watchdog-min-seconds {watchdog.watchdog_min_seconds:g} needs the watchdog: drop --no-watchdog"
    if training.manual_gc_interval and not training.manual_gc:
        yield f"--manual-gc-interval {training.manual_gc_interval} needs --manual-gc"


def _not_both(given: bool) -> str:
    """The end of "give A or B" where none or both were given."""
    return ", not both" if given else ""
