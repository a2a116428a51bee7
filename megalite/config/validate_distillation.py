"""Check of the options of distillation, with those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.run import RunConfig
from megalite.config.validate_division import uneven_groups
from megalite.errors import ConfigurationError


def distillation_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    own = config.distillation
    if own.distill_from is None:
        yield from needs(own, "distill_weight distill_temperature distill_top_k distill_layout", "--distill-from")
        return
    flag = f"--distill-from {own.distill_from}"
    yield from _layout_problems(config, world_size)
    if config.model.depths:
        yield f"{flag} with --mtp-num-layers {config.model.depths}: teachers predict the next token alone; drop one"
    if config.kernels.fused_linear_cross_entropy:
        yield f"{flag} with --fused-linear-cross-entropy, which never has all logits: drop one"
    if config.model.trains_indexers_alone:
        yield f"{flag} with --dsa-stage {config.model.dsa_stage}, which trains indexers alone: drop one"
    if not config.synchronization.is_plain:
        yield f"{flag} needs steps whose ranks wait for each other: drop it, or the flags of the other synchronization"
    if config.parallel.data_parallel_shares is not None:
        yield f"{flag} needs equal shares of the micro-batches: leave out --data-parallel-shares"
    for given, name in (
        (config.recovery.survivors_finish_step, "--survivors-finish-step"),
        (config.recovery.elastic, "--elastic"),
        (config.parallel.device_classes is not None, "--device-classes"),
        (bool(config.profiling.trace_steps), "--trace-steps"),
    ):
        if given:
            yield f"{flag} with {name}, which does not know of a second network: drop one"


def _layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation of the teacher's own layout to the run that does not hold."""
    flag, length = f"--distill-layout {' '.join(config.distillation.distill_layout)}", config.data.seq_length
    try:
        layout = config.distillation.teacher_layout
    except ConfigurationError as error:
        yield str(error)
        return
    if layout is None:
        return
    for problem in uneven_groups(layout, world_size):
        yield f"{flag}: {problem}"
    # With context parallelism, the check of the teacher itself has more to say.
    if layout.context_parallel_size == 1 and length % layout.sequence_parts:
        yield f"{flag}: --seq-length {length} is not divisible by {layout.tensor_model_parallel_size}"
    if config.parallel.cp_balance == "documents":
        yield f"{flag} with --cp-balance documents, whose deal of tokens other ranks do not know: drop one"
