"""Update rules of optimizers as formulas on one tensor, in the dtype of what is given: fp64 for the truth.

A rule has fields for what programs do otherwise by mistake, so that a hypothesis is a rule with another field.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalite.optim.newton_schulz import orthogonalized, update_scale
from megalite.parallel.sharding import LogicalTensor

AVERAGE, SQUARES, MOMENTUM = STATES = "exp_avg", "exp_avg_sq", "momentum_buffer"
States = Mapping[str, Tensor]
"""State of the optimizer for one tensor, by name."""


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Update of a tensor.

    Attributes:
        rate: the learning rate.
        decay: the weight decay.
        factor: factor of the gradient, as of clipping.
        rounds_states: dtype to which state is rounded after each update; None: as it is computed.
        rounds_weights: dtype to which weights are rounded before and after the update; None: as they are.
        anew: whether state is zero before the update.
        leaves_weights: whether weights stay as they are.
        leaves_states: whether state stays as it is.
    """

    rate: float
    decay: float
    factor: float = 1.0
    rounds_states: torch.dtype | None = None
    rounds_weights: torch.dtype | None = None
    anew: bool = False
    leaves_weights: bool = False
    leaves_states: bool = False

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the state."""

    def states(self, gradient: Tensor, states: States, weights: Tensor) -> dict[str, Tensor]:
        """Return the state after the update. All tensors have the same shape."""
        if self.leaves_states:
            return {name: states[name] for name in self.names}
        before = {name: torch.zeros_like(weights) if self.anew else states[name] for name in self.names}
        found = self._states(gradient * self.factor, before, weights)
        return {name: _rounded(values, self.rounds_states) for name, values in found.items()}

    def weights(self, weights: Tensor, states: States, gradient: Tensor | None = None) -> Tensor:
        """Return the weights after the update, from the state after it.

        `gradient`: needed by rules whose `needs_gradient` is true.
        """
        if self.leaves_weights:
            return weights
        scaled = None if gradient is None else gradient * self.factor
        found = self._weights(_rounded(weights, self.rounds_weights), states, scaled)
        return _rounded(found, self.rounds_weights)

    @property
    def needs_gradient(self) -> bool:
        """True if weights follow from the state after the update and the gradient, and not from the state alone."""
        return False

    @abstractmethod
    def _states(self, gradient: Tensor, states: States, weights: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _weights(self, weights: Tensor, states: States, gradient: Tensor | None) -> Tensor: ...


def _rounded(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    return values if dtype is None else values.to(dtype).to(values.dtype)


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """AdamW (arXiv:1711.05101).

    Attributes:
        step: number of the update, counted from 1.
        epsilon_in: where epsilon is added: to the root of the corrected average, within that root, or to the root of
            the average before its correction.
        decays: weights by rate * decay, by decay alone, by rate * rate * decay; or by a term of the gradient (L2).
        corrects: whether averages are corrected for their beginning at zero.
    """

    beta1: float
    beta2: float
    epsilon: float
    step: int
    epsilon_in: Literal["sum", "root", "uncorrected"] = "sum"
    decays: Literal["decoupled", "by decay alone", "by the rate twice", "L2"] = "decoupled"
    corrects: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return AVERAGE, SQUARES

    def _states(self, gradient: Tensor, states: States, weights: Tensor) -> dict[str, Tensor]:
        if self.decays == "L2":
            gradient = gradient + self.decay * weights
        average = self.beta1 * states[AVERAGE] + (1 - self.beta1) * gradient
        squares = self.beta2 * states[SQUARES] + (1 - self.beta2) * gradient.square()
        return {AVERAGE: average, SQUARES: squares}

    def gradient_from(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the gradient, as it entered, from its average before and after the update."""
        return (after - self.beta1 * (torch.zeros_like(before) if self.anew else before)) / (1 - self.beta1)

    def squares_from(self, before: Tensor, gradient: Tensor) -> Tensor:
        """Return the average of squares after the update, from the gradient as it entered."""
        before = torch.zeros_like(before) if self.anew else before
        return (
            before
            if self.leaves_states
            else _rounded(self.beta2 * before + (1 - self.beta2) * gradient.square(), self.rounds_states)
        )

    def _weights(self, weights: Tensor, states: States, gradient: Tensor | None) -> Tensor:
        corrections = [1 - beta**self.step if self.corrects else 1.0 for beta in (self.beta1, self.beta2)]
        average, squares = states[AVERAGE] / corrections[0], states[SQUARES] / corrections[1]
        if self.epsilon_in == "root":
            root = (squares + self.epsilon).sqrt()
        else:
            by = math.sqrt(corrections[1]) if self.epsilon_in == "uncorrected" else 1.0
            root = squares.sqrt() + self.epsilon / by
        shrunk = {"decoupled": self.rate, "by decay alone": 1.0, "by the rate twice": self.rate**2, "L2": 0.0}
        return weights * (1 - shrunk[self.decays] * self.decay) - self.rate * average / root

    @property
    def largest_update(self) -> float:
        """Largest change of a weight, in learning rates, whatever the gradients were.

        The average is at most a multiple of the root of the average of squares (the inequality of Cauchy and Schwarz).
        """
        ratio = self.beta1**2 / self.beta2
        total = sum(ratio**at for at in range(min(self.step, 10_000)))
        bound = (1 - self.beta1) * math.sqrt(total / (1 - self.beta2))
        return bound * math.sqrt(1 - self.beta2**self.step) / (1 - self.beta1**self.step)


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """SGD with momentum, and weight decay as a term of the gradient.

    Attributes:
        dampening: share of the gradient that does not enter the momentum.
        nesterov: whether the update is the gradient plus the momentum after it.
        decoupled: whether weights decay by rate * decay instead.
    """

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    decoupled: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (MOMENTUM,) if self.momentum else ()

    @property
    def needs_gradient(self) -> bool:
        return self.nesterov or not self.momentum

    def _with_decay(self, gradient: Tensor, weights: Tensor) -> Tensor:
        return gradient if self.decoupled else gradient + self.decay * weights

    def _states(self, gradient: Tensor, states: States, weights: Tensor) -> dict[str, Tensor]:
        if not self.momentum:
            return {}
        entering = self._with_decay(gradient, weights)
        return {MOMENTUM: self.momentum * states[MOMENTUM] + (1 - self.dampening) * entering}

    def _weights(self, weights: Tensor, states: States, gradient: Tensor | None) -> Tensor:
        update = states[MOMENTUM] if self.momentum else torch.zeros_like(weights)
        if gradient is not None and self.needs_gradient:
            update = self._with_decay(gradient, weights) + self.momentum * update
        return weights * (1 - self.rate * self.decay * self.decoupled) - self.rate * update


@dataclass(frozen=True, kw_only=True)
class Muon(Rule):
    """Muon (Jordan et al. 2024) of a tensor's matrices.

    Attributes:
        tensor: has the matrices.
        products: dtype of the products of matrices; None: that of what is given.
    """

    tensor: LogicalTensor
    momentum: float
    nesterov: bool
    coefficients: str
    steps: int
    scale: str
    extra_scale: float
    products: torch.dtype | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (MOMENTUM,)

    @property
    def needs_gradient(self) -> bool:
        return self.nesterov

    def _states(self, gradient: Tensor, states: States, weights: Tensor) -> dict[str, Tensor]:
        return {MOMENTUM: self.momentum * states[MOMENTUM] + (1 - self.momentum) * gradient}

    def _weights(self, weights: Tensor, states: States, gradient: Tensor | None) -> Tensor:
        update = states[MOMENTUM]
        if gradient is not None and self.nesterov:
            update = self.momentum * update + (1 - self.momentum) * gradient
        matrices = self.tensor.as_matrices(update)
        scale = self.extra_scale * update_scale(self.scale, *matrices.shape[1:])
        found = orthogonalized(matrices, self.coefficients, self.steps, self.products or update.dtype).to(update.dtype)
        whole = self.tensor.from_matrices(found * scale, tuple(update.shape))
        return weights * (1 - self.rate * self.decay) - self.rate * whole
