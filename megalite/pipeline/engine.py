"""Engine that executes the list of actions of a rank on its stages.

A stage is called as `stage(inputs, micro_batch)`: the tensors of the previous stage by name (none for the first stage),
and a micro-batch that the engine does not inspect. It returns a `StageOutput`: tensors for the next stage, and terms of
the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.errors import MegaliteError
from megalite.offload.activations import ActivationOffload
from megalite.parallel.collectives import Pending, completed
from megalite.parallel.device import profile_range, synchronize
from megalite.parallel.parameter import DeferredGradients
from megalite.parallel.stage import NO_SUMS, StageOutput, TensorSpec, TermSums, add_sums
from megalite.pipeline.offloading import ahead, slots
from megalite.pipeline.point_to_point import Links
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import Span
from megalite.pipeline.stages import Stages
from megalite.torch_internals import is_profiling, run_backward

MicroBatch = TypeVar("MicroBatch")
Stage = Callable[[Mapping[str, Tensor], MicroBatch], StageOutput]


class GradientReceiver(Protocol):
    """Receiver of the stages' gradients."""

    def deferring(self, chunk: int) -> AbstractContextManager[DeferredGradients]:
        """Keep the gradients of a chunk's parameters instead of adding them."""

    def reduce(self, chunk: int, micro_batches: int) -> None:
        """Start the reductions of a chunk's gradients that are due after this many micro-batches."""

    def leave_out(self, chunk: int) -> None:
        """Take the gradients of a micro-batch in a chunk as zeros that have arrived."""


class RunningStep(Protocol):
    """Interface of a running step for observers."""

    def execute(self, action: Action) -> None:
        """Run an action."""

    def wait_for_message(self, action: Action) -> None:
        """Wait for the tensors from another stage that a computation needs."""


class StepObserver(Protocol):
    """Observer that is called for each action of a step."""

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run the action by calling `step.execute`."""


class Recording:
    """Start and end of each action of a step on this rank, in seconds since the recording was created."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._device, self._origin = device, time.perf_counter()

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run an action and wait until the device has completed it: a recorded step overlaps less than others. The time
        of waiting for messages is not included.
        """
        step.wait_for_message(action)
        synchronize(self._device)
        start = time.perf_counter() - self._origin
        step.execute(action)
        synchronize(self._device)
        self.spans.append(Span(action, start, time.perf_counter() - self._origin))


class PipelineEngine(Generic[MicroBatch]):
    """Stages of one pipeline rank, and its links to other ranks. Without a pipeline, the one stage is the entire model.

    Attributes:
        offloading: copies what layers save for backward to the host; None: it stays.
        rounded: returns a term of the loss over a micro-batch in fp64, as it is added to the others.
        within: returns a context in which a list runs, during which no weight changes.

    Args:
        stages: if there are several, with shapes and dtypes of the tensors that they pass on.
        device: device of received messages.
    """

    offloading: ActivationOffload | None = None
    rounded: Callable[[Tensor], Tensor] = staticmethod(torch.Tensor.double)
    within: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(
        self,
        chunks: Sequence[Stage[MicroBatch]],
        stages: Stages | None = None,
        rank: int = 0,
        links: Links | None = None,
        device: torch.device | None = None,
    ) -> None:
        stages = stages if stages is not None else Stages()
        self.stages, self.rank = stages, rank
        self.links = links if links is not None else Links({}, {})
        self.device = device
        self.chunks = [_Chunk(stages, stages.stage(rank, index), stage) for index, stage in enumerate(chunks)]

    def run(
        self,
        actions: Iterable[Action],
        micro_batches: Sequence[MicroBatch],
        loss_multipliers: Mapping[str, float] | None = None,
        gradients: GradientReceiver | None = None,
        observer: StepObserver | None = None,
    ) -> dict[str, Tensor]:
        """Execute `actions`; backward differentiates the sum of all terms of the loss, each times its multiplier.

        Args:
            loss_multipliers: multipliers by name of the term; None for a list without backward.
            gradients: receiver of the gradients; None: nothing is reduced, and I does the same as B.

        Returns:
            The unscaled sum of each term over this rank's stages, detached. It is in fp64, so that except for the
            stage's own rounding it depends neither on the split into micro-batches nor on the order of the actions.

        Raises:
            MegaliteError: the output of a stage does not fit the next stage, or cannot be differentiated.
            CommunicationError: a neighbouring rank has died or does not respond.
        """
        step = _Step(self, micro_batches, loss_multipliers or {}, gradients)
        execute = step.execute if observer is None else partial(observer.execute, step=step)
        actions, profiling = list(actions), is_profiling()
        early: Mapping[int, tuple[int, int]] = {}
        if self.offloading is not None:
            self.offloading.begin_step(of_slots := slots(actions))
            early = ahead(actions, of_slots, self.offloading.ends)
        with self.within(), torch.set_grad_enabled(any(action.kind in ("B", "I") for action in actions)):
            for index, action in enumerate(actions):
                if self.offloading is not None and index in early:
                    self.offloading.before_computation(action.chunk, action.micro_batch, early[index])
                if profiling:
                    with profile_range(str(action)):
                        execute(action)
                else:
                    execute(action)
        if self.offloading is not None:
            self.offloading.end_step()
        return step.sums()


class _Chunk(Generic[MicroBatch]):
    """One of the rank's stages, and its position in the pipeline."""

    def __init__(self, stages: Stages, number: int, stage: Stage[MicroBatch]) -> None:
        self.run, self.stage = stage, number
        self.takes = stages.passes(self.stage - 1) if self.stage else ()
        self.passes = stages.passes(self.stage)
        for spec in (*self.takes, *self.passes):
            if spec.shape is None or spec.dtype is None:
                raise ValueError(f"an engine with several stages needs the shape and dtype of {spec.name}")
        self.gives_back = [spec for spec in self.takes if spec.gradient]
        self.gets_back = [spec for spec in self.passes if spec.gradient]
        """Tensors whose gradients are sent to the previous stage, and received from the next one."""

    def passed_on(self, tensors: Mapping[str, Tensor], micro_batch: int) -> list[Tensor]:
        """Return the tensors for the next stage, in the declared order. Raises MegaliteError if they do not fit."""
        for spec in self.passes:
            if spec.name not in tensors:
                raise MegaliteError(f"stage {self.stage} did not return {_words(spec)} for micro-batch {micro_batch}")
            output = tensors[spec.name]
            if output.shape != spec.shape or output.dtype != spec.dtype:
                raise MegaliteError(
                    f"stage {self.stage} returned {_words(spec)} {tuple(output.shape)} of {output.dtype} for "
                    f"micro-batch {micro_batch}, but the next stage expects {spec.shape} of {spec.dtype}: let "
                    "samples have one shape (padded in collate), and stages one dtype"
                )
        return [tensors[spec.name] for spec in self.passes]

    def edges(self, passed_on: Iterable[Tensor], micro_batch: int) -> list[GradientEdge]:
        """Return the graph edges that receive the next stage's gradients. Raises MegaliteError if there is no graph."""
        edges = []
        for spec, tensor in zip(self.passes, passed_on, strict=True):
            if spec.gradient:
                if not tensor.requires_grad:
                    raise MegaliteError(
                        f"stage {self.stage} returned {_words(spec)} without a graph for micro-batch {micro_batch}, "
                        "but the next stage returns a gradient: compute it from parameters or inputs that need "
                        "one, or declare it with gradient=False"
                    )
                edges.append(get_gradient_edge(tensor))
        return edges

    def check_terms(self, terms: TermSums, loss_multipliers: Mapping[str, float] | None, micro_batch: int) -> None:
        """Raise MegaliteError for a term that is not a scalar in fp32 or wider, or has no multiplier in training."""
        for name, term in terms.items():
            if not isinstance(term, Tensor) or term.dim() or not _is_wide(term):
                shown = f"{tuple(term.shape)} of {term.dtype}" if isinstance(term, Tensor) else type(term).__name__
                raise MegaliteError(
                    f"stage {self.stage} returned a term of the loss that is not a scalar of fp32 or wider for "
                    f"micro-batch {micro_batch}: {name}, {shown}"
                )
            if loss_multipliers is not None and name not in loss_multipliers:
                raise MegaliteError(f"stage {self.stage} returned a term of the loss that is not declared: {name}")


def _is_wide(term: Tensor) -> bool:
    """Tell whether the dtype of a tensor is precise enough for sums."""
    return term.is_floating_point() and term.itemsize >= torch.float32.itemsize


def _words(spec: TensorSpec) -> str:
    return spec.name.replace("_", " ")


class _Step(Generic[MicroBatch]):
    """State of one step in progress. Each tensor is released by its last consumer."""

    def __init__(
        self,
        engine: PipelineEngine[MicroBatch],
        micro_batches: Sequence[MicroBatch],
        loss_multipliers: Mapping[str, float],
        gradients: GradientReceiver | None,
    ) -> None:
        self.engine, self.micro_batches = engine, micro_batches
        self.loss_multipliers, self.gradients = loss_multipliers, gradients
        self._sums: list[dict[str, Tensor]] = [{} for _ in engine.chunks]
        self._arriving: dict[tuple[str, int, int], list[Pending]] = {}
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._outputs: dict[tuple[int, int], tuple[list[GradientEdge], TermSums]] = {}
        """Inputs that need a gradient, and the graph edges of such outputs. Edges are kept instead of the output
        tensors, so that the memory of an activation is freed after it has been sent."""
        self._to_send: dict[tuple[str, int, int], list[Tensor]] = {}
        self._sending: dict[tuple[str, int, int], list[Pending]] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}

    def execute(self, action: Action) -> None:
        """Run one action of the list. Without a receiver of gradients, W and R do nothing."""
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
        elif kind[:4] == "skip":
            self._skip(action)
        elif kind.startswith("send"):
            self._send(action)
        else:
            self._free(action)

    def wait_for_message(self, action: Action) -> None:
        way = "F" if action.kind == "F" else "B"
        key = way, action.chunk, action.micro_batch
        if action.kind in ("F", "B", "I") and key in self._arriving:
            self._arriving[key] = [completed(tensor) for tensor in self._arrived(way, action)]

    def sums(self) -> dict[str, Tensor]:
        """Return the sum of each term over the rank's stages, added in the order of the chunks."""
        total: TermSums = NO_SUMS
        for sums in self._sums:
            total = add_sums(total, sums)
        return dict(total)

    # ------------------------------------------------------------------------------------------------ computation

    def _forward(self, action: Action) -> None:
        """Run a chunk on a micro-batch, add its loss terms to the sums, and pass its tensors on."""
        chunk, key = self.engine.chunks[action.chunk], (action.chunk, action.micro_batch)
        if self.engine.offloading is not None:
            self.engine.offloading.before_forward(*key)
        arrived = self._arrived("F", action) if chunk.takes else []
        training = torch.is_grad_enabled()
        inputs = {spec.name: tensor for spec, tensor in zip(chunk.takes, arrived, strict=True)}
        if training and arrived:
            self._inputs[key] = [inputs[spec.name].requires_grad_() for spec in chunk.gives_back]
        tensors, terms, recorded = chunk.run(inputs, self.micro_batches[action.micro_batch])
        if self.engine.offloading is not None:
            self.engine.offloading.after_forward()
        passed_on = chunk.passed_on(tensors, action.micro_batch)
        chunk.check_terms(terms, self.loss_multipliers if training else None, action.micro_batch)
        if training:
            edges = chunk.edges(passed_on, action.micro_batch)
            self._outputs[key] = edges, {name: term for name, term in terms.items() if term.requires_grad}
        sums = self._sums[action.chunk]
        for name, term in (*terms.items(), *recorded.items()):
            value = self.engine.rounded(term.detach())
            sums[name] = sums[name] + value if name in sums else value
        if passed_on:
            self._pass_on("F", action, passed_on, chunk.stage + 1)

    def _backward(self, action: Action) -> None:
        """Run a chunk's backward and pass the gradients of its inputs back; an input without one is an error."""
        chunk, key = self.engine.chunks[action.chunk], (action.chunk, action.micro_batch)
        if self.engine.offloading is not None:
            self.engine.offloading.before_backward(*key)
        (edges, terms), inputs = self._outputs.pop(key), self._inputs.pop(key, ())
        gradients = self._arrived("B", action) if edges else []
        for name, term in terms.items():
            edges.append(get_gradient_edge(term))
            gradients.append(torch.full_like(term, self.loss_multipliers[name]))
        if edges:
            run_backward(edges, gradients)
        if inputs:
            back = []
            for spec, tensor in zip(chunk.gives_back, inputs, strict=True):
                if tensor.grad is None:
                    raise MegaliteError(
                        f"stage {chunk.stage} did not use its input for micro-batch {action.micro_batch}: "
                        f"{_words(spec)}"
                    )
                back.append(tensor.grad)
            self._pass_on("B", action, back, chunk.stage - 1)

    def _backward_input(self, action: Action) -> None:
        if self.gradients is None:
            self._backward(action)
            return
        with self.gradients.deferring(action.chunk) as deferred:
            self._backward(action)
        self._deferred[action.chunk, action.micro_batch] = deferred

    def _skip(self, action: Action) -> None:
        """Compute nothing: drop what arrives, pass zeros on, and count the gradients as arrived."""
        chunk, kind = self.engine.chunks[action.chunk], action.kind[-1]
        way, forth = ("F", True) if kind == "F" else ("B", False)
        takes, passes = (chunk.takes, chunk.passes) if forth else (chunk.gets_back, chunk.gives_back)
        if takes and kind != "W":
            self._arrived(way, action)
        if passes and kind != "W":
            zeros = [torch.zeros(each.shape or (), dtype=each.dtype, device=self.engine.device) for each in passes]
            self._pass_on(way, action, zeros, chunk.stage + (1 if forth else -1))
        if kind in ("B", "W") and self.gradients is not None:
            self.gradients.leave_out(action.chunk)

    # ------------------------------------------------------------------------------------------------ messages

    def _arrived(self, kind: str, action: Action) -> list[Tensor]:
        """Return the tensors (F) or gradients (B) that a computation needs."""
        arriving = self._arriving.pop((kind, action.chunk, action.micro_batch))
        stage = self.engine.chunks[action.chunk].stage
        what, neighbour = ("tensors", stage - 1) if kind == "F" else ("gradients", stage + 1)
        return [
            pending.wait("stage %d, %s: waited for the %s of stage %d", stage, action, what, neighbour)
            for pending in arriving
        ]

    def _pass_on(self, kind: str, action: Action, tensors: list[Tensor], stage: int) -> None:
        """Pass tensors to a stage of this rank now, or keep them for the send action to another rank."""
        rank, chunk = self.engine.stages.place(stage)
        if rank == self.engine.rank:
            self._arriving[kind, chunk, action.micro_batch] = [completed(tensor.detach()) for tensor in tensors]
        else:
            self._to_send[kind, action.chunk, action.micro_batch] = tensors

    def _receive(self, action: Action) -> None:
        assert action.peer is not None
        chunk, kind = self.engine.chunks[action.chunk], action.kind[-1]
        specs = chunk.takes if kind == "F" else chunk.gets_back
        buffers = [torch.empty(spec.shape or (), dtype=spec.dtype, device=self.engine.device) for spec in specs]
        pending = [self.engine.links.receive(buffer, action.peer) for buffer in buffers]
        self._arriving[kind, action.chunk, action.micro_batch] = pending

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        key, links = (action.kind[-1], action.chunk, action.micro_batch), self.engine.links
        tensors = self._to_send.pop(key)
        self._sending[key] = [links.send(tensor.detach().contiguous(), action.peer) for tensor in tensors]

    def _free(self, action: Action) -> None:
        """Wait until a message has been sent, and free its memory."""
        stage = self.engine.chunks[action.chunk].stage
        for pending in self._sending.pop((action.kind[-1], action.chunk, action.micro_batch)):
            pending.wait("stage %d, %s: waited until it had arrived", stage, action)
