"""Options of distillation: a larger model whose predictions a run is trained on, beside the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config.fields import PositiveFloat, PositiveInt, ShareAboveZero, range_problems
from megalite.config.parallel import ParallelConfig
from megalite.errors import ConfigurationError

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_DIGITS = 9


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
    distill_layout: tuple[str, ...] = ()
    """Layout of the teacher on the ranks of the run, by the short names of sizes, each with its number: any of tp, pp,
    cp, ep and etp, and sequence-parallel, as in tp 4 pp 2 sequence-parallel. What is not named is 1, and data-parallel
    ranks are what is left. Unset: that of the network."""

    @property
    def teacher_layout(self) -> ParallelConfig | None:
        """The layout of the teacher; None: that of the network. Raises ConfigurationError if the words name none."""
        return _layout(self.distill_layout) if self.distill_layout else None


def _layout(words: Sequence[str]) -> ParallelConfig:
    """Return the layout that words name. Raises ConfigurationError if they name none."""
    flag, found, rest = f"--distill-layout {' '.join(words)}", dict[str, Any](), iter(words)
    for word in rest:
        name = "sequence_parallel" if word == "sequence-parallel" else _SIZES.get(word)
        if name is None:
            raise ConfigurationError(
                f"{flag}: {word!r} is no part of a layout: give any of {', '.join(_SIZES)} with a number, and "
                "sequence-parallel; data-parallel ranks are what is left"
            )
        if name in found:
            raise ConfigurationError(f"{flag}: {word} is given twice")
        found[name] = True if name == "sequence_parallel" else _number(flag, word, next(rest, ""))
    layout = ParallelConfig(**found)
    if problems := "; ".join(range_problems(layout)):
        raise ConfigurationError(f"{flag}: {problems}")
    if layout.sequence_parallel and layout.tensor_model_parallel_size == 1:
        raise ConfigurationError(
            f"{flag}: sequence-parallel changes nothing with tp 1: leave it out, or give more ranks"
        )
    return layout


def _number(flag: str, word: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise ConfigurationError(f"{flag}: {word} needs a number of ranks behind it, not {text!r}")
    return int(text)
