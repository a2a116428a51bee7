"""Search of a step for the first non-finite value in the order of execution.

The search checks the tensors that modules exchange in forward, their gradients in backward, and each parameter gradient
when it enters its buffer. Of a compiled layer it checks only inputs and outputs, since its modules are compiled into
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megalite.optim.layout import unique_parameters
from megalite.parallel.parameter import DeferredGradients, DenseGradient, Gradient, GradientBuffer, Parameter
from megalite.parallel.stage_module import StageModule
from megalite.pipeline.engine import RunningStep
from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages
from megalite.training.kernels import is_compiled

_PHASES = {"F": 0, "B": 1, "I": 1, "W": 2}


@dataclass(frozen=True)
class NotFinite:
    """A non-finite value in a step. Of two findings, only the lower in `order` can have caused the other."""

    micro_batch: int
    phase: int
    """0: forward; 1: backward; 2: deferred weight gradients."""
    stage: int
    """Stage of the pipeline, numbered in the direction of the phase: in backward the last stage is 0."""
    border: int
    """Number of tensors checked between modules so far, in this phase of the stage. Tensor-parallel ranks have equal
    numbers for the same tensor."""
    of_parameter: bool
    """True for a parameter's gradient. It sorts last, because no other value of the step is computed from it."""
    place: str
    value: str
    """NaN or infinity."""
    before: str
    """The last place before it that was finite; empty if there is none."""

    @property
    def order(self) -> tuple[int, int, int, int, bool]:
        return self.micro_batch, self.phase, self.stage, self.border, self.of_parameter


def not_finite(tensor: Tensor) -> str | None:
    """Return "NaN" or "infinity" if the tensor contains one, or None if all values are finite."""
    if tensor.numel() == 0:
        return None
    # `aminmax` propagates NaN, and unlike `isfinite` allocates no mask as large as the tensor.
    least, most = (bound.item() for bound in torch.aminmax(tensor.detach()))
    if least != least:
        return "NaN"
    return "infinity" if float("inf") in (-least, most) else None


class Search:
    """Search of this rank's actions: pass it as observer to `engine.run` inside `with search.through(chunks)`."""

    def __init__(self, stages: Stages, rank: int) -> None:
        """Set up. `rank` is the pipeline rank."""
        self.first: NotFinite | None = None
        """First finding by `NotFinite.order`, which may differ from the order in time."""
        self.micro_batches: set[int] = set()
        """Micro-batches with at least one finding."""
        self._stages, self._rank = stages, rank
        self._action = Action("F", 0, 0)
        self._border, self._before = 0, ""
        self._seen = WeakTensorKeyDictionary()

    def execute(self, action: Action, step: RunningStep) -> None:
        self._action = action
        self._border, self._before = 0, ""
        step.execute(action)

    @contextmanager
    def through(self, chunks: Sequence[StageModule]) -> Iterator[None]:
        """Check the modules and the gradient buffers of the rank's stages during the block."""
        parameters = list({id(p): p for chunk in chunks for p in unique_parameters(chunk)}.values())
        buffers = [parameter.gradient_buffer for parameter in parameters]
        places = [place for number, chunk in enumerate(chunks) for place in self._places(number, chunk)]
        handles = [module.register_forward_pre_hook(partial(self._look, name)) for module, name, _ in places]
        handles += [module.register_forward_hook(partial(self._look, name)) for module, _, name in places]
        for parameter, buffer in zip(parameters, buffers, strict=True):
            parameter.gradient_buffer = None if buffer is None else _SearchedBuffer(buffer, self)
        try:
            yield
        finally:
            for parameter, buffer in zip(parameters, buffers, strict=True):
                parameter.gradient_buffer = buffer
            for handle in handles:
                handle.remove()

    def _places(self, number: int, chunk: StageModule) -> Iterator[tuple[nn.Module, str, str]]:
        """Yield each module of a chunk that is checked, with the names of its inputs and of its outputs."""
        stage = self._stages.stage(self._rank, number)
        last = stage == self._stages.count - 1
        passed_on = "the sums of the loss" if last else f"what stage {stage} sends"
        yield chunk, f"what stage {stage} receives", passed_on
        for name, part in chunk.parts():
            for module, place in _modules(part, name):
                yield module, f"the input of {place}", f"the output of {place}"

    # ------------------------------------------------------------------------------------------------ checks

    def _look(self, place: str, module: nn.Module, *values: Any) -> None:
        """Check the tensors that enter or leave a module, and register a check of their gradients.

        A hook before forward gets the arguments. A hook after it gets the output, too, as the last of `values`.
        A tensor that is both the output of one module and the input of another is checked once.
        """
        again = "" if self._action.kind == "F" else ", computed again,"
        for tensor in _tensors(values[-1]):
            if tensor.is_floating_point() and tensor not in self._seen:
                self._seen[tensor] = None
                self._pass(f"{place}{again}", tensor)
                if tensor.requires_grad and not again:
                    tensor.register_hook(partial(self._pass, f"the gradient with respect to {place}"))

    def _pass(self, place: str, tensor: Tensor) -> None:
        """Check a tensor that one module passes to another, and count it as a border."""
        self._border += 1
        if not self.note(tensor, place):
            self._before = place

    def note(self, tensor: Tensor, place: str, *, of_parameter: bool = False) -> bool:
        """Tell whether the tensor is not finite. If so, record it, and keep it if it is the first in order."""
        value = not_finite(tensor)
        if value is None:
            return False
        action = self._action
        phase = _PHASES[action.kind]
        stage = self._stages.stage(self._rank, action.chunk)
        stage = stage if phase == 0 else self._stages.count - 1 - stage
        self.micro_batches.add(action.micro_batch)
        key = action.micro_batch, phase, stage, self._border, of_parameter
        finding = NotFinite(*key, place, value, self._before)
        if self.first is None or finding.order < self.first.order:
            self.first = finding
        return True


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among a module's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _modules(part: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    yield part, name
    if not is_compiled(part):
        for path, module in part.named_modules():
            if path:
                yield module, ", ".join([name, *path.replace("_", " ").split(".")])


@dataclass(frozen=True)
class _SearchedBuffer:
    """A gradient buffer that checks each gradient before accumulating it."""

    buffer: GradientBuffer
    search: Search

    @property
    def deferred(self) -> DeferredGradients | None:
        return self.buffer.deferred

    @property
    def frees_parameters(self) -> bool:
        return self.buffer.frees_parameters

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        self.buffer.accumulate(parameter, _SearchedGradient(gradient, parameter.sharding.name, self.search), use)


@dataclass(frozen=True)
class _SearchedGradient(Gradient):
    """A gradient that is checked when it is added: at once (`kept_bytes` is None), not when another action runs."""

    gradient: Gradient
    name: str
    search: Search

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Check the new gradient alone first. Report the sum only if both addends were finite."""
        own = target if overwrite else torch.empty_like(target)
        self.gradient.add_to(own, overwrite=True)
        finite = not self.search.note(own, f"the gradient of {self.name}", of_parameter=True)
        if not overwrite:
            finite = finite and not_finite(target) is None
            DenseGradient(own).add_to(target, overwrite=False)
            if finite:
                place = f"the sum over micro-batches of the gradient of {self.name}"
                self.search.note(target, place, of_parameter=True)
