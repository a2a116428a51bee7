"""AdamW (arXiv:1711.05101) and SGD with momentum: element-wise update rules with three back ends."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from megalite_kernels.optimizer import update_
from megalite_kernels.updates import SGD, AdamW, Flat

WIDENED_ELEMENTS = 1 << 22
"""Number of gradients that are converted at a time to the dtype of the masters, for a fused kernel.

It bounds the memory of the converted copy.
"""


def require_backend(config: OptimizerConfig) -> None:
    """Raise ConfigurationError if the back end that --optimizer-backend names is not installed."""
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
    """Return the update rule that --optimizer-backend selects.

    With `auto` it is Triton's kernels if they run here, otherwise torch's kernels if they support the dtypes of the
    state, otherwise megalite's plain operations.
    """
    backend = config.optimizer_backend
    if backend == "auto":
        triton = bool(segments) and current().runs_triton("optimizer", *(segment.master for segment in segments))
        backend = "torch" if all(map(_is_wide, segments)) and not triton else "megalite"
    return FlatRule(segments, config) if backend == "megalite" else FusedRule(segments, config)


def _is_wide(segment: Segment) -> bool:
    """Return True if all of the state has the dtype in which updates are computed."""
    wide = torch.promote_types(segment.parameters.dtype, torch.float32)
    return all(isinstance(kept, Tensor) and kept.dtype == wide for kept in segment.kept().values())


class FusedRule(UpdateRule):
    """Update rule that runs the fused kernels of torch or apex, one segment at a time.

    The state must have the dtype of the master weights.
    """

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        update = _apex_update if config.optimizer_backend == "apex" else _torch_update
        self._updates = [(piece, update(piece, config)) for segment in segments for piece in _pieces(segment)]

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for segment, update in self._updates:
            update(segment.wide_gradients(factor), *rates.of(segment.group), step)
            segment.round_parameters()


def _pieces(segment: Segment) -> Iterator[Segment]:
    """Yield the segment in pieces if its gradients must be converted, to limit the memory of the converted copy.

    If the gradients already have the dtype of the masters, yield the full segment.
    """
    if segment.gradients.dtype == segment.master.dtype:
        yield segment
        return
    yield from segment.parts(WIDENED_ELEMENTS)


_Update = Callable[[Tensor, float, float, int], None]
"""Function that updates a segment's masters and state in place, from the gradients, the learning rate, the weight decay
and the number of the update, counted from 1."""


def _torch_update(segment: Segment, config: OptimizerConfig) -> _Update:
    """Return the update that calls the functional API of torch.optim.

    The optimizer classes of torch.optim are avoided: they import torch's compiler, which takes as long as importing
    torch itself.
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
        # torch expects the number of updates before this one, and adds 1 itself.
        before = [steps.fill_(step - 1)]
        adamw(masters, [gradients], averages, squares, [], before, lr=rate, weight_decay=decay, **options)

    return update_adamw


def _apex_update(segment: Segment, config: OptimizerConfig) -> _Update:
    """Return the update of a segment by Apex, whose optimizer has the segment's own state and masters."""
    apex = importlib.import_module("apex.optimizers")
    master = segment.master.detach().requires_grad_()  # a view of the masters that torch accepts as a parameter
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
    """Update rule that runs megalite's own kernels, one segment at a time.

    The kernels are Triton kernels or plain torch operations (`megalite_kernels.optimizer`). State and master weights
    may have any dtype: updates are computed in fp32 (or float64), and the results are rounded.
    """

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._segments, self._config = segments, config

    def update(self, rates: Rates, step: int, factor: float) -> None:
        """Update each segment in one launch. `factor` multiplies the gradients, `step` counts from 1."""
        config = self._config
        for segment in self._segments:
            rate, decay = rates.of(segment.group)
            master = segment.master if segment.has_master else None
            flat = Flat(segment.parameters, segment.gradients, master, segment.start)
            seed = _seed(segment, step)
            moments = list(segment.state.values())  # in the order of `state_names`
            if config.optimizer == "sgd":
                update_(flat, moments, SGD(rate, decay, config.sgd_momentum, factor, seed))
            else:
                by = AdamW(rate, decay, config.adam_beta1, config.adam_beta2, config.adam_eps, step, factor, seed)
                update_(flat, moments, by)


def _seed(segment: Segment, step: int) -> int:
    """Return the seed for the stochastic rounding of moments.

    It is the same on all ranks that have these parameters, and for the replicas of a tied weight on different stages.
    It does not change if the run is resumed.
    """
    name = segment.slots[0].parameter.sharding.pieces[0].tensor.name
    return ((zlib.crc32(name.encode()) & 0x7FFFFFFF) << 31 | step) * 2
