"""Seconds of kernels and messages on a cluster.

A product takes flops / (peak x efficiency / (1 + half x (1/M + 1/N + 1/K))), less what sizes that tensor cores do not
divide cost; other kernels take their bytes at a share of the memory's bandwidth. A message takes hops x alpha and bytes
x beta, by the fastest of the algorithms that NCCL has: rings, trees, within nodes first, and switches that add up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

from megalite.config import RunConfig
from megalite.config.parallel import ParallelConfig
from megalite.extras.planner.cluster import Cluster, Link, Stack, find_stack
from megalite.extras.planner.records import Message, MessageKind, Operation, PartRecord, Work

_ALIGNMENTS = ((64, 1.0), (16, 0.92), (8, 0.85), (2, 0.5), (1, 0.25))
"""Shares of its speed that a product keeps, by the largest power of two that divides its inner and outer sizes."""
_HEAD_WIDTH, _TILE = 32, 128
_PASSES_FORWARD, _PASSES_BACKWARD = 5, 6
"""Times that attention without fusion reads or writes all scores: softmax, mask and dropout."""
_CAST_BYTES = 4
"""Bytes per element that is cast to low precision, also transposed: the input of a product and, in backward, the
gradient of its output. The product for the gradient of a weight takes both as they are, and weights are cast rarely."""
_SHORT, _LONG = 2, 4
_LAUNCHES_OF_MESSAGE, _LAUNCHES_AFTER_WAIT = 1.5, 10
"""Work of the host for a message, per doubling of the ranks that may be late, and before the device goes on after a
wait, in launches."""
CONTENTION = 0.2
"""Share of the time of a hidden message that computation loses, since both need the device."""


@dataclass(frozen=True)
class Cost:
    """Seconds by what takes them. Messages of other axes than `data` are those that no computation hides."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    """Time that the device waits for the host to launch kernels."""
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    """Messages between stages that no computation hides."""
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0
    """Updates on the host, and copies between it and the device that no computation hides."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(float.__add__, self.values, other.values))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(value * factor for value in self.values))

    @property
    def total(self) -> float:
        return sum(self.values)

    @property
    def values(self) -> tuple[float, ...]:
        """The entries in order."""
        return tuple(vars(self).values())


NAMES = tuple(each.name for each in fields(Cost))
"""Names of a cost's entries."""


class Prices:
    """Seconds of operations and messages on a cluster."""

    def __init__(self, cluster: Cluster, stack: Stack | None = None) -> None:
        self.cluster, self.stack = cluster, stack or find_stack(Stack.name)
        self._messages: dict[tuple[MessageKind, Sequence[int], float, int], float] = {}
        self._passes: dict[Hashable, tuple[PartRecord, tuple[Cost, Cost]]] = {}

    # -------------------------------------------------------------------------------------------- kernels

    @property
    def launch(self) -> float:
        """Seconds of the host for a launch."""
        return 0.0 if self.stack.graphs else self.cluster.gpu.launch

    def product(self, shape: Sequence[int], dtype: str) -> float:
        """Return the seconds of a batch of products, without the reading of their matrices."""
        batch, rows, columns, inner = shape
        if not math.prod(shape):  # as where a rank has no run of a sample before its own
            return 0.0
        gpu = self.cluster.gpu
        peak = gpu.peak_of(dtype)
        half = gpu.half * max(1.0, peak / gpu.half_peak)  # what is lost at the edges is lost in seconds
        efficiency = gpu.efficiency / (1 + half * (1 / rows + 1 / columns + 1 / inner))
        divisor = math.gcd(columns, inner)
        kept = next(share for multiple, share in _ALIGNMENTS if divisor % multiple == 0)
        return 2 * batch * rows * columns * inner / (peak * efficiency * kept)

    def moved(self, size: float) -> float:
        """Return the seconds in which kernels read and write so many bytes."""
        return size / (self.cluster.gpu.bandwidth * self.cluster.gpu.share)

    def operation(self, operation: Operation, *, of_layer: bool = True) -> Cost:
        """Return the seconds of a kernel. `of_layer`: it may run in the stack's low precision."""
        return Cost(*self._kernel(operation, of_layer=of_layer))

    def _kernel(self, operation: Operation, *, of_layer: bool) -> tuple[float, float, float]:
        """Return the seconds of a kernel as products, attention and element-wise work."""
        gpu = self.cluster.gpu
        if operation.kind == "elementwise":
            return 0.0, 0.0, gpu.kernel + self.moved(operation.bytes)
        if operation.kind == "attention":
            return 0.0, self._attention(operation), 0.0
        low = self.stack.low_precision if of_layer else None
        seconds = max(self.product(operation.shape, low or operation.dtype), self.moved(operation.bytes))
        batch, rows, _, inner = operation.shape
        cast = low and not operation.name.startswith("add")
        return gpu.kernel + seconds, 0.0, self.moved(_CAST_BYTES * batch * rows * inner) if cast else 0.0

    def _attention(self, operation: Operation) -> float:
        """Return the seconds of scores and their products: by one kernel, or by many without fusion."""
        gpu = self.cluster.gpu
        backward = operation.name.endswith("backward")
        batch, queries, keys, width = operation.shape
        if self.stack.attention != "unfused":
            most = gpu.attention.get(self.stack.attention, gpu.attention["flash-2"])
            share = most / (1 + _HEAD_WIDTH / width + _TILE / queries)
            share *= 1 + _HEAD_WIDTH / 128
            return gpu.kernel + max(operation.flops / (gpu.half_peak * share), self.moved(operation.bytes))
        scores = batch * queries * keys
        count = _LONG if backward else _SHORT
        bound = self.moved(2 * (scores + batch * width * (queries + keys)))
        products = count * max(self.product((batch, queries, keys, width), operation.dtype), bound)
        passes = _PASSES_BACKWARD if backward else _PASSES_FORWARD
        return products + self.moved(2 * passes * scores) + (count + 2) * gpu.kernel

    def work(
        self, work: Work, parallel: ParallelConfig, *, of_layer: bool = True, waits: int = 0, experts: int = 1
    ) -> Cost:
        """Return the seconds of a pass: kernels one after another, or the host's launches if they take longer.

        Args:
            waits: times that the host waits for the device, after which the device waits for the next launches.
            experts: experts that each token chooses.
        """
        products = attention = elementwise = 0.0
        for each, count in work.operations.items():
            of_products, of_attention, of_elements = self._kernel(each, of_layer=of_layer)
            products += count * of_products
            attention += count * of_attention
            elementwise += count * of_elements
        kernels = Cost(products, attention, elementwise)
        hosts = float(work.launches)
        messages = {"tensor": 0.0, "context": 0.0, "expert": 0.0}
        for message, count in work.messages.items():
            axis = axis_of(message, parallel)
            messages[axis] += count * self.message(message, experts if axis == "expert" else 1)
            hosts += count * _LAUNCHES_OF_MESSAGE * math.log2(max(len(message.ranks), 2))
        context = exposed(messages["context"], kernels.attention)  # keys travel while others are attended to
        tensor = messages["tensor"] * (1 - self.stack.hidden_tensor)
        expert = messages["expert"] * (1 - self.stack.hidden_expert)
        device = kernels + Cost(tensor=tensor, context=context, expert=expert)
        return device + Cost(launch=max(0.0, hosts * self.launch - device.total) + self.waiting(waits))

    def waiting(self, waits: int) -> float:
        """Return the seconds in which the device has nothing to do after waits of the host for it."""
        return _LAUNCHES_AFTER_WAIT * self.launch * waits

    def passes(self, record: PartRecord, config: RunConfig, *, of_layer: bool) -> tuple[Cost, Cost]:
        """Return the seconds of a part with a micro-batch, forward and backward, looked up once for each record."""
        key = (id(record.forward), id(record.backward), of_layer)
        if key not in self._passes:  # with the record, so that no other gets its id
            experts = config.model.moe_router_topk if config.model.num_experts else 1
            parallel, waits = config.parallel, record.synchronizations
            forward = self.work(record.forward, parallel, of_layer=of_layer, waits=waits, experts=experts)
            backward = self.work(record.backward, parallel, of_layer=of_layer, experts=experts)
            self._passes[key] = record, (forward, backward)
        return self._passes[key][1]

    def weight_gradients(self, record: PartRecord, config: RunConfig, *, of_layer: bool) -> float:
        """Return the seconds of the gradients of a part's weights, of which each product of forward has one.

        They are products of the weights' dtype, unless they are rounded, too.
        """
        forward = self.passes(record, config, of_layer=of_layer)[0].products
        share = 1 - sum(record.frozen) / max(sum(record.elements), 1)
        if not record.codes or config.low_precision.fp8_wgrad:
            return forward * share
        dtype, low = config.training.dtype, ("float8", "float4")
        return share * sum(
            count * self.operation(each._replace(dtype=dtype if each.dtype in low else each.dtype)).products
            for each, count in record.forward.operations.items()
        )

    # -------------------------------------------------------------------------------------------- messages

    def message(self, message: Message, experts: int = 1) -> float:
        """Return the seconds of a message among ranks. `experts`: experts that each token in it chooses."""
        return self.collective(message.kind, message.ranks, message.bytes, experts)

    def collective(self, kind: MessageKind, ranks: Sequence[int], size: float, experts: int = 1) -> float:
        """Return the seconds of a message of `size` bytes, counted as in `Message`, looked up once for each."""
        key = (kind, ranks, size, experts)
        if key not in self._messages:
            self._messages[key] = self._collective(kind, ranks, size, experts)
        return self._messages[key]

    def _collective(self, kind: MessageKind, ranks: Sequence[int], size: float, experts: int) -> float:
        """Return the seconds by the fastest algorithm. Receives are free: their sender counts the message."""
        nodes, count = len({rank // self.cluster.node_ranks for rank in ranks}), len(ranks)
        if count < 2 or size == 0 or kind == "receive":
            return 0.0
        within, across = self.cluster.node, self.cluster.network
        if kind == "send":
            link = within if nodes == 1 else across
            return link.alpha + size * link.beta
        of_node = count / nodes
        if kind == "all-to-all":
            copies = _reached(nodes, experts) / _reached(count, experts) if self.stack.node_first else 1.0
            return _all_to_all(size, count, of_node, within, across, copies)
        times = 2 if kind == "all-reduce" else 1
        if nodes == 1:
            found = [times * ring(size, count, within)]
            if kind == "all-reduce":
                found.append(tree(size, count, within))
            if within.multicast:
                found.append(switched(size, count, within, reduced=kind == "all-reduce"))
            return min(found)
        rails = Link(across.alpha, max(within.beta, across.beta / of_node))
        hops = (count - nodes) * within.alpha + nodes * across.alpha
        long_ring = times * ((count - 1) / count * size * rails.beta + hops)
        inner = times * ring(size, of_node, within) if of_node > 1 else 0.0
        if kind == "all-reduce":
            outer = min(2 * ring(size / of_node, nodes, across), tree(size / of_node, nodes, across))
        else:
            outer = ring(size / of_node, nodes, across)
        return min(long_ring, inner + outer)


def ring(size: float, ranks: float, link: Link) -> float:
    """Return the seconds of an all-gather or a reduce-scatter around a ring; an all-reduce takes both."""
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * size * link.beta


def tree(size: float, ranks: float, link: Link) -> float:
    """Return the seconds of an all-reduce up and down a double binary tree."""
    return 2 * math.log2(ranks) * link.alpha + 2 * size * link.beta


def switched(size: float, ranks: float, link: Link, *, reduced: bool) -> float:
    """Return the seconds of a collective whose sums and copies switches make (NVLS)."""
    share = (ranks + 1) / ranks if reduced else (ranks - 1) / ranks
    return 2 * link.alpha + share * size * link.beta


def _reached(places: float, experts: int) -> float:
    """Return how many places a token goes to on average, if each of its experts may be in any of them."""
    return places * (1 - (1 - 1 / places) ** experts)


def _all_to_all(size: float, ranks: int, of_node: float, within: Link, across: Link, copies: float) -> float:
    """Return the seconds of an all-to-all. `copies`: share of what it sends that goes to other nodes."""
    nodes = ranks / of_node
    inside = (of_node - 1) / ranks * size * within.beta + (of_node - 1) * within.alpha
    outside = copies * (ranks - of_node) / ranks * size * across.beta + (nodes - 1) * across.alpha
    return max(inside, outside)


def exposed(message: float, window: float) -> float:
    """Return the seconds by which a message makes a computation of `window` seconds longer that runs meanwhile."""
    return max(0.0, message - window) + CONTENTION * min(message, window)


def axis_of(message: Message, parallel: ParallelConfig) -> str:
    """Return the axis of a message within a layer: "tensor", "context" or "expert"."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    first, others = message.ranks[0], message.ranks[1:]
    experts = parallel.expert_model_parallel_size > 1
    if all(rank // tensor == first // tensor for rank in others):
        return "expert" if experts and message.kind == "all-to-all" else "tensor"
    sequence = tensor * context
    on_ring = all(rank // sequence == first // sequence and (rank - first) % tensor == 0 for rank in others)
    if (
        context > 1
        and on_ring
        and not (experts and message.kind == "all-to-all" and "a2a" not in parallel.cp_comm_type)
    ):
        return "context"
    return "expert" if experts else "context"
