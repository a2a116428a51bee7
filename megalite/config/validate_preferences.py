"""Relations of the options of pairs of responses."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import given, needs
from megalite.config.run import RunConfig


def preference_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    data, options, model = config.data, config.preferences, config.model
    if not data.preference_data:
        yield from needs(options, "*", "--preference-data")
        return
    if options.reference_model is None and options.reference_log_probabilities is None:
        yield (
            "--preference-data needs a reference: give --reference-model, usually the model that --load or --finetune "
            "begins with, or --reference-log-probabilities, a directory that has its log-probabilities"
        )
    if options.reference_log_probabilities is not None and config.low_precision.recipe == "tensorwise":
        yield (
            "--fp8-recipe tensorwise with --reference-log-probabilities: a scale is that of a micro-batch, so a "
            "response has other log-probabilities beside others: give --fp8-recipe blockwise, or --reference-model "
            "alone"
        )
    if options.preference_label_smoothing and options.preference_loss != "dpo":
        yield f"--preference-label-smoothing is for dpo: leave it out with --preference-loss {options.preference_loss}"
    if options.preference_label_smoothing >= 0.5:
        yield (
            f"--preference-label-smoothing {options.preference_label_smoothing:g} says that the rejected responses are "
            "the better ones: give less than 0.5"
        )
    if model.depths:
        yield f"--preference-data trains the next token alone: leave out --mtp-num-layers {model.depths}"
    names = "sft fim_data eod_mask_loss reset_position_ids reset_attention_mask loss_weights"
    others = [*given(data, names), *given(config.training, "label_smoothing z_loss_coeff moe_replay_routing")]
    others += [*given(config.parallel, "data_parallel_shares"), *given(config.recovery, "warm_restart elastic")]
    others += given(config.distillation, "distill_from")
    for flag in others:
        yield f"{flag} does not go with --preference-data: leave it out"
    if config.logging.log_validation_ppl_to_tensorboard:
        yield "--log-validation-ppl-to-tensorboard: the loss of --preference-data has no perplexity: leave it out"
    if not config.synchronization.is_plain:
        yield "--preference-data needs plain data parallelism: leave out the flags of --synchronization"
