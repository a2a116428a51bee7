"""Messages of data-parallel ranks in a step, how much of them computation hides, and the update of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.planner.cost import Cost, Prices, exposed
from megalite.planner.records import MessageKind, PartRecord

_UPDATE_BYTES = 34
"""Bytes per element that Adam reads and writes: gradient (twice, once for the norm), master weight and both averages,
there and back, and the weight."""
_STEP_LAUNCHES = 300
_OVERLAP_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class Exchange:
    """Messages of a stage among data-parallel ranks, in seconds, and its elements.

    Attributes:
        forward, backward: seconds per micro-batch that no computation hides (ZeRO 2 and 3).
        reduce, gather: seconds per step of the reductions of the gradients and of the gathers of the weights.
        windows: seconds of the last backward and of the first forward, which may hide those.
        elements, owned: elements of the stage, and those whose state the rank holds.
    """

    forward: float
    backward: float
    reduce: float
    gather: float
    windows: tuple[float, float]
    elements: int
    owned: float


class DataParallel:
    """Data-parallel ranks of a layout."""

    def __init__(self, config: RunConfig, world_size: int, prices: Prices) -> None:
        parallel = config.parallel
        self.config, self.prices = config, prices
        pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
        sizes = parallel.mesh_sizes
        of_experts = sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"]
        of_stage = world_size // pipeline
        self._dense = range(0, of_stage, tensor)
        self._expert = range(0, of_stage, of_experts)
        self._first_to_last = (0, world_size - of_stage)
        self._instances = config.synchronization.instances(parallel.num_distributed_optimizer_instances)
        self._half = config.training.dtype in ("bfloat16", "float16")
        self._gradient_bytes = 2 if parallel.grad_reduce_in_bf16 else 8 if config.training.fp64 else 4
        self._weight_bytes = 2 if self._half else self._gradient_bytes

    def exchange(self, parts: Sequence[tuple[PartRecord, int, float, float]]) -> Exchange:
        """Return what a stage exchanges. `parts`: records with their number and their seconds forward and backward."""
        stage = self.config.parallel.zero_stage
        forward = backward = reduce = gather = 0.0
        elements, owned = 0, 0.0
        for record, count, of_forward, of_backward in parts:
            reduces = self._seconds("reduce-scatter" if stage else "all-reduce", record, self._gradient_bytes)
            gathers = self._seconds("all-gather", record, self._weight_bytes) if stage else 0.0
            if stage == 3:
                forward += count * exposed(gathers, of_forward)
            if stage >= 2:
                backward += count * exposed(reduces + (gathers if stage == 3 else 0.0), of_backward)
            else:
                reduce += count * reduces
            gather += count * gathers * (stage < 3)
            elements += count * (record.parameters + record.expert_parameters)
            shards = [
                each / (max(len(ranks) // self._instances, 1) if stage else 1) for each, ranks in self._kinds(record)
            ]
            owned += count * sum(shards)
        windows = (
            sum(count * seconds for _, count, _, seconds in parts),
            sum(count * seconds for _, count, seconds, _ in parts),
        )
        return Exchange(forward, backward, reduce, gather, windows, elements, owned)

    def afterwards(self, exchanges: Sequence[Exchange], *, tied: bool) -> Cost:
        """Return what a rank with these stages does after its last backward. `tied`: it has the first or last stage."""
        parallel = self.config.parallel
        elements = sum(each.elements for each in exchanges)
        reduce = self._exposed(
            sum(each.reduce for each in exchanges),
            sum(each.windows[0] for each in exchanges),
            elements,
            overlapped=parallel.overlap_grad_reduce,
        )
        gather = self._exposed(
            sum(each.gather for each in exchanges),
            sum(each.windows[1] for each in exchanges),
            elements,
            overlapped=parallel.overlap_param_gather,
        )
        gpu, owned = self.prices.cluster.gpu, sum(each.owned for each in exchanges)
        seconds = self.prices.moved(_UPDATE_BYTES * owned + self._gradient_bytes * elements)
        return Cost(data=reduce + gather + self._tied(tied), optimizer=seconds + _STEP_LAUNCHES * gpu.launch)

    def _tied(self, tied: bool) -> float:
        """Return the seconds of summing the gradients of an embedding that is also the output layer."""
        model, parallel = self.config.model, self.config.parallel
        apart = tied and parallel.pipeline_model_parallel_size > 1
        if model.untie_embeddings_and_output_weights or not apart:
            return 0.0
        rows = model.padded_vocab_size(parallel.tensor_model_parallel_size) // parallel.tensor_model_parallel_size
        return self.prices.collective(
            "all-reduce", self._first_to_last, rows * model.hidden_size * self._gradient_bytes
        )

    def _exposed(self, seconds: float, window: float, elements: int, *, overlapped: bool) -> float:
        if not overlapped or not elements:
            return seconds
        bucket = self.config.parallel.ddp_bucket_size or max(_OVERLAP_BUCKET, _BUCKET_PER_RANK * len(self._dense))
        return max(exposed(seconds, window), seconds * min(1.0, bucket / elements))

    def _kinds(self, record: PartRecord) -> Iterable[tuple[int, range]]:
        yield record.parameters, self._dense
        yield record.expert_parameters, self._expert

    def _seconds(self, kind: MessageKind, record: PartRecord, item: int) -> float:
        """Return the seconds of a message with all elements of a part; over instances first within, then across."""
        total = 0.0
        for elements, ranks in self._kinds(record):
            size = elements * item
            of_instance = max(len(ranks) // self._instances, 1)
            total += self.prices.collective(kind, ranks[:of_instance], size)
            if kind != "all-gather" and of_instance < len(ranks):
                total += self.prices.collective("all-reduce", ranks[::of_instance], size / of_instance)
        return total
