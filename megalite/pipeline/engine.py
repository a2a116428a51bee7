"""The engine: executes a rank's list of actions on its stages.

A stage is any module from hidden states to hidden states, called `stage(hidden, micro_batch)`; the micro-batch is
opaque to the engine. The first stage gets None, the last one returns the sum of its losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.parallel.collectives import Pending, done
from megalite.parallel.device import synchronize
from megalite.parallel.naming import named
from megalite.parallel.parameter import DeferredGradients
from megalite.pipeline.point_to_point import Links
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import Span
from megalite.pipeline.stages import Stages
from megalite.torch_internals import backward_reads, profiler_looks_on

MicroBatch = TypeVar("MicroBatch")
Stage = Callable[[Tensor | None, MicroBatch], Tensor]


class Gradients(Protocol):
    """Where the gradients of the stages go."""

    def deferring(self, chunk: int) -> AbstractContextManager[DeferredGradients]:
        """Within it the gradients of a chunk's parameters are kept instead of added."""

    def reduce(self, chunk: int, micro_batches: int) -> None:
        """Begin the reductions of a chunk's gradients that are due behind so many micro-batches."""


@dataclass(frozen=True)
class HiddenStates:
    """What travels between stages: every message of a step has this shape."""

    shape: tuple[int, ...]
    """[sequence (/ tensor-parallel size under sequence parallelism), micro-batch size, hidden]"""
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def check(self, output: Tensor, stage: int, micro_batch: int) -> None:
        """Raises MegaliteError where a stage's output is not of this shape and dtype."""
        if tuple(output.shape) != self.shape or output.dtype != self.dtype:
            raise MegaliteError(
                f"stage {stage} returned {tuple(output.shape)} of {output.dtype} for micro-batch {micro_batch}, where "
                f"the next stage expects hidden states {self.shape} of {self.dtype}"
            )


class UnderWay(Protocol):
    """A step, as an observer sees it."""

    def execute(self, action: Action) -> None:
        """Run an action."""

    def wait_for_message(self, action: Action) -> None:
        """Wait for what another stage gives to a computation."""


class Observer(Protocol):
    """Who sees a step's actions one by one."""

    def execute(self, action: Action, step: UnderWay) -> None:
        """Have the step run the action."""


class Recording:
    """When each action of a step ran on this rank, in seconds since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._device, self._origin = device, time.perf_counter()

    def execute(self, action: Action, step: UnderWay) -> None:
        """Run an action to its end on the device: a step that is recorded overlaps less than others. What it waits for
        is not part of it.
        """
        step.wait_for_message(action)
        synchronize(self._device)
        start = time.perf_counter() - self._origin
        step.execute(action)
        synchronize(self._device)
        self.spans.append(Span(action, start, time.perf_counter() - self._origin))


class PipelineEngine(Generic[MicroBatch]):
    """The stages that one rank of a pipeline holds, and its links to the others. Alone, it is one whole model."""

    def __init__(
        self,
        chunks: Sequence[Stage[MicroBatch]],
        stages: Stages | None = None,
        rank: int = 0,
        links: Links | None = None,
        hidden: HiddenStates | None = None,
    ) -> None:
        """`links` and `hidden` are needed where there is more than one stage."""
        stages = stages if stages is not None else Stages()
        self.links = links if links is not None else Links({}, {})
        self.hidden = hidden
        self.chunks = [_Chunk(stages, rank, index, stage) for index, stage in enumerate(chunks)]

    def run(
        self,
        actions: Iterable[Action],
        micro_batches: Sequence[MicroBatch],
        factor: float = 1.0,
        gradients: Gradients | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Execute `actions`, differentiating factor * (sum of losses). Without `gradients` nothing is reduced, and I
        does all that B does.

        Returns the unscaled sum of the losses, detached, in fp64 so that it does not depend on the split into
        micro-batches beyond the stage's own rounding; zero on ranks without the last stage.

        Raises MegaliteError for a stage that returns what its neighbour cannot take, CommunicationError where a
        neighbour has gone or does not answer.
        """
        step = _Step(self, micro_batches, factor, gradients)
        actions, naming = list(actions), profiler_looks_on()
        with torch.set_grad_enabled(any(action.kind in ("B", "I") for action in actions)):
            for action in actions:
                with named(str(action)) if naming else nullcontext():
                    if observer is None:
                        step.execute(action)
                    else:
                        observer.execute(action, step)
        return step.loss_sum()


class _Chunk(Generic[MicroBatch]):
    """One of the rank's stages, and where it stands in the pipeline."""

    def __init__(self, stages: Stages, rank: int, index: int, stage: Stage[MicroBatch]) -> None:
        self.run, self.stage = stage, stages.stage(rank, index)
        self.first, self.last = self.stage == 0, self.stage == stages.count - 1
        self.next_here = self._here(stages, rank, self.stage + 1)
        self.previous_here = self._here(stages, rank, self.stage - 1)
        """The chunk of this same rank that is the next stage, or the one before."""
        self._output_is_kept: dict[object, bool] = {}

    @staticmethod
    def _here(stages: Stages, rank: int, stage: int) -> int | None:
        if not 0 <= stage < stages.count:
            return None
        holder, chunk = stages.place(stage)
        return chunk if holder == rank else None

    def backward_reads(self, output: Tensor) -> bool:
        """Whether backward needs the values of the stage's output: looked up once for each kind of last operation."""
        kind = type(output.grad_fn)
        if kind not in self._output_is_kept:
            self._output_is_kept[kind] = backward_reads(output)
        return self._output_is_kept[kind]


class _Step(Generic[MicroBatch]):
    """What is under way in one step. Everything is let go of by its last reader."""

    def __init__(
        self,
        engine: PipelineEngine[MicroBatch],
        micro_batches: Sequence[MicroBatch],
        factor: float,
        gradients: Gradients | None,
    ) -> None:
        self.engine, self.micro_batches, self.factor, self.gradients = engine, micro_batches, factor, gradients
        self._loss_sum: Tensor | None = None
        self._arriving: dict[tuple[str, int, int], Pending] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._to_send: dict[tuple[str, int, int], Tensor] = {}
        self._sending: dict[tuple[str, int, int], tuple[Pending, Tensor]] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}

    def execute(self, action: Action) -> None:
        kind = action.kind
        if kind == "F":
            self._forward(action)
        elif kind == "B":
            self._backward(action)
        elif kind == "I":
            self._backward_input(action)
        elif kind == "W":
            if self.gradients is not None:
                self._deferred.pop((action.chunk, action.micro_batch)).add()
        elif kind == "R":
            if self.gradients is not None:
                self.gradients.reduce(action.chunk, action.micro_batch + 1)
        elif kind.startswith("receive"):
            self._receive(action)
        elif kind.startswith("send"):
            self._send(action)
        else:
            self._free(action)

    def wait_for_message(self, action: Action) -> None:
        way = "F" if action.kind == "F" else "B"
        key = way, action.chunk, action.micro_batch
        if action.kind in ("F", "B", "I") and key in self._arriving:
            self._arriving[key] = done(self._arrived(way, action))

    def loss_sum(self) -> Tensor:
        if self._loss_sum is not None:
            return self._loss_sum
        hidden = self.engine.hidden
        return torch.zeros((), dtype=torch.float64, device=None if hidden is None else hidden.device)

    # ------------------------------------------------------------------------------------------------ computation

    def _forward(self, action: Action) -> None:
        chunk, key = self.engine.chunks[action.chunk], (action.chunk, action.micro_batch)
        hidden = None if chunk.first else self._arrived("F", action)
        training = torch.is_grad_enabled()
        if hidden is not None and training:
            self._inputs[key] = hidden.requires_grad_()
        output = chunk.run(hidden, self.micro_batches[action.micro_batch])
        if training:
            self._outputs[key] = output
        if chunk.last:
            loss = output.detach().double()
            self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
            return
        self._hidden().check(output, chunk.stage, action.micro_batch)
        self._pass_on("F", action, output, chunk.next_here)

    def _backward(self, action: Action) -> None:
        chunk, key = self.engine.chunks[action.chunk], (action.chunk, action.micro_batch)
        output, hidden = self._outputs.pop(key), self._inputs.pop(key, None)
        if chunk.last:
            (output * self.factor).backward()
        else:
            torch.autograd.backward(output, self._arrived("B", action))
        if hidden is not None:
            if hidden.grad is None:
                raise MegaliteError(f"stage {chunk.stage} did not use its input for micro-batch {action.micro_batch}")
            self._pass_on("B", action, hidden.grad, chunk.previous_here)

    def _backward_input(self, action: Action) -> None:
        if self.gradients is None:
            self._backward(action)
            return
        with self.gradients.deferring(action.chunk) as deferred:
            self._backward(action)
        self._deferred[action.chunk, action.micro_batch] = deferred

    # ------------------------------------------------------------------------------------------------ messages

    def _arrived(self, kind: str, action: Action) -> Tensor:
        """The hidden states (F) or the gradient (B) that a computation needs."""
        pending = self._arriving.pop((kind, action.chunk, action.micro_batch))
        stage = self.engine.chunks[action.chunk].stage
        what = "hidden states of stage" if kind == "F" else "gradient of stage"
        neighbour = stage - 1 if kind == "F" else stage + 1
        return pending.wait(f"stage {stage}, {action}: waited for the {what} {neighbour}")

    def _pass_on(self, kind: str, action: Action, tensor: Tensor, here: int | None) -> None:
        """To a stage of this rank at once; to another rank when the list says so."""
        if here is None:
            self._to_send[kind, action.chunk, action.micro_batch] = tensor
        else:
            self._arriving[kind, here, action.micro_batch] = done(tensor.detach())

    def _receive(self, action: Action) -> None:
        assert action.peer is not None
        pending = self.engine.links.receive(self._hidden().empty(), action.peer)
        self._arriving[action.kind[-1], action.chunk, action.micro_batch] = pending

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        key = action.kind[-1], action.chunk, action.micro_batch
        tensor = self._to_send.pop(key)
        self._sending[key] = self.engine.links.send(tensor.detach().contiguous(), action.peer), tensor

    def _free(self, action: Action) -> None:
        """Wait until a message has left. Backward runs on an output without values: only its graph is needed, unless
        its last operation has kept them. An output that no backward is to come for is not kept at all.
        """
        pending, tensor = self._sending.pop((action.kind[-1], action.chunk, action.micro_batch))
        chunk = self.engine.chunks[action.chunk]
        pending.wait(f"stage {chunk.stage}, {action}: waited until it had arrived")
        to_go_backward = (action.chunk, action.micro_batch) in self._outputs
        if action.kind == "free F" and to_go_backward and not chunk.backward_reads(tensor):
            tensor.untyped_storage().resize_(0)

    def _hidden(self) -> HiddenStates:
        if self.engine.hidden is None:
            raise ValueError("an engine with several stages needs the shape of hidden states")
        return self.engine.hidden
