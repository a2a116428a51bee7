"""AdamW (arXiv:1711.05101) and SGD with momentum: element-wise update rules, on three back ends."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import ConfigurationError
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Segment
from megalite.optim.update_rule import UpdateRule
from megalite_kernels.implementation import current
from megalite_kernels.moments import Quantized
from megalite_kernels.optimizer import SGD, AdamW, Flat, adamw_, sgd_

WIDENED_ELEMENTS = 1 << 22
"""Number of gradients in a narrower dtype than the masters that are widened at a time for a fused kernel."""


def require_backend(config: OptimizerConfig) -> None:
    """Raise ConfigurationError if --optimizer-backend asks for what is not installed."""
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


def elementwise_rule(segments: Sequence[Segment], config: OptimizerConfig) -> FusedRule | FlatRule:
    """The rule of --optimizer-backend; auto: Triton's kernels if they run, else torch's if they support the state."""
    backend = config.optimizer_backend
    if backend == "auto":
        triton = bool(segments) and current().runs_triton("optimizer", *(segment.master for segment in segments))
        backend = "torch" if all(map(_is_wide, segments)) and not triton else "megalite"
    return FlatRule(segments, config) if backend == "megalite" else FusedRule(segments, config)


def _is_wide(segment: Segment) -> bool:
    """Tell if all of the state is in the dtype of the arithmetic."""
    wide = torch.promote_types(segment.parameters.dtype, torch.float32)
    return all(isinstance(kept, Tensor) and kept.dtype == wide for kept in segment.kept().values())


class FusedRule(UpdateRule):
    """Update by the fused kernels of torch or apex, one segment at a time, for state of the master weights' dtype."""

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        update = _apex_update if config.optimizer_backend == "apex" else _torch_update
        self._updates = [(piece, update(piece, config)) for segment in segments for piece in _pieces(segment)]

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for segment, update in self._updates:
            update(segment.wide_gradients(factor), *rates.of(segment.group), step)
            segment.round_parameters()


def _pieces(segment: Segment) -> Iterator[Segment]:
    """The segment, cut into pieces if its gradients must be widened, so that the wide copy takes little memory."""
    if segment.gradients.dtype == segment.master.dtype:
        yield segment
        return
    for start in range(0, segment.master.numel(), WIDENED_ELEMENTS):
        part = slice(start, start + WIDENED_ELEMENTS)
        state: dict[str, Tensor | Quantized] = {name: tensor[part] for name, tensor in segment.tensors.items()}
        flat = (segment.parameters[part], segment.master[part], segment.gradients[part])
        yield replace(segment, parameters=flat[0], master=flat[1], gradients=flat[2], state=state)


class _Update(Protocol):
    """Changes a segment's masters and state in place."""

    def __call__(self, gradients: Tensor, rate: float, decay: float, step: int) -> None:
        """`step` counts updates from 1."""


def _torch_update(segment: Segment, config: OptimizerConfig) -> _Update:
    """Call the functions under torch.optim's classes: the classes import torch's compiler, which takes as long as
    torch.
    """
    masters, state = [segment.master], segment.tensors
    options: dict[str, Any] = {"maximize": False, "fused": True}
    if config.optimizer == "sgd":
        buffers = [state.get("momentum_buffer")]
        options |= {"momentum": config.sgd_momentum, "dampening": 0.0, "nesterov": False}

        def update_sgd(gradients: Tensor, rate: float, decay: float, step: int) -> None:
            sgd(masters, [gradients], buffers, lr=rate, weight_decay=decay, **options)

        return update_sgd
    averages, squares = [state["exp_avg"]], [state["exp_avg_sq"]]
    steps = torch.zeros((), device=segment.master.device)
    options |= {"beta1": config.adam_beta1, "beta2": config.adam_beta2, "eps": config.adam_eps, "amsgrad": False}

    def update_adamw(gradients: Tensor, rate: float, decay: float, step: int) -> None:
        # torch counts the update itself, from the number of those before it.
        before = [steps.fill_(step - 1)]
        adamw(masters, [gradients], averages, squares, [], before, lr=rate, weight_decay=decay, **options)

    return update_adamw


def _apex_update(segment: Segment, config: OptimizerConfig) -> _Update:
    apex = importlib.import_module("apex.optimizers")
    master = segment.master.detach().requires_grad_()  # a view that torch may call a parameter
    if config.optimizer == "sgd":
        fused = apex.FusedSGD([master], lr=0.0, momentum=config.sgd_momentum)
    else:
        betas = config.adam_beta1, config.adam_beta2
        fused = apex.FusedAdam([master], lr=0.0, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    fused.state[master] = segment.tensors
    (group,) = fused.param_groups

    def update(gradients: Tensor, rate: float, decay: float, step: int) -> None:
        group.update(lr=rate, weight_decay=decay, step=step - 1)
        master.grad = gradients
        fused.step()
        master.grad = None

    return update


class FlatRule(UpdateRule):
    """Update by megalite's own kernels, one segment at a time: Triton's, or plain operations
    (`megalite_kernels.optimizer`).

    State and master weights may be of any dtype: the arithmetic is in fp32 (or float64), and the results are rounded.
    """

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._segments, self._config = segments, config

    def update(self, rates: Rates, step: int, factor: float) -> None:
        config = self._config
        for segment in self._segments:
            rate, decay = rates.of(segment.group)
            master = segment.master if segment.has_master else None
            flat = Flat(segment.parameters, segment.gradients, master, segment.start)
            seed = _seed(segment, step)
            if config.optimizer == "sgd":
                sgd_(flat, segment.state.get("momentum_buffer"), SGD(rate, decay, config.sgd_momentum, factor, seed))
            else:
                by = AdamW(rate, decay, config.adam_beta1, config.adam_beta2, config.adam_eps, step, factor, seed)
                adamw_(flat, segment.state["exp_avg"], segment.state["exp_avg_sq"], by)


def _seed(segment: Segment, step: int) -> int:
    """Return the seed for rounding moments: the same on all ranks with these parameters, and after a run was resumed.

    It is also the same for a tied weight's copy in another stage's buckets.
    """
    name = segment.slots[0].parameter.sharding.pieces[0].tensor.name
    return ((zlib.crc32(name.encode()) & 0x7FFFFFFF) << 31 | step) * 2
