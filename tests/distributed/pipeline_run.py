"""Runs of pipelines of small torch modules on real ranks, with records of what the engine keeps, frees and sends."""

from __future__ import annotations

import datetime
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DeferredGradients
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.point_to_point import Links, make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from tests.harness.stages import LOSS, as_stage, passing_hidden

WIDTH = 6
FACTOR = 0.125
FACTORS = {LOSS: FACTOR}


class SavesOutput(torch.autograd.Function):
    """exp that saves its output by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        output = hidden.exp()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class KeepsOutput(torch.autograd.Function):
    """exp that keeps its output as an attribute."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.output = hidden.exp()
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.output


class SometimesSavesOutput(SavesOutput):
    """exp that saves its output in some micro-batches."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        output = hidden.exp()
        ctx.saves = torch.rand(()).item() < 0.5
        ctx.save_for_backward(output if ctx.saves else hidden)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return gradient * (saved if ctx.saves else saved.exp())


class Border(torch.autograd.Function):
    """Copy in order, as a message makes one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda inner: inner.softmax(-1),
    "dropout": lambda inner: F.dropout(inner, 0.3),
    "custom function that saves its output": SavesOutput.apply,
    "custom function that keeps its output": KeepsOutput.apply,
    "custom function that saves its output now and then": SometimesSavesOutput.apply,
    "view": lambda inner: inner.tanh().view(-1).view(inner.shape),
    "transposed": lambda inner: (inner.t().contiguous() + 0.5).t(),
    "strided": lambda inner: inner.t().contiguous().t() + 0.5,
    "sum": lambda inner: inner + 0.5,
}
"""Last operation of a stage."""
FREED = {"sum", "dropout", "strided", "transposed"}
"""Operations whose output nobody reads after it has been sent."""


class Layer(nn.Module):
    """Stage; the last one of a pipeline returns a loss."""

    def __init__(self, stage: int, stages: int, last: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        values = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
        self.weight, self.bias = nn.Parameter(values), nn.Parameter(values[0].clone())
        self.stage, self.is_last, self.last = stage, stage == stages - 1, last
        self.outputs: list[weakref.ref[Tensor]] = []
        self.inner: list[weakref.ref[Tensor]] = []
        self.inputs: list[weakref.ref[Tensor]] = []
        self.freed: list[bool] = []
        """True, per output, if its values had been freed when its backward began."""
        self.before_forward: Callable[[], None] = lambda: None
        self.seconds = 0.0

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        if hidden is not None:
            self.inputs.append(weakref.ref(hidden))
        self.before_forward()
        time.sleep(self.seconds)
        torch.manual_seed(int(x[0, 0] * 1000) + self.stage)
        if hidden is not None and self.last == "its input" and not self.is_last:
            return hidden
        inner = torch.sin((x if hidden is None else hidden) @ self.weight) * self.bias
        self.inner.append(weakref.ref(inner))
        output = inner.square().sum() if self.is_last else LAST.get(self.last, LAST["sum"])(inner * inner + inner)
        self.outputs.append(weakref.ref(output))
        if output.requires_grad:
            output.register_hook(partial(self._look, StorageWeakRef(output.untyped_storage())))
        return output

    def _look(self, values: StorageWeakRef, gradient: Tensor) -> None:
        self.freed.append(values.expired())

    def alive(self) -> int:
        """Return the number of micro-batches whose activations are alive."""
        return _alive(self.inner)


def _alive(references: Sequence[weakref.ref[Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


class Gradients:
    """Gradients of plain parameters: those of I are kept, and added in W."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.kept: weakref.WeakSet[DeferredGradients] = weakref.WeakSet()
        self.reduced: list[tuple[int, int]] = []

    @contextmanager
    def deferring(self, chunk: int) -> Iterator[DeferredGradients]:
        before = [(parameter, parameter.grad) for parameter in self.layers[chunk].parameters()]
        for parameter, _ in before:
            parameter.grad = None
        deferred = DeferredGradients()
        yield deferred
        for parameter, old in before:
            new, parameter.grad = parameter.grad, old
            if new is not None:
                deferred.keep(partial(_add, parameter, new))
        self.kept.add(deferred)

    def leave_out(self, chunk: int) -> None:
        raise AssertionError("these steps leave nothing out")

    def reduce(self, chunk: int, micro_batches: int) -> None:
        self.reduced.append((chunk, micro_batches))


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class WatchedLinks(Links):
    """Links that check that sent tensors do not change until the send is waited for."""

    def __init__(self, links: Links) -> None:
        super().__init__(links.outgoing, links.incoming)
        self.sent = self.waited_for = self.most_under_way = self.changed = 0

    def send(self, tensor: Tensor, peer: int) -> Pending:
        self.sent += 1
        self.most_under_way = max(self.most_under_way, self.sent - self.waited_for)
        pending, snapshot = super().send(tensor, peer), tensor.clone()

        def arrived() -> Tensor:
            self.waited_for += 1
            self.changed += not (tensor.untyped_storage().size() and tensor.equal(snapshot))
            return tensor

        return Pending(pending.work, arrived)


@dataclass(frozen=True)
class Case:
    """Pipeline over all ranks of the pool."""

    schedule: str
    chunks: int
    micro_batches: int
    last: tuple[str, ...]
    """Last operations of the stages, in turn."""
    overlap: bool = True
    group: int | None = None

    def stages(self, ranks: int) -> Stages:
        return Stages(ranks, self.chunks, v_shaped=self.schedule == "zb-v")

    def layer(self, stage: int, stages: Stages) -> Layer:
        return Layer(stage, stages.count, self.last[stage % len(self.last)])

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [
            torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).abs() for _ in range(self.micro_batches)
        ]

    def __str__(self) -> str:
        return f"{self.schedule}, {self.chunks} chunks, {self.micro_batches} micro-batches, overlap {self.overlap}"


@dataclass
class Found:
    """Results of a step on a rank, or of a loop over all stages."""

    loss: float = 0.0
    evaluated: float = 0.0
    gradients: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)
    """Gradients by stage and parameter."""
    most_alive: int = 0
    most_inputs: int = 0
    alive_behind: int = 0
    """Number of inputs, outputs and activations that are alive after the step."""
    freed: dict[int, list[bool]] = field(default_factory=dict)
    """True, per stage and output, if the values of the output had been freed when its backward began."""
    links: dict[str, int] = field(default_factory=dict)


def alone(case: Case, ranks: int) -> Found:
    """Run the step as a loop on one process."""
    stages = case.stages(ranks)
    layers = [case.layer(stage, stages) for stage in range(stages.count)]
    found = Found()
    for x in case.inputs():
        hidden = None
        for layer in layers:
            travels = layer.stage > 0 and stages.place(layer.stage)[0] != stages.place(layer.stage - 1)[0]
            hidden = layer(Border.apply(hidden) if travels else hidden, x)
        found.loss += hidden.item()
        (hidden * FACTOR).backward()
    return _with_gradients(found, layers)


def _with_gradients(found: Found, layers: Sequence[Layer]) -> Found:
    for layer in layers:
        for name, parameter in layer.named_parameters():
            found.gradients[layer.stage, name] = parameter.grad
    return found


def trained(cases: Sequence[Case]) -> list[Found]:
    """Run a step of each case on this rank, and an evaluation."""
    mesh = ParallelMesh(
        rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_parallel_size=dist.get_world_size()
    )
    return [_train(mesh, case) for case in cases]


def _train(mesh: ParallelMesh, case: Case) -> Found:
    stages, rank = case.stages(mesh.world_size), mesh.rank
    layers = [case.layer(stage, stages) for stage in stages.of_rank(rank)]
    gradients, links = Gradients(layers), WatchedLinks(make_links(mesh, stages))
    engine, steps = make_engine(mesh, case, layers, links)
    found = Found()

    def count() -> None:
        # A forward in progress adds one to the number.
        alive = 1 + sum(layer.alive() for layer in layers) + len(gradients.kept)
        found.most_alive = max(found.most_alive, alive)
        found.most_inputs = max(found.most_inputs, sum(_alive(layer.inputs) for layer in layers))

    for layer in layers:
        layer.before_forward = count
    inputs = case.inputs()
    gc.collect()
    gc.disable()  # frees objects only by their reference count, at once
    try:
        found.loss = loss_of(engine.run(steps.training(case.micro_batches), inputs, FACTORS, gradients))
        found.alive_behind = len(gradients.kept)
        for layer in layers:
            found.alive_behind += _alive([*layer.outputs, *layer.inner, *layer.inputs])
            found.freed[layer.stage] = layer.freed
        found.evaluated = loss_of(engine.run(steps.evaluation(case.micro_batches), inputs))
    finally:
        gc.enable()
    assert gradients.reduced == [(chunk, case.micro_batches) for chunk, _ in gradients.reduced]
    assert sorted(chunk for chunk, _ in gradients.reduced) == list(range(stages.chunks))
    found.links = {name: value for name, value in vars(links).items() if isinstance(value, int)}
    return _with_gradients(found, layers)


def make_engine(
    mesh: ParallelMesh, case: Case, layers: Sequence[Layer], links: Links, width: int = WIDTH
) -> tuple[PipelineEngine[Tensor], ProvedSchedules]:
    """Return the rank's engine and its lists."""
    stages = passing_hidden(case.stages(mesh.world_size), (WIDTH, width))
    run = [as_stage(layer, last=layer.is_last) for layer in layers]
    steps = ProvedSchedules(stages, mesh.rank, schedule=case.schedule, group_size=case.group, overlap=case.overlap)
    steps.prove([case.micro_batches], [case.micro_batches], mesh)
    return PipelineEngine(run, stages, mesh.rank, links, mesh.device), steps


def loss_of(sums: Mapping[str, Tensor]) -> float:
    """Return the loss, zero on ranks without the last stage."""
    return sums[LOSS].item() if sums else 0.0


def pipeline_mesh(seconds: float | None = None) -> ParallelMesh:
    """Return a mesh with all ranks in one pipeline; `seconds` is the time limit of its messages."""
    ranks = dist.get_world_size()
    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    return ParallelMesh(rank=dist.get_rank(), world_size=ranks, pipeline_parallel_size=ranks, timeout=timeout)
