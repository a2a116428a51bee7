"""AdamW over a stage, whose states may be divided over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from museum.plain.network import Stage
from museum.plain.ranks import Group, Ranks, all_gather
from museum.plain.settings import Settings
from museum.plain.tensor_parallel import Weight


def clip(norm: float, limit: float) -> float:
    """Return the factor of gradients by which their norm is at most the limit."""
    return min(1.0, limit / (norm + 1e-6))


@dataclass
class State:
    """State of the optimizer for a weight, or for this rank's part of it: the precise weight, and two averages."""

    master: Tensor
    average: Tensor
    average_square: Tensor


def masters(parameter: Weight, settings: Settings) -> Tensor:
    """Return a weight in the precision in which it is updated."""
    return parameter.detach().to(settings.wide)


def decays(name: str, parameter: Weight) -> bool:
    """Tell whether a weight decays: norms do not."""
    return len(parameter.part.shape) > 1


def warm_up(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, from 1: a linear warm-up from 0, then a cosine, as in Megatron-LM."""
    before = step - 1
    if settings.warm_up and before <= settings.warm_up:
        return settings.rate * before / settings.warm_up
    passed = min((before - settings.warm_up) / (settings.decay_steps - settings.warm_up), 1.0)
    height = 0.5 * (1.0 + math.cos(math.pi * passed))
    return settings.least_rate + (settings.rate - settings.least_rate) * height


def adam_update(state: State, gradient: Tensor, settings: Settings, step: int, rate: float, decay: float) -> None:
    """Change a weight by AdamW, whose decay is apart from the gradient."""
    state.average.lerp_(gradient, 1.0 - settings.beta1)
    state.average_square.lerp_(gradient.square(), 1.0 - settings.beta2)
    mean = state.average / (1.0 - settings.beta1**step)
    root = (state.average_square / (1.0 - settings.beta2**step)).sqrt()
    state.master.mul_(1.0 - rate * decay).sub_(mean / (root + settings.adam_epsilon), alpha=rate)


def own_part(whole: Tensor, group: Group) -> Tensor:
    """Return the elements of a weight that this rank updates, [n]; the last ranks may have zeros in the end."""
    flat = whole.flatten()
    size = -(-len(flat) // group.size)
    return F.pad(flat, (0, size * group.size - len(flat)))[size * group.index :][:size].clone()


def gather_parameters(own: Tensor, parameter: Weight, group: Group) -> Tensor:
    """Return a whole weight, from the elements that this rank has updated."""
    parts = all_gather(own.to(parameter.dtype), group)
    return torch.cat(parts)[: parameter.numel()].view_as(parameter)


class Optimizer:
    """AdamW over the weights of a stage."""

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        self.stage, self.ranks, self.steps = stage, ranks, 0
        self.states: dict[str, State] = {}
        for name, parameter in stage.weights():
            own = own_part(masters(parameter, ranks.settings), self._owners(parameter))
            self.states[name] = State(own, torch.zeros_like(own), torch.zeros_like(own))

    def _owners(self, parameter: Weight) -> Group:
        """Return the ranks over which the state of a weight is divided."""
        if not self.ranks.settings.zero:
            return Group((self.ranks.rank,), 0)
        return self.ranks.edp if parameter.part.is_expert else self.ranks.data

    @torch.no_grad()
    def step(self, rate: float, factor: float) -> None:
        """Update the weights by their gradients times a factor."""
        self.steps += 1
        settings = self.ranks.settings
        for name, parameter in self.stage.weights():
            owners, state = self._owners(parameter), self.states[name]
            gradient = own_part(parameter.main_grad * factor, owners)
            adam_update(state, gradient, settings, self.steps, rate, settings.decay if decays(name, parameter) else 0.0)
            parameter.copy_(gather_parameters(state.master, parameter, owners))
            clear_gradient(parameter)


def clear_gradient(parameter: Weight) -> None:
    parameter.main_grad = torch.zeros_like(parameter.main_grad)
