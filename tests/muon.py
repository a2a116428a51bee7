"""Muon written out by hand, independent of megalite: whole tensors by name, made orthogonal by their singular values.

Newton-Schulz steps are a polynomial of the matrix that acts on its singular values alone; here they act on those.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(matrix: Tensor, steps: tuple[tuple[float, float, float], ...]) -> Tensor:
    """[..., rows, columns] in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp(min=1e-7)
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return left * values.unsqueeze(-2) @ right


def matrices(name: str, tensor: Tensor, *, per_head: bool = False) -> Tensor | None:
    """The matrices that the mathematics names, [matrices, rows, columns]; None for vectors and tables.

    `per_head`: each head of queries, keys, values and gates is a matrix.
    """
    kind = name.split(".")[-1]
    of_heads = ("query", "key", "value", "key_value", "gate", "query_up", "key_value_up", "z", "decay_b", "gate_b")
    if ".indexer." in name and kind in ("key", "weights"):
        return tensor.unsqueeze(0)
    if per_head and kind in of_heads and "mamba" not in name and tensor.dim() > 2:
        return tensor.flatten(0, -3)
    own = (["mamba"], ["gated_delta"], ["kimi_delta"], ["short_convolution"], ["latent_attention"])
    if ".indexer." in name and "norm" not in name:
        return tensor.flatten(0, -2).unsqueeze(0)
    if name.split(".")[2:3] in own:
        if kind.startswith("conv") or kind in ("A_log", "D", "dt_bias", "weight", "bias") or kind.endswith("_bias"):
            return None
        return tensor.flatten(1).unsqueeze(0) if kind == "output" else tensor.flatten(0, -2).unsqueeze(0)
    if kind == "key_value":
        return tensor.transpose(0, 1).flatten(1, 2)
    if kind in ("query", "gate"):
        return tensor.flatten(0, 1).unsqueeze(0)
    if kind == "output" and name != "output":
        return tensor.flatten(1, 2).unsqueeze(0)
    if kind == "projection":
        return tensor.flatten(1).unsqueeze(0)
    if kind == "gate_up":
        return tensor.flatten(0, -3)
    if kind in ("up", "down", "router", "latent_down", "latent_up"):
        return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    return None


def from_matrices(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `matrices` for a tensor of this shape."""
    if name.endswith("key_value") and len(values) == 2:  # not of each head
        return values.view(2, shape[0], *shape[2:]).transpose(0, 1)
    return values.reshape(shape)


class Muon(torch.optim.Optimizer):
    """Muon for tensors that have matrices: groups with `params` (one) and `name`. Updates have AdamW's size: 0.2."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        momentum: float,
        *,
        nesterov: bool,
        per_head: bool = False,
        fused: bool = False,
    ) -> None:
        self.momentum, self.nesterov, self.steps, self.per_head = momentum, nesterov, QUINTIC, per_head
        self.fused = fused  # queries, gates, keys and values of attention are one matrix
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        together: dict[str, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            layer, _, part = group["name"].rpartition(".attention.")
            whole = layer if self.fused and part in ("query", "gate", "key_value") else group["name"]
            together.setdefault(whole, []).append(group)
        for groups in together.values():
            self._step(groups)

    def _step(self, groups: list[dict[str, Any]]) -> None:
        ahead = [self._ahead(group["params"][0]) for group in groups]
        found = [
            matrices(group["name"], each, per_head=self.per_head) for group, each in zip(groups, ahead, strict=True)
        ]
        parts = [each for each in found if each is not None]
        assert len(parts) == len(groups)
        if len(groups) == 1:
            updates = [orthogonalized(parts[0], self.steps)]
            scale = 0.2 * math.sqrt(max(parts[0].shape[1:]))
        else:
            rows = torch.cat([each.flatten(0, 1) for each in parts])
            scale = 0.2 * math.sqrt(max(rows.shape))
            of_parts = orthogonalized(rows, self.steps).split([len(each.flatten(0, 1)) for each in parts])
            updates = [each.view(part.shape) for each, part in zip(of_parts, parts, strict=True)]
        for group, update in zip(groups, updates, strict=True):
            (weight,) = group["params"]
            update = from_matrices(group["name"], scale * update, weight.shape)
            weight.copy_(weight - group["lr"] * (group["weight_decay"] * weight + update))

    def _ahead(self, weight: Tensor) -> Tensor:
        average = self.state[weight].setdefault("average", torch.zeros_like(weight))
        average.copy_(self.momentum * average + (1 - self.momentum) * weight.grad)
        return self.momentum * average + (1 - self.momentum) * weight.grad if self.nesterov else average
