"""Weights that a run of megalite begins with, which are a function of its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.conversion.opened import OpenedModel, logical_tensors, tensors_of_training
from megalite.extras.verify.command import Command
from megalite.parallel.initialization import initial_values
from megalite.parallel.sharding import Box, LogicalTensor
from megalite.training.builder import model_dtype
from megalite.training.data import open_tokenizer, vocab_size


@dataclass(frozen=True)
class InitialValues:
    """Initial values of logical tensors, by name (a `Source`), in the precision in which the run has them."""

    logical: Mapping[str, LogicalTensor]
    tensors: Mapping[str, Kind]
    seed: int

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Draw a box of a tensor."""
        values.copy_(initial_values(self.logical[name], box, self.seed).to(self.tensors[name].dtype))


def initial_weights(command: Command) -> OpenedModel:
    """Return the network of a command with its initial weights. Raises DataError if it has no tokenizer here."""
    config = command.config
    model = replace(config.model, vocab_size=vocab_size(open_tokenizer(config), config.model))
    every, names, dtype = tensors_of_training(model), logical_tensors(model), model_dtype(config)
    precise = torch.promote_types(dtype, torch.float32)
    kinds = {name: Kind(shape, precise if every[name].fp32 else dtype) for name, shape in names.items()}
    seed = config.training.seed
    return OpenedModel(f"the initial weights of seed {seed}", model, InitialValues(every, kinds, seed))
