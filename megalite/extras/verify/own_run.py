"""Traces of megalite's own runs: the steps that --trace-steps names, as `megalite-verify` reads them."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.checkpoint import is_url
from megalite.config.run import TaskConfig
from megalite.errors import ConfigurationError
from megalite.extras.verify.points import PRODUCT, Point, Points, watched
from megalite.extras.verify.trace import Role
from megalite.model.batch import MicroBatch
from megalite.optim.buckets import ParameterBucket
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer
from megalite_trace import Place, Recorder

_AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")


class StepTraces:
    """Recorder of steps of a trainer.

    It records what this rank has: its part of the micro-batches, the points of its stages under their names in the
    network, and boxes of logical tensors. Under ZeRO 1 to 3 these are, of gradients, the slices that the rank owns.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Begin. Raises ConfigurationError if steps of this run cannot be traced."""
        config, mesh = trainer.config, trainer.mesh
        profiling = config.profiling
        self._trainer, self._steps = trainer, frozenset(profiling.trace_steps)
        self._recorder = Recorder(
            _folder(config),
            [],
            self._steps,
            program="megalite",
            whole=profiling.trace_whole,
            coordinates={axis: (mesh.coordinate(axis), mesh.size(axis)) for axis in _AXES},
            on_error="warn",
        )

    def __call__(self, step: Callable[[], StepMetrics]) -> StepMetrics:
        """Run the trainer's next step by `step`, and record it if it is one of those."""
        number, optimizer = self._trainer.iteration + 1, self._trainer.optimizer
        if number not in self._steps:
            return step()
        with self._recorder.step(number), self._watched():
            optimizer.finish_parameter_gather()
            self._record_parameters("parameter")
            metrics = step()
            optimizer.finish_parameter_gather()
            self._record_parameters("parameter_after")
            self._recorder.figures(
                loss=next(iter(metrics.losses.values())),
                grad_norm=metrics.grad_norm,
                learning_rate=metrics.learning_rate,
                loss_scale=metrics.loss_scale,
            )
        return metrics

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Record the points of all stages, and the gradients once they are complete."""
        optimizer, scale = self._trainer.optimizer, self._trainer.loss_scale.value
        others = optimizer.before_update

        def before_update() -> None:
            self._record_gradients(scale)
            if others is not None:
                others()

        with ExitStack() as stack:
            for number, chunk in enumerate(self._trainer.chunks):
                stack.enter_context(_watched_chunk(self._recorder, chunk, number))
            optimizer.before_update = before_update
            try:
                yield
            finally:
                optimizer.before_update = others

    def _record_parameters(self, role: Role) -> None:
        """Record the parameters: under ZeRO 3 the slices that this rank owns."""
        optimizer, parts = self._trainer.optimizer, Counter[str]()
        for bucket in (*optimizer.buckets, *optimizer.frozen):
            if bucket.zero_stage == 3:
                self._record(bucket, role, bucket.parameter_shard, bucket.owned_range[0], parts)
            else:
                self._record(bucket, role, bucket.parameters, 0, parts)

    def _record_gradients(self, scale: float) -> None:
        """Record the sums of the gradients over micro-batches and ranks, without the factor of the loss."""
        parts = Counter[str]()
        for bucket in self._trainer.optimizer.updated:
            if bucket.zero_stage == 0:
                self._record(bucket, "main_gradient", bucket.gradients, 0, parts, scale)
            else:
                self._record(bucket, "main_gradient", bucket.gradient_shard, bucket.owned_range[0], parts, scale)

    def _record(
        self, bucket: ParameterBucket, role: Role, flat: Tensor, start: int, parts: Counter[str], scale: float = 1.0
    ) -> None:
        """Record elements from `start` on of a bucket, each box of a logical tensor by itself.

        `parts`: number of boxes of each tensor so far.
        """
        for slot in bucket.slots:
            width = math.prod(slot.parameter.sharding.local_shape[1:])
            for piece in slot.parameter.sharding.pieces:
                begin = slot.start + piece.row * width
                low, high = max(begin, start), min(begin + piece.rows * width, start + len(flat))
                for box, at in piece.box.flat_range(low - begin, high - begin):
                    values = flat[begin + at - start :][: box.numel].view(box.size)
                    values, name = values if scale == 1.0 else values / scale, piece.tensor.name
                    self._recorder.tensor(name, role, values, number=parts[name], place=Place(offset=box.offset))
                    parts[name] += 1


def _folder(config: TaskConfig) -> str:
    """Return the folder of the traces. Raises ConfigurationError for a run whose steps cannot be traced."""
    save, profiling, offload = config.checkpoint.save, config.profiling, config.offload
    folder = profiling.trace_dir or (save and f"{save}/trace")
    problems = {
        "needs a folder: give --save or --trace-dir": folder is None or is_url(folder),
        "needs data parallelism that sums all gradients in each step: leave out what communicates less": (
            not config.synchronization.is_plain
        ),
        "does not go with an optimizer or weights on the host: gradients leave the device at once": (
            offload.optimizer_cpu_offload or offload.parameter_offload
        ),
        "does not go with --rerun-on-replica-interval, whose steps run twice": (
            config.corruption.rerun_on_replica_interval is not None
        ),
        "does not go with --cp-balance documents: megalite-verify knows only samples that are cut in the plain way": (
            config.parallel.context_parallel_size > 1 and config.parallel.cp_balance == "documents"
        ),
    }
    if found := [f"--trace-steps {problem}" for problem, holds in problems.items() if holds]:
        raise ConfigurationError("\n".join(found))
    assert folder is not None
    return folder


class _OfMicroBatch:
    """Points of one micro-batch in a chunk, each recorded when it comes."""

    def __init__(self, recorder: Recorder, chunk: int, micro_batch: int) -> None:
        self._seen: set[Point] = set()
        self._followed: dict[int, tuple[weakref.ref[Tensor], list[Point]]] = {}
        self._record = partial(recorder.tensor, micro_batch=micro_batch, chunk=chunk)

    def __contains__(self, point: Point, /) -> bool:
        return point in self._seen or point.module.endswith(PRODUCT)

    def __setitem__(self, point: Point, tensor: Tensor, /) -> None:
        self._seen.add(point)
        place = Place("sbh") if tensor.dim() == 3 else None
        self._record(point.module, point.role, tensor, place=place)

    def follow(self, tensor: Tensor, point: Point) -> None:
        """Record the gradient with respect to a tensor: with one hook, so that it is kept once under all its names."""
        reference, points = self._followed.get(id(tensor), (None, []))
        if reference is None or reference() is not tensor:
            points = list[Point]()
            self._followed[id(tensor)] = weakref.ref(tensor), points
            tensor.register_hook(partial(self._take, points))
        points.append(point)

    def _take(self, points: Sequence[Point], gradient: Tensor) -> None:
        gradient = gradient.detach()  # another one for each hook: messages may change the gradient in between, unseen
        for point in points:
            self[point] = gradient


@contextmanager
def _watched_chunk(recorder: Recorder, chunk: nn.Module, number: int) -> Iterator[None]:
    """Record the points of a chunk; with the first chunk, also the micro-batches. What runs again is not recorded."""
    running: list[Points] = []
    count = 0

    def begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        _, micro_batch = arguments
        if number == 0 and isinstance(micro_batch, MicroBatch):
            _record_batch(recorder, micro_batch)
        running.append(_OfMicroBatch(recorder, number, count))
        count += 1

    def end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        running.clear()

    stage_layers = getattr(chunk, "stage_layers", None)
    first = 0 if stage_layers is None else stage_layers.first_layer
    with watched(chunk, first, lambda: running[0] if running else None):
        handles = chunk.register_forward_pre_hook(begin), chunk.register_forward_hook(end)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _record_batch(recorder: Recorder, micro_batch: MicroBatch) -> None:
    first = micro_batch.first_keys
    recorder.batch(
        micro_batch.tokens,
        micro_batch.labels,
        micro_batch.loss_mask,
        micro_batch.positions,
        None if first is None else micro_batch.layout.own(first, 1),  # a document's first token names it
        torch.tensor(micro_batch.sample_ids),
    )
