"""Messages of data-parallel ranks in a step, how much of them computation hides, and the update of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.extras.planner.cost import Cost, Prices, exposed
from megalite.extras.planner.memory import Element, tied_elements
from megalite.extras.planner.records import MessageKind, PartRecord
from megalite.optim.layout import default_bucket_size

_PRODUCTS_PER_ITERATION = 3
"""Products of an iteration of Newton-Schulz."""


@dataclass(frozen=True)
class Exchange:
    """Messages of a stage among data-parallel ranks, in seconds, and its elements.

    Attributes:
        forward, backward: seconds per micro-batch that no computation hides (ZeRO 2 and 3).
        reduce, gather: seconds per step of the reductions of the gradients and of the gathers of the weights.
        windows: seconds of the last backward and of the first forward, which may hide those.
        update: seconds of the optimizer on the device, and `host` of that on the host.
        copies: seconds per step of the copies to the host and of those to the device, by what the optimizer has there.
        elements: elements of the stage.
    """

    forward: float
    backward: float
    reduce: float
    gather: float
    windows: tuple[float, float]
    update: float
    host: float
    copies: tuple[float, float]
    elements: int


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
        self._element = Element.of(config)

    def exchange(self, parts: Sequence[tuple[PartRecord, int, float, float]]) -> Exchange:
        """Return what a stage exchanges. `parts`: records with their number and their seconds forward and backward."""
        stage = self.config.parallel.zero_stage
        forward = backward = reduce = gather = update = host = to_host = to_device = 0.0
        elements = 0
        for record, count, of_forward, of_backward in parts:
            of_gradients = [count * self._element.gradient for count in record.trained]
            reduces = self._within("reduce-scatter" if stage else "all-reduce", of_gradients)
            gathers = self._within("all-gather", self._gathered(record)) if stage else 0.0
            if self._element.slices_on_host:
                gathers += self._fetched(record)
            if stage == 3:
                forward += count * exposed(gathers, of_forward)
            if stage >= 2:
                backward += count * exposed(reduces + (gathers if stage == 3 else 0.0), of_backward)
                reduce += count * self._across(record)
            else:
                reduce += count * (reduces + self._across(record))
            gather += count * gathers * (stage < 3)
            elements += count * sum(record.trained)
            update += count * (self._update(record, count) + self.rounding(record)[1])
            of_record = self._on_host(record)
            host, to_host, to_device = (
                total + count * seconds for total, seconds in zip((host, to_host, to_device), of_record, strict=True)
            )
        windows = (
            sum(count * seconds for _, count, _, seconds in parts),
            sum(count * seconds for _, count, seconds, _ in parts),
        )
        return Exchange(forward, backward, reduce, gather, windows, update, host, (to_host, to_device), elements)

    def afterwards(self, exchanges: Sequence[Exchange], *, tied: bool) -> Cost:
        """Return what a rank with these stages does after its last backward.

        `tied`: it has either the first or the last stage, and another rank the other one.
        """
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
        host, overlapped = sum(each.host for each in exchanges), self.config.offload.overlap_cpu_optimizer_d2h_h2d
        for way in range(2):
            seconds, window = (
                sum(each.copies[way] for each in exchanges),
                sum(each.windows[way] for each in exchanges),
            )
            host += exposed(seconds, window) if overlapped else seconds
        update = sum(each.update for each in exchanges)
        return Cost(data=reduce + gather + self._tied(tied), optimizer=update, host=host)

    def _on_host(self, record: PartRecord) -> tuple[float, float, float]:
        """Return the seconds of a part's update on the host, and of its copies to the host and to the device.

        The update is taken to read and write there as many bytes as on a GPU, over the bandwidth of the host's memory.
        """
        offloaded, sharded = self._element.offloaded, self.config.parallel.zero_stage > 0
        if not offloaded:
            return 0.0, 0.0, 0.0
        host, share = self.prices.cluster.known_host, offloaded * (self._share(record) if sharded else 1.0)
        copied = share * sum(record.trained) * host.beta
        back = 0.0 if self._element.slices_on_host else self._element.parameter  # slices are fetched for each use
        return record.update.bytes * share / host.bandwidth, copied * self._element.gradient, copied * back

    def _fetched(self, record: PartRecord) -> float:
        """Return the seconds in which a rank's slice of a part's weights comes from the host."""
        slices = sum(each / self._of_instance(ranks) for each, ranks in self._kinds(record))
        return slices * self._element.parameter * self.prices.cluster.known_host.beta

    def rounding(self, record: PartRecord) -> tuple[float, float]:
        """Return the seconds in which a part's weights become codes: in each pass, and once in a step.

        Those that ZeRO 3 frees do in each pass, unless codes are gathered. Then a rank makes those of its slice, in
        each pass if the slice comes from the host, and each pass has a copy of them beside the gathered ones.
        """
        if not record.codes:
            return 0.0, 0.0
        seconds = self.prices.work(record.rounding, self.config.parallel).total
        if self.config.parallel.zero_stage < 3:
            return 0.0, seconds
        if not self.config.low_precision.fp8_param_gather:
            return seconds, 0.0
        copied = self.prices.moved(2 * (record.codes - sum(record.rounded)))
        seconds *= self._share(record)
        return (copied + seconds, 0.0) if self._element.slices_on_host else (copied, seconds)

    def _gathered(self, record: PartRecord) -> tuple[float, float]:
        """Return the bytes of a part that are gathered: those that were updated or, under ZeRO 3, all."""
        item = self._element.parameter
        if self.config.parallel.zero_stage == 3:
            return record.gathered(item, as_codes=self.config.low_precision.fp8_param_gather)
        dense, experts = record.trained
        return dense * item, experts * item

    def _share(self, record: PartRecord) -> float:
        """Return the share of a part that a rank of an instance has."""
        elements = sum(record.elements)
        slices = sum(each / self._of_instance(ranks) for each, ranks in self._kinds(record))
        return slices / elements if elements else 1.0

    def _update(self, record: PartRecord, count: int) -> float:
        """Return the seconds in which the optimizer updates one of `count` such parts."""
        update = record.update
        groups = [(each, ranks[: self._of_instance(ranks)]) for each, ranks in self._kinds(record)]
        of_group = self._share(record)
        sharded = self.config.parallel.zero_stage > 0
        share = of_group if sharded else 1.0
        launches, gpu = update.launches * share, self.prices.cluster.gpu
        device = launches * gpu.kernel + self.prices.moved(update.bytes * share * (1 - self._element.offloaded))
        if update.products:  # each matrix is computed on one rank of the group, so that some may have none
            matrices = update.products.total() / (_PRODUCTS_PER_ITERATION * self.config.optimizer.muon_num_ns_steps)
            of_group = max(of_group, 1 / max(matrices * count, 1.0))
            for operation, number in update.products.items():
                device += of_group * number * self.prices.operation(operation, of_layer=False).products
            for message, number in update.messages.items():
                device += of_group * number * self.prices.message(message)
            for each, ranks in groups:
                size = each * max(self._element.parameter, 4)
                size, times = (size / len(ranks), 2) if sharded else (size, 1)
                device += times * self.prices.collective("all-to-all", ranks, size)
        return max(device, launches * self.prices.launch) + self.prices.waiting(update.synchronizations)

    def _tied(self, tied: bool) -> float:
        """Return the seconds of summing a rank's slice of the gradient of an embedding that is also the output layer.

        Under any ZeRO stage gradients have been scattered over the data-parallel ranks before.
        """
        size = tied_elements(self.config) * self._element.gradient / self._of_instance(self._dense)
        return self.prices.collective("all-reduce", self._first_to_last, size) if tied and size else 0.0

    def _exposed(self, seconds: float, window: float, elements: int, *, overlapped: bool) -> float:
        if not overlapped or not elements:
            return seconds
        bucket = self.config.parallel.ddp_bucket_size or default_bucket_size(len(self._dense))
        return max(exposed(seconds, window), seconds * min(1.0, bucket / elements))

    def _kinds(self, record: PartRecord) -> Iterable[tuple[int, range]]:
        yield record.parameters, self._dense
        yield record.expert_parameters, self._expert

    def _within(self, kind: MessageKind, sizes: Sequence[float]) -> float:
        """Return the seconds of messages of so many bytes with both kinds of elements among an instance's ranks."""
        return sum(
            self.prices.collective(kind, ranks[: self._of_instance(ranks)], size)
            for size, ranks in zip(sizes, (self._dense, self._expert), strict=True)
        )

    def _across(self, record: PartRecord) -> float:
        """Return the seconds of summing the slices of a part's gradient over the instances, once in a step."""
        total = 0.0
        for elements, ranks in zip(record.trained, (self._dense, self._expert), strict=True):
            size = self._of_instance(ranks)
            if size < len(ranks):
                slices = elements * self._element.gradient / size
                total += self.prices.collective("all-reduce", ranks[::size], slices)
        return total

    def _of_instance(self, ranks: range) -> int:
        return max(len(ranks) // self._instances, 1)
