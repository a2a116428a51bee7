"""Options of distillation: a larger model whose predictions a run is trained on, beside the labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.config.fields import PositiveFloat, PositiveInt, ShareAboveZero, needs

if TYPE_CHECKING:
    from megalite.config.run import RunConfig


@dataclass(frozen=True)
class DistillationConfig:
    """Options of a teacher and of the term of the loss that compares the network with it."""

    distill_from: str | None = None
    """Teacher: a run directory, one of its checkpoints, or a Hugging Face folder, with the same vocabulary. The loss is
    (1 - w) x that of the labels + w x the divergence KL(teacher || network) of the predictions, by distill-weight w."""
    distill_weight: ShareAboveZero = 0.5
    """Weight of the divergence in the loss; the loss of the labels has the rest."""
    distill_temperature: PositiveFloat = 1.0
    """Divide the logits of both networks by this in the divergence, which is then multiplied by its square, so that
    gradients keep their size."""
    distill_top_k: PositiveInt | None = None
    """Take only so many of the teacher's largest logits for each token, and those equal to the last of them: the others
    have the probability 0. Unset: all."""


def distillation_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    own = config.distillation
    if own.distill_from is None:
        yield from needs(own, "distill_weight distill_temperature distill_top_k", "--distill-from")
        return
    flag = f"--distill-from {own.distill_from}"
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
    ):
        if given:
            yield f"{flag} with {name}, which does not know of a second network: drop one"
