"""Options of training on pairs of responses, a chosen and a rejected one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.fields import PositiveFloat, Share


@dataclass(frozen=True)
class PreferenceConfig:
    """Options of the loss of pairs of responses, and of the reference that it compares with."""

    preference_loss: Literal["dpo", "ipo"] = "dpo"
    """Loss of pairs: dpo, or ipo with the mean over a response's tokens in place of the sum."""
    preference_beta: PositiveFloat = 0.1
    """Strength with which the loss holds the network to the reference."""
    preference_label_smoothing: Share = 0.0
    """Share of the pairs that are taken to be labelled the wrong way round, for dpo; below 0.5."""
    reference_model: str | None = None
    """The reference: a checkpoint of megalite, or a Hugging Face folder. It stays the same when the run resumes."""
    reference_log_probabilities: str | None = None
    """Directory for the reference's log-probabilities of all pairs: if they are not there, they are computed once and
    written; then training does not hold the reference in memory."""
