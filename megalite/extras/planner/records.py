"""Records of what a rank does: kernel launches, messages, and the bytes that it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OperationKind = Literal["product", "attention", "elementwise"]
HostKind = Literal["to host", "to device", "on the host"]
MessageKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "receive"]


class Operation(NamedTuple):
    """A kernel launch."""

    name: str
    """Name of torch's operator or of megalite's kernel, for example "mm"."""
    kind: OperationKind
    shape: tuple[int, int, int, int]
    """Sizes: batch, M, N and K of a product; batch * heads, queries, keys and head width of attention; else zeros."""
    flops: int
    """Floating-point operations, of products and attention only. Causal attention counts half of the score matrix."""
    bytes: int
    """Bytes that are read and written."""
    dtype: str
    """Dtype of the first floating-point input, for example "bfloat16"."""


class Message(NamedTuple):
    """A collective, or a message to or from one rank."""

    kind: MessageKind
    ranks: tuple[int, ...]
    """The ranks of the group, or the sender and the receiver."""
    bytes: int
    """Bytes of the whole tensor: the input of an all-reduce, a reduce-scatter or an all-to-all, the result of an
    all-gather, and what is sent or received."""


@dataclass(frozen=True)
class Work:
    """Work of one pass: each launch and each message, with how often it occurs."""

    operations: Counter[Operation] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    host: Counter[HostKind] = field(default_factory=Counter)
    """Bytes that are copied in each direction, and that operators on the host read and write."""

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.messages + other.messages, self.host + other.host)

    def __sub__(self, other: Work) -> Work:
        """Return what `other` lacks of this work."""
        return Work(self.operations - other.operations, self.messages - other.messages, self.host - other.host)

    def __mul__(self, times: int) -> Work:
        return Work(
            Counter({each: count * times for each, count in self.operations.items()}),
            Counter({each: count * times for each, count in self.messages.items()}),
            Counter({each: size * times for each, size in self.host.items()}),
        )

    @property
    def flops(self) -> int:
        return sum(each.flops * count for each, count in self.operations.items())

    @property
    def launches(self) -> int:
        return self.operations.total()


@dataclass(frozen=True)
class Update:
    """Work of the optimizer on a part in a step if one rank has all of it: norms, clipping and update."""

    launches: int = 0
    bytes: int = 0
    """Bytes that kernels other than products read and write."""
    products: Counter[Operation] = field(default_factory=Counter)
    """Products of rules that see whole matrices. The ranks of a shard group have different matrices."""
    messages: Counter[Message] = field(default_factory=Counter)
    synchronizations: int = 0
    """Times that the host waits for the device, to know the norm."""

    @staticmethod
    def of(work: Work, synchronizations: int) -> Update:
        """Return the sum of recorded work."""
        products = Counter({each: count for each, count in work.operations.items() if each.kind == "product"})
        others = work.operations - products
        return Update(
            work.launches,
            sum(each.bytes * count for each, count in others.items()),
            products,
            work.messages,
            synchronizations,
        )

    def __sub__(self, other: Update) -> Update:
        """Return what `other` lacks of this update."""
        return Update(
            max(self.launches - other.launches, 0),
            max(self.bytes - other.bytes, 0),
            self.products - other.products,
            self.messages - other.messages,
            max(self.synchronizations - other.synchronizations, 0),
        )


@dataclass(frozen=True)
class PartRecord:
    """Record of what a part of a stage (the embedding, a layer, the head) does with a micro-batch, and holds."""

    forward: Work
    backward: Work
    """Work of backward, that of a recomputation included."""
    kept: int
    """Bytes that forward keeps for backward."""
    forward_peak: int
    """Most bytes during forward beyond those that were there before, the kept ones included."""
    backward_peak: int
    """Most bytes during backward beyond those that were there before it, which include the kept ones."""
    parameters: int
    """Elements of this rank that all data-parallel ranks have."""
    expert_parameters: int = 0
    """Elements of this rank that only the ranks of the same experts have."""
    synchronizations: int = 0
    """Times that the host waits for the device in forward and backward."""
    update: Update = field(default_factory=Update)
    frozen: tuple[int, int] = (0, 0)
    """Elements among `parameters` and `expert_parameters` that are not trained."""
    rounded: tuple[int, int] = (0, 0)
    """Elements among them that products read as codes of few bits."""
    codes: int = 0
    """Bytes of these codes and their scales, which no other figure has."""
    rounding: Work = field(default_factory=Work)
    """Work of making them of all values."""

    @property
    def elements(self) -> tuple[int, int]:
        """Elements of both kinds: `parameters` and `expert_parameters`."""
        return self.parameters, self.expert_parameters

    @property
    def trained(self) -> tuple[int, int]:
        """Elements of both kinds that are trained."""
        (dense, experts), (frozen, frozen_experts) = self.elements, self.frozen
        return dense - frozen, experts - frozen_experts

    def gathered(self, item: float, *, as_codes: bool) -> tuple[float, float]:
        """Return the bytes of both kinds of elements if each has `item` bytes, or one that is rounded has a code."""
        dense, experts = (
            item * elements - (item - 1) * rounded * as_codes
            for elements, rounded in zip(self.elements, self.rounded, strict=True)
        )
        return dense, experts
