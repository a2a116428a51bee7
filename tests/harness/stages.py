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
"""Function from hidden states (None for the first stage) and a micro-batch to hidden states, or the loss on the last
stage."""


def as_stage(plain: Plain, *, last: bool) -> Callable[[Mapping[str, Tensor], Any], StageOutput]:
    """Return a stage of a pipeline."""

    def stage(inputs: Mapping[str, Tensor], micro_batch: Any) -> StageOutput:
        output = plain(inputs.get(HIDDEN), micro_batch)
        return StageOutput({}, {LOSS: output}) if last else StageOutput({HIDDEN: output})

    return stage


def passing_hidden(stages: Stages, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Stages:
    """Return the stages, each of which passes on hidden states of this shape and dtype."""
    return replace(stages, messages=((TensorSpec(HIDDEN, shape, dtype),),) * (stages.count - 1))


def loss_of(network: nn.Module, micro_batch: Any) -> Tensor:
    """Return the language-model loss of an unsplit network."""
    output: StageOutput = network({}, micro_batch)
    return output.terms[LOSS]


def logits_of(network: nn.Module, micro_batch: Any) -> Tensor:
    """Return the logits of an unsplit network for a micro-batch without labels."""
    output: StageOutput = network({}, micro_batch)
    return output.tensors["logits"]
