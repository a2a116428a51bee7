"""AdamW (arXiv:1711.05101) and SGD with momentum: rules that look at each element by itself, from three back ends."""

from __future__ import annotations

import importlib
import zlib
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
from megalite_kernels.implementation import runs_triton
from megalite_kernels.moments import Quantized
from megalite_kernels.optimizer import SGD, AdamW, Flat, adamw_, sgd_

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


def elementwise_rule(runs: Sequence[Run], config: OptimizerConfig) -> FusedRule | FlatRule:
    """The rule of --optimizer-backend; auto: Triton's kernels where they run, else torch's where they can keep all."""
    backend = config.optimizer_backend
    if backend == "auto":
        triton = bool(runs) and runs_triton("optimizer", *(run.master for run in runs))
        backend = "torch" if all(map(_is_wide, runs)) and not triton else "megalite"
    return FlatRule(runs, config) if backend == "megalite" else FusedRule(runs, config)


def _is_wide(run: Run) -> bool:
    """Whether all that is kept is in the dtype of the arithmetic."""
    wide = torch.promote_types(run.parameters.dtype, torch.float32)
    return all(isinstance(kept, Tensor) and kept.dtype == wide for kept in run.kept().values())


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
                self._fused.state[master] = run.tensors | {"step": steps}

    def update(self, rates: Rates, step: int, factor: float) -> None:
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
                master.grad = run.wide_gradients(factor)
            self._fused.step()
            for run, master in turn:
                master.grad = None
                run.round_parameters()


def _pieces(run: Run) -> Iterator[Run]:
    """The run, cut where its gradients must be widened."""
    if run.gradients.dtype == run.master.dtype:
        yield run
        return
    for start in range(0, run.master.numel(), WIDENED_ELEMENTS):
        part = slice(start, start + WIDENED_ELEMENTS)
        state: dict[str, Tensor | Quantized] = {name: tensor[part] for name, tensor in run.tensors.items()}
        flat = (run.parameters[part], run.master[part], run.gradients[part])
        yield replace(run, parameters=flat[0], master=flat[1], gradients=flat[2], state=state)


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


class FlatRule(_Local):
    """By megalite's own, a run at a time: Triton's kernels, or plain operations (`megalite_kernels.optimizer`).

    State and master weights may be of any dtype: the arithmetic is in fp32 (or float64), and what is kept is rounded.
    """

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        self._runs, self._config = runs, config

    def update(self, rates: Rates, step: int, factor: float) -> None:
        config = self._config
        for run in self._runs:
            rate, decay = rates.of(run.group)
            flat = Flat(run.parameters, run.gradients, run.master if run.has_master else None, run.start)
            seed = _seed(run, step)
            if config.optimizer == "sgd":
                sgd_(flat, run.state.get("momentum_buffer"), SGD(rate, decay, config.sgd_momentum, factor, seed))
            else:
                by = AdamW(rate, decay, config.adam_beta1, config.adam_beta2, config.adam_eps, step, factor, seed)
                adamw_(flat, run.state["exp_avg"], run.state["exp_avg_sq"], by)


def _seed(run: Run, step: int) -> int:
    """By which an update rounds moments: the same for all copies of the parameters, also where a tied weight has one
    in another stage's buckets, and after a run was resumed."""
    name = run.slots[0].parameter.sharding.pieces[0].tensor.name
    return ((zlib.crc32(name.encode()) & 0x7FFFFFFF) << 31 | step) * 2
