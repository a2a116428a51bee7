"""LARS, LAMB, Lion and Adafactor written out by hand in numpy, independent of megalite, for one whole matrix or vector.

`plain` is true for what has no weight decay: biases and norms. `state` is empty before the first of the steps, `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.muon import from_matrices, matrices

Array = NDArray[np.float64]
State = dict[str, Any]
Rule = Callable[..., Array]


def lars(state: State, weight: Array, gradient: Array, *, step: int, rate: float, decay: float, plain: bool) -> Array:
    size, slope = np.linalg.norm(weight), np.linalg.norm(gradient)
    local = 1.0 if plain or slope == 0 else 0.02 * size / (slope + decay * size)
    state["v"] = 0.9 * state.get("v", 0.0) + rate * local * (gradient + decay * weight)
    moved: Array = weight - state["v"]
    return moved


def lamb(state: State, weight: Array, gradient: Array, *, step: int, rate: float, decay: float, plain: bool) -> Array:
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * gradient**2
    direction = state["m"] / (1 - 0.9**step) / (np.sqrt(state["v"] / (1 - 0.999**step)) + 1e-6) + decay * weight
    length = np.linalg.norm(direction)
    ratio = 1.0 if plain or length == 0 else np.linalg.norm(weight) / length
    moved: Array = weight - rate * ratio * direction
    return moved


def lion(state: State, weight: Array, gradient: Array, *, step: int, rate: float, decay: float, plain: bool) -> Array:
    before = state.get("m", np.zeros_like(weight))
    state["m"] = 0.98 * before + 0.02 * gradient
    moved: Array = weight - rate * (np.sign(0.95 * before + 0.05 * gradient) + decay * weight)
    return moved


def adafactor(
    state: State, weight: Array, gradient: Array, *, step: int, rate: float, decay: float, plain: bool
) -> Array:
    beta, squares = 1 - step**-0.8, gradient**2 + 1e-12
    if gradient.ndim == 3 and not plain:  # a matrix: [1, rows, columns]
        state["rows"] = beta * state.get("rows", 0.0) + (1 - beta) * squares.sum(2)
        state["columns"] = beta * state.get("columns", 0.0) + (1 - beta) * squares.sum(1)
        second = state["rows"][:, :, None] * state["columns"][:, None, :] / state["rows"].sum()
    else:
        second = state["v"] = beta * state.get("v", 0.0) + (1 - beta) * squares
    update = gradient / np.sqrt(second)
    update = update / max(1.0, np.sqrt(np.mean(update**2)))
    moved: Array = weight - rate * (update + decay * weight)
    return moved


RULES: dict[str, Rule] = {"lars": lars, "lamb": lamb, "lion": lion, "adafactor": adafactor}


class ByHand(torch.optim.Optimizer):
    """Rule for groups with `params` (one), `name` and `free` (of weight decay); each matrix is a whole of its own."""

    def __init__(self, groups: list[dict[str, Any]], rule: Rule) -> None:
        self.rule, self.steps = rule, 0
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            (weight,) = group["params"]
            whole, slope = matrices(group["name"], weight), matrices(group["name"], weight.grad)
            parts = [(weight, weight.grad)]
            if whole is not None and slope is not None:
                parts = list(zip(whole[:, None], slope[:, None], strict=True))
            options = {"rate": group["lr"], "decay": group["weight_decay"], "plain": group["free"], "step": self.steps}
            states = self.state[weight]
            moved = [
                torch.from_numpy(
                    self.rule(states.setdefault(number, {}), part.detach().numpy(), gradient.numpy(), **options)
                )
                for number, (part, gradient) in enumerate(parts)
            ]
            weight.copy_(moved[0] if whole is None else from_matrices(group["name"], torch.cat(moved), weight.shape))
