"""Pipeline stages from plain modules, for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.stage import StageOutput, TensorSpec
from megalite.pipeline.stages import Stages

HIDDEN, LOSS = "hidden_states", "lm_loss"
Plain = Callable[[Tensor | None, Any], Tensor]
"""From hidden states, None for the first stage, and a micro-batch to hidden states, or to the last stage's loss."""


def as_stage(plain: Plain, *, last: bool) -> Callable[[Mapping[str, Tensor], Any], StageOutput]:
    """A stage of a pipeline."""

    def stage(inputs: Mapping[str, Tensor], micro_batch: Any) -> StageOutput:
        output = plain(inputs.get(HIDDEN), micro_batch)
        return StageOutput({}, {LOSS: output}) if last else StageOutput({HIDDEN: output})

    return stage


def passing_hidden(stages: Stages, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Stages:
    """The stages, each of which passes on hidden states of this kind."""
    return replace(stages, messages=((TensorSpec(HIDDEN, shape, dtype),),) * (stages.count - 1))


def loss_of(network: nn.Module, micro_batch: Any) -> Tensor:
    """The language-model loss of a whole network."""
    output: StageOutput = network({}, micro_batch)
    return output.terms[LOSS]


def logits_of(network: nn.Module, micro_batch: Any) -> Tensor:
    """The logits of a whole network for a micro-batch without labels."""
    output: StageOutput = network({}, micro_batch)
    return output.tensors["logits"]
