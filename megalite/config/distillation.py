"""Options of distillation: a larger model whose predictions a run is trained on, beside the labels."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.fields import PositiveFloat, PositiveInt, ShareAboveZero


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
