"""Upcycling: a network with experts starts from a dense one (arXiv:2212.05055). Each expert is a copy of its layer."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind, Source
from megalite.config import ModelConfig
from megalite.conversion.opened import OpenedModel, tensors_of_training
from megalite.errors import CheckpointError
from megalite.parallel.initialization import initial_values
from megalite.parallel.sharding import Box, LogicalTensor


def upcycled(dense: OpenedModel, model: ModelConfig, seed: int) -> OpenedModel:
    """Return a dense model as one with the experts of `model`, whose routers have the initial values of `seed`.

    Raises CheckpointError if it has experts already, or if its feed-forward layers have another width than the experts.
    """
    if dense.config.num_experts is not None:
        raise CheckpointError(f"{dense.what} has experts already: drop --moe-use-upcycling")
    if dense.config.ffn_size != model.expert_ffn_size:
        raise CheckpointError(
            f"{dense.what} has feed-forward layers of width {dense.config.ffn_size}, of which experts of width "
            f"{model.expert_ffn_size} cannot be copies: give --moe-ffn-hidden-size {dense.config.ffn_size}"
        )
    own = {each.name for each in fields(ModelConfig) if each.name.startswith("moe_")} | {"num_experts"}
    notes = dense.notes
    if not weights_add_up_to_one(model):
        notes += ("note: the weights of a token's experts do not add up to 1: upcycling changes the logits",)
    if model.moe_expert_capacity_factor is not None:
        notes += ("note: --moe-expert-capacity-factor drops experts of tokens, so training begins with another loss",)
    return replace(
        dense,
        what=f"{dense.what}, upcycled",
        config=replace(dense.config, **{name: getattr(model, name) for name in own}),
        source=_Upcycled(dense.source, model, seed),
        is_huggingface=False,
        notes=notes,
    )


def weights_add_up_to_one(model: ModelConfig) -> bool:
    """Tell whether equal experts compute what one of them does, for each token and choice."""
    if model.topk_scaling_factor != 1.0 or model.moe_shared_expert_intermediate_size is not None:
        return False
    if model.moe_router_score_function != "softmax":
        return model.moe_router_topk > 1
    return not model.moe_router_pre_softmax or model.moe_router_topk == model.num_experts


class _Upcycled:
    """Tensors of a network with experts, from those of a dense one (a `Source`)."""

    def __init__(self, dense: Source, model: ModelConfig, seed: int) -> None:
        """Find for each tensor of `model` the dense one to copy; those without one are drawn from `seed`."""
        self._dense, self._seed = dense, seed
        self._copied: dict[str, str] = {}
        self._drawn: dict[str, LogicalTensor] = {}
        self.tensors: dict[str, Kind] = {}
        for name, tensor in tensors_of_training(model).items():
            of_layer = name.replace(".moe.", ".mlp.")
            if name in dense.tensors:
                self.tensors[name] = dense.tensors[name]
            elif of_layer in dense.tensors:
                kind = dense.tensors[of_layer]
                self._copied[name] = of_layer
                self.tensors[name] = Kind((tensor.shape[0], *kind.shape), kind.dtype)
            elif ".moe." in name:
                self._drawn[name] = tensor
                self.tensors[name] = Kind(tensor.shape, torch.float32)

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        if name in self._drawn:
            values.copy_(initial_values(self._drawn[name], box, self._seed))
        elif name in self._copied:
            self._dense.fill(self._copied[name], Box(box.offset[1:], box.size[1:]), values[0])
            values[1:] = values[0]
        else:
            self._dense.fill(name, box, values)
