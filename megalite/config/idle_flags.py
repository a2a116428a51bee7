"""Flags that change nothing beside others: they are turned off, and a line tells of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.adapters import is_target
from megalite.config.fields import changed, flag_of, given, with_defaults
from megalite.config.kinds.attention import OF_ATTENTION
from megalite.config.kinds.experts import WITHOUT_LOSS
from megalite.config.layer_specs import ATTENTION_LETTER, PATTERN_FLAG, LayerSpec, kinds_with_core
from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import virtual_stages, why_nothing_is_aligned
from megalite.config.run import RunConfig
from megalite.config.validate_model import has_idle_softmax
from megalite.errors import ConfigurationError
from megalite.small_files import shown

_IDLE_WITH_ONE_RANK = {
    "tensor_model_parallel_size": "sequence_parallel",
    "pipeline_model_parallel_size": "account_for_* overlap_p2p_communication align_grad_reduce",
    "context_parallel_size": "cp_* hierarchical_context_parallel_sizes",
}
_WITHOUT_QUERIES = {"dense", "moe", "mamba", "short_convolution"}
"""Kinds of layers that are known to have no queries, keys and values; those of a program may have them."""


def without_idle_flags(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Turn off flags that have no effect, as Megatron-LM does. Returns the configuration and a line about each flag."""
    lines: list[str] = []
    for section, names, why in _idle(config):
        options = getattr(config, section)
        lines += [f"{flag}: changes nothing{why}" for flag in given(options, names)]
        config = replace(config, **{section: with_defaults(options, changed(options, names))})
    return config, tuple(lines)


def _idle(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield section and names of fields that have no effect, with the reason."""
    for axis, names in _IDLE_WITH_ONE_RANK.items():
        if getattr(config.parallel, axis) == 1:
            yield "parallel", names, f", since {flag_of(axis)} is 1"
    if not config.model.has_attention:
        since = f", since {why_no_attention(config.model)}"
        yield "model", OF_ATTENTION, since
        yield "parallel", "cp_comm_type hierarchical_context_parallel_sizes", since
    attention = {layer.mixer for layer in _layers(config.model) if layer.attends}
    if attention == {"sparse_attention"}:
        since = ", since sparse attention gathers the latents of a sample"
        yield "parallel", "cp_comm_type hierarchical_context_parallel_sizes", since
    if config.model.has_latents:
        yield "model", "kv_channels", ", since attention is over latents (--qk-head-dim and others are its widths)"
        if config.model.position_embedding_type == "rope" and config.model.rotary_scaling_factor == 1:
            yield "model", "mscale mscale_all_dim", ", since --rotary-scaling-factor is 1"
    if config.low_precision.recipe is None:
        names = "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        yield "low_precision", names, " without --fp8-format or --fp4-format"
    if config.adapters.lora_rank is not None:
        yield "low_precision", "fp8_wgrad", ", since --lora-rank trains none of the weights whose gradients it rounds"
        if is_target("down", config.adapters.lora_target_modules):
            since = ", since --lora-rank adapts the second matrices of all layers, whose inputs are kept as values"
            yield "low_precision", "activation_func_fp8_input_store", since
    if not config.model.qk_layernorm:
        yield "model", "apply_wd_to_qk_layernorm", " without --qk-layernorm"
    if not config.model.qk_clip:
        yield "model", "qk_clip_alpha qk_clip_threshold", " without --qk-clip"
    if config.model.hybrid_layer_pattern is not None:
        yield "model", "experimental_attention_variant linear_attention_freq", f", since {PATTERN_FLAG} has all layers"
    if config.model.num_experts is None:
        yield "parallel", "expert_tensor_parallel_size", " without --num-experts"
    kinds, weights = config.model.moe_router_load_balancing_type, config.model.moe_aux_loss_coeff
    if config.model.num_experts is not None and weights == (0.0,) and len(kinds) == 1 and kinds[0] not in WITHOUT_LOSS:
        yield "model", "moe_router_load_balancing_type", ", since --moe-aux-loss-coeff is 0"
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
    if why := why_nothing_is_aligned(stages_per_rank(config), config.parallel):
        yield "parallel", "align_grad_reduce", f" {why}"
    if config.model.kinds and config.model.kinds <= _WITHOUT_QUERIES:
        yield "optimizer", "muon_split_qkv_per_head", ", since no layer has queries, keys and values"
    if config.model.kinds and "attention" not in config.model.kinds:
        yield "optimizer", "muon_split_qkv", ", since no layer has attention without latents"
    if config.optimizer.lr_decay_style != "WSD":
        yield "optimizer", "lr_wsd_decay_style", " without --lr-decay-style WSD"
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


def _layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers; none if a flag that describes them cannot be parsed, which is reported elsewhere."""
    return model.all_layers if model.kinds else ()


def why_no_attention(model: ModelConfig) -> str:
    if (pattern := model.hybrid_layer_pattern) is not None:
        return f"{PATTERN_FLAG} {shown(pattern)} has no attention ({ATTENTION_LETTER})"
    return f"--linear-attention-freq {model.linear_attention_freq} leaves no layer attention"


def _recomputes_nothing(config: RunConfig) -> bool:
    """Tell whether layers are known and --recompute-granularity selective computes nothing of them again."""
    training, kinds = config.training, config.model.kinds
    only_cores = training.recompute_granularity == "selective" and "moe" not in training.recompute_modules
    return only_cores and bool(kinds) and not kinds & kinds_with_core()


def stages_per_rank(config: RunConfig) -> int:
    """Return the number of stages per rank; more than one if they cannot be divided, which `validate` reports."""
    try:
        return virtual_stages(config.model, config.parallel)
    except ConfigurationError:
        return 2
