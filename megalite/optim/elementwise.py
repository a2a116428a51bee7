"""AdamW (arXiv:1711.05101) and SGD with momentum: rules that look at each element by itself, from three back ends."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import ConfigurationError
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Run
from megalite.parallel import device

WIDENED_ELEMENTS = 1 << 22
"""So many gradients of less than the masters' precision are widened at a time for a fused kernel."""


def require_backend(config: OptimizerConfig) -> None:
    """Raise ConfigurationError where --optimizer-backend asks for what is not installed."""
    if config.optimizer_backend != "apex":
        return
    advice = (
        "--optimizer-backend apex needs NVIDIA's apex with its CUDA extensions "
        "(https://github.com/NVIDIA/apex#installation); --optimizer-backend auto needs nothing"
    )
    try:
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        importlib.import_module("apex.optimizers")
    except ImportError as error:
        raise ConfigurationError(f"{advice}. Here: {error}") from error
    if not applier.available:
        raise ConfigurationError(f"{advice}. Here apex has none of them")


def elementwise_rule(runs: Sequence[Run], config: OptimizerConfig) -> FusedRule | ChunkedRule:
    """The rule of --optimizer-backend; auto: torch's kernels where they can keep all that is to be kept."""
    narrow = set(config.narrow) - {"main_grads_dtype"}
    chunked = config.optimizer_backend == "megalite" or (config.optimizer_backend == "auto" and narrow)
    return ChunkedRule(runs, config) if chunked else FusedRule(runs, config)


class _Local:
    """A rule that talks to no other rank."""

    def collectives(self) -> tuple[()]:
        return ()


class FusedRule(_Local):
    """By the fused kernels of torch or apex, for state of the master weights' dtype."""

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        self._runs = runs = [piece for run in runs for piece in _pieces(run)]
        self._masters = [run.master.detach().requires_grad_() for run in runs]  # views that torch may call parameters
        members: dict[ParameterGroup, list[Tensor]] = {}
        for run, master in zip(runs, self._masters, strict=True):
            members.setdefault(run.group, []).append(master)
        groups: list[dict[str, Any]] = [{"params": masters, "kind": group} for group, masters in members.items()]
        self._fused = _fused(groups, config) if groups else None  # there are shards of matrices alone
        every = list(zip(runs, self._masters, strict=True))
        narrow = any(run.gradients.dtype != run.master.dtype for run in runs)
        self._turns = [[pair] for pair in every] if narrow else [every]
        """What is updated at once: widened gradients, a piece at a time."""
        if self._fused is not None:
            self._steps = torch.zeros(len(runs), device=runs[0].master.device)
            for run, master, steps in zip(runs, self._masters, self._steps, strict=True):
                self._fused.state[master] = run.state | {"step": steps}

    def update(self, rates: Rates, step: int) -> None:
        if self._fused is None:
            return
        for group in self._fused.param_groups:
            kind: ParameterGroup = group["kind"]
            group["lr"], group["weight_decay"] = rates.of(kind)
        self._steps.fill_(step - 1)
        for turn in self._turns:
            for group in self._fused.param_groups:
                group["step"] = step - 1  # where apex counts updates; torch does in each parameter's state
            for run, master in turn:
                master.grad = run.gradients.to(master.dtype)
            self._fused.step()
            for _, master in turn:
                master.grad = None


def _pieces(run: Run) -> Iterator[Run]:
    """The run, cut where its gradients must be widened."""
    if run.gradients.dtype == run.master.dtype:
        yield run
        return
    for start in range(0, run.master.numel(), WIDENED_ELEMENTS):
        part = slice(start, start + WIDENED_ELEMENTS)
        state = {name: tensor[part] for name, tensor in run.state.items()}
        yield replace(run, master=run.master[part], gradients=run.gradients[part], state=state)


def _fused(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas, epsilon, momentum = (config.adam_beta1, config.adam_beta2), config.adam_eps, config.sgd_momentum
    made: torch.optim.Optimizer
    if config.optimizer_backend == "apex":
        apex = importlib.import_module("apex.optimizers")
        if config.optimizer == "sgd":
            made = apex.FusedSGD(groups, lr=0.0, momentum=momentum)
        else:
            made = apex.FusedAdam(groups, lr=0.0, betas=betas, eps=epsilon, adam_w_mode=True)
    elif config.optimizer == "sgd":
        made = torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=True)
    else:
        made = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon, fused=True)
    return made


class ChunkedRule(_Local):
    """By plain operations on so few elements at a time that they stay in the cache.

    State and master weights may be of any dtype: the arithmetic is in fp32 (or float64), and what is kept is rounded.
    """

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        self._runs, self._config = runs, config

    @torch.no_grad()
    def update(self, rates: Rates, step: int) -> None:
        update = self._sgd if self._config.optimizer == "sgd" else self._adamw
        for run in self._runs:
            rate, decay = rates.of(run.group)
            wide = torch.promote_types(run.master.dtype, torch.float32)
            kept = [run.master, *run.state.values()]
            size = device.chunk_elements(run.master.device)
            for gradient, *stored in zip(
                run.gradients.split(size), *(tensor.split(size) for tensor in kept), strict=True
            ):
                values = [tensor.to(wide) for tensor in stored]
                update(gradient.to(wide), *values, rate=rate, decay=decay, step=step)
                for tensor, value in zip(stored, values, strict=True):
                    tensor.copy_(value)  # nothing to do where it is the same tensor

    def _adamw(
        self,
        gradient: Tensor,
        weight: Tensor,
        average: Tensor,
        squares: Tensor,
        *,
        rate: float,
        decay: float,
        step: int,
    ) -> None:
        config = self._config
        average.lerp_(gradient, 1.0 - config.adam_beta1)
        squares.mul_(config.adam_beta2).addcmul_(gradient, gradient, value=1.0 - config.adam_beta2)
        root = squares.sqrt().div_(math.sqrt(1.0 - config.adam_beta2**step)).add_(config.adam_eps)
        weight.mul_(1.0 - rate * decay).addcdiv_(average, root, value=-rate / (1.0 - config.adam_beta1**step))

    def _sgd(self, gradient: Tensor, weight: Tensor, *momentum: Tensor, rate: float, decay: float, step: int) -> None:
        gradient = gradient.add(weight, alpha=decay)
        for average in momentum:  # one, or none
            gradient = average.mul_(self._config.sgd_momentum).add_(gradient)
        weight.add_(gradient, alpha=-rate)
