"""AdamW (arXiv:1711.05101) and SGD with momentum: rules that look at each element by itself, from three back ends."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import ConfigurationError
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Run
from megalite_kernels.implementation import current
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
        triton = bool(runs) and current().runs_triton("optimizer", *(run.master for run in runs))
        backend = "torch" if all(map(_is_wide, runs)) and not triton else "megalite"
    return FlatRule(runs, config) if backend == "megalite" else FusedRule(runs, config)


def _is_wide(run: Run) -> bool:
    """Tell if all of the state is in the dtype of the arithmetic."""
    wide = torch.promote_types(run.parameters.dtype, torch.float32)
    return all(isinstance(kept, Tensor) and kept.dtype == wide for kept in run.kept().values())


class _Local:
    """A rule that talks to no other rank."""

    def collectives(self) -> tuple[()]:
        return ()


class FusedRule(_Local):
    """By the fused kernels of torch or apex, a run at a time, for state of the master weights' dtype."""

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        update = _apex_update if config.optimizer_backend == "apex" else _torch_update
        self._updates = [(piece, update(piece, config)) for run in runs for piece in _pieces(run)]

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for run, update in self._updates:
            update(run.wide_gradients(factor), *rates.of(run.group), step)
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


class _Update(Protocol):
    """Changes a run's masters and state in place."""

    def __call__(self, gradients: Tensor, rate: float, decay: float, step: int) -> None:
        """`step` counts updates from 1."""


def _torch_update(run: Run, config: OptimizerConfig) -> _Update:
    """The functions below torch.optim's classes: the classes import torch's compiler, which takes as long as torch."""
    masters, state = [run.master], run.tensors

    def update_sgd(gradients: Tensor, rate: float, decay: float, step: int) -> None:
        sgd(
            masters,
            [gradients],
            [state.get("momentum_buffer")],
            fused=True,
            weight_decay=decay,
            momentum=config.sgd_momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    if config.optimizer == "sgd":
        return update_sgd
    averages, squares = [state["exp_avg"]], [state["exp_avg_sq"]]
    steps = torch.zeros((), device=run.master.device)

    def update_adamw(gradients: Tensor, rate: float, decay: float, step: int) -> None:
        adamw(
            masters,
            [gradients],
            averages,
            squares,
            [],
            [steps.fill_(step - 1)],
            fused=True,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=rate,
            weight_decay=decay,
            eps=config.adam_eps,
            maximize=False,
        )

    return update_adamw


def _apex_update(run: Run, config: OptimizerConfig) -> _Update:
    apex = importlib.import_module("apex.optimizers")
    master = run.master.detach().requires_grad_()  # a view that torch may call a parameter
    if config.optimizer == "sgd":
        fused = apex.FusedSGD([master], lr=0.0, momentum=config.sgd_momentum)
    else:
        betas = config.adam_beta1, config.adam_beta2
        fused = apex.FusedAdam([master], lr=0.0, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    fused.state[master] = run.tensors
    (group,) = fused.param_groups

    def update(gradients: Tensor, rate: float, decay: float, step: int) -> None:
        group.update(lr=rate, weight_decay=decay, step=step - 1)
        master.grad = gradients
        fused.step()
        master.grad = None

    return update


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
