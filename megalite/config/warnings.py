"""Warnings about permitted configurations that may give bad results, shown once at the start of a run."""

from __future__ import annotations

from megalite.config.fields import flag_of
from megalite.config.run import RunConfig

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
            "--disable-bias-linear: GELU is in its tanh form; Megatron-LM's without biases is exact (--exact-gelu)"
        )
    layers = (training.recompute_num_layers or 1) if training.recompute_method == "uniform" else 1
    if config.parallel.zero_stage == 3 and layers > 1:
        lines.append(
            f"--recompute-num-layers {layers} under ZeRO 3: backward recomputes that many layers together, and gathers"
            " all of their parameters at once"
        )
    # Masks may give micro-batches different numbers of counted tokens. The gradient is then another mean than
    # Megatron-LM's, unless Megatron-LM runs with --calculate-per-token-loss.
    masks = [name for name in ("sft", "eod_mask_loss", "fim_data") if getattr(config.data, name)]
    if masks and not per_token_loss and training.global_batch_size != training.micro_batch_size:
        lines.append(
            f"{flag_of(masks[0])}: losses are masked, and a step's is the mean over the tokens of its global batch; "
            "Megatron-LM's averages the means of the micro-batches, unless it is given --calculate-per-token-loss"
        )
    return tuple(lines)
