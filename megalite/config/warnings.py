"""Warnings about permitted configurations that may give bad results, shown once at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import flag_of
from megalite.config.run import RunConfig

_FEW_TOKENS = 1024
"""Tokens of a sample on a rank below which context parallelism buys nothing."""
_HALF_OF_THE_LAST_BIT = 2.0**-8
"""Precision of bf16: a change of a number by less than this fraction may be rounded away."""


def config_warnings(config: RunConfig, *, per_token_loss: bool) -> tuple[str, ...]:
    """Return lines to show at the start. `per_token_loss`: the flags say how masked losses are averaged."""
    optimizer, lines = config.optimizer, []
    decay = 1.0 - optimizer.adam_beta2
    if optimizer.exp_avg_sq_dtype == "bf16" and optimizer.optimizer != "sgd" and decay < _HALF_OF_THE_LAST_BIT:
        lines.append(
            f"--exp-avg-sq-dtype bf16 with --adam-beta2 {optimizer.adam_beta2}: a step lowers an average of squares by "
            f"at most {decay:.2g} of its value, which bf16 rounds away: once high, it stays high. Give "
            "--adam-beta2 0.99 or less, or keep fp32"
        )
    if optimizer.exp_avg_dtype == "fp16":
        lines.append("--exp-avg-dtype fp16: averages of gradients below 6e-8 become zero; bf16 has fp32's range")
    if optimizer.exp_avg_dtype == "int8" and optimizer.optimizer == "adam" and optimizer.exp_avg_sq_dtype != "int8":
        lines.append(
            f"--exp-avg-dtype int8 with --exp-avg-sq-dtype {optimizer.exp_avg_sq_dtype}: weights whose gradients are "
            "1000 times smaller than some of their 256 neighbours' change at random, since their average is rounded. "
            "Give int8 for both, which lets them learn slowly instead, or fp8 for both"
        )
    if optimizer.main_params_dtype == "fp16":
        lines.append(
            "--main-params-dtype fp16: a step that changes a weight by less than 1 / 4096 of its value is rounded away"
        )
    model, training = config.model, config.training
    if model.activation.name == "gelu" and not model.add_bias_linear:
        lines.append(
            "GELU is in its tanh form; Megatron-LM's is exact without biases, which --disable-bias-linear turns off"
        )
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate == 0:
        lines.append("--moe-router-bias-update-rate 0: the bias of the experts stays as it is at the start")
    if model.moe_z_loss_coeff == 0:
        lines.append("--moe-z-loss-coeff 0: there is no z-loss, and none is recorded")
    lines += _sparse_attention(config)
    layers = (training.recompute_num_layers or 1) if training.recompute_method == "uniform" else 1
    if config.parallel.zero_stage == 3 and layers > 1:
        lines.append(
            f"--recompute-num-layers {layers} under ZeRO 3: backward recomputes that many layers together, and gathers"
            " all of their parameters at once"
        )
    lines += _context_parallel(config)
    # Masks may give micro-batches different numbers of counted tokens. The gradient is then another mean than
    # Megatron-LM's, unless Megatron-LM runs with --calculate-per-token-loss.
    masks = [name for name in ("sft", "eod_mask_loss", "fim_data") if getattr(config.data, name)]
    if masks and not per_token_loss and training.global_batch_size != training.micro_batch_size:
        lines.append(
            f"{flag_of(masks[0])}: losses are masked, and a step's is the mean over the tokens of its global batch; "
            "Megatron-LM's averages the means of the micro-batches, unless it is given --calculate-per-token-loss"
        )
    return tuple(lines)


def _sparse_attention(config: RunConfig) -> Iterator[str]:
    """Yield what makes indexers stay as they are, or choose all keys."""
    model, length = config.model, config.data.seq_length
    if "sparse_attention" not in model.kinds:
        return
    if not model.trains_indexers:
        yield "indexers are frozen: --dsa-indexer-loss-coeff above 0 trains them"
    topk = model.dsa_indexer_topk or 0
    if topk >= length and model.dsa_stage != "warmup":
        yield f"--dsa-indexer-topk {topk} with --seq-length {length}: attention is to all keys"


def _context_parallel(config: RunConfig) -> Iterator[str]:
    """Yield what may be slow or surprising under context parallelism."""
    model, size, length = config.model, config.parallel.context_parallel_size, config.data.seq_length
    if size == 1:
        return
    if length // size < _FEW_TOKENS:
        yield (
            f"--context-parallel-size {size} with --seq-length {length}: a rank has {length // size} tokens of a "
            "sample. Samples that fit on one rank train faster with data parallelism, which communicates less"
        )
    parallel, data = config.parallel, config.data
    if data.reset_attention_mask and config.training.micro_batch_size > 1:
        yield (
            f"--micro-batch-size {config.training.micro_batch_size} with --context-parallel-size {size} and documents: "
            "scores are skipped only if no sample of the micro-batch needs them; --micro-batch-size 1 computes fewer"
        )
    if parallel.cp_balance == "documents" and not (data.reset_attention_mask or data.sft):
        yield (
            "--cp-balance documents: without --reset-attention-mask samples have no documents, and their chunks are "
            "only smaller"
        )
    scaled = model.use_rope_scaling or model.rotary_seq_len_interpolation_factor is not None
    if model.position_embedding_type == "rope" and not scaled and model.rotary_base <= 10_000 and length > 4096:
        yield (
            f"--rotary-base {model.rotary_base} with --seq-length {length}: models for long samples have a larger base "
            "(Llama 3 has 500000 for 8192 tokens), or scale that of a model for shorter ones: --use-rope-scaling, or "
            "--position-embedding-type yarn"
        )
