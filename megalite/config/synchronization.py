"""Options of data parallelism that communicates less: compressed gradients, local updates, parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megalite.config.fields import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    changed,
    given,
    needs,
)

if TYPE_CHECKING:
    from megalite.config.run import TaskConfig

Compression = Literal[
    "none",
    "fp16",
    "bf16",
    "int8",
    "fp8",
    "topk",
    "randomk",
    "threshold",
    "signsgd",
    "onebit-adam",
    "powersgd",
    "dgc",
    "count-sketch",
]
LocalUpdate = Literal["none", "local-sgd", "post-local-sgd", "easgd", "fedavg", "diloco"]
_SPARSE = ("topk", "randomk", "threshold", "dgc", "count-sketch")
_OF_ADAM = ("onebit-adam",)
"""Compressions that are part of an optimizer: they compress its momentum."""


@dataclass(frozen=True)
class SynchronizationConfig:
    """Options of data parallelism that communicates less than a sum of all gradients in each step."""

    gradient_compression: tuple[Compression, ...] = ("none",)
    """Compression of the gradients that data-parallel ranks exchange. With sites or local-update, one value is for the
    exchange between sites or replicas, and two are for the one within them and the one between them."""
    compression_ratio: ShareAboveZero = 0.01
    """Share of the gradient's elements that topk, randomk, threshold, dgc and count-sketch send."""
    compression_rank: PositiveInt = 4
    """Rank of powersgd's approximations."""
    compression_warmup_iters: NonNegativeInt = 0
    """Steps before gradients are compressed; dgc raises its sparsity during them."""
    error_feedback: bool = True
    """Add what a compression has left out to the next gradient."""
    all_reduce_algorithm: Literal["backend", "ring", "tree", "hierarchical"] = "backend"
    """Algorithm of the sum of gradients: the backend's own, or by messages between ranks; hierarchical sums within
    sites (unset: within nodes), then between them."""
    sites: PositiveInt = 1
    """Groups of data-parallel ranks with a slow network between them."""
    local_update: LocalUpdate = "none"
    """Method by which replicas update their own weights, and exchange them less often than each step."""
    local_update_period: PositiveInt = 1
    """Steps between two exchanges of the replicas' weights."""
    local_update_warmup_iters: NonNegativeInt = 0
    """Steps of plain data parallelism before the first local one."""
    local_update_fragments: PositiveInt = 1
    """Parts of the network that diloco exchanges in turn, at different steps of a period (Streaming DiLoCo)."""
    local_update_delay: NonNegativeInt = 0
    """Steps that run while diloco's exchange is under way."""
    local_update_mixing: Share = 0.0
    """Share of a replica's own weights that it keeps when an exchange ends."""
    outer_optimizer: Literal["sgd", "nesterov"] | None = None
    """Optimizer of the exchanged weights; unset: nesterov for diloco, else sgd."""
    outer_lr: PositiveFloat | None = None
    """Learning rate of the outer optimizer; unset: 0.7 for diloco, else 1, which averages."""
    outer_momentum: ShareBelowOne = 0.9
    """Momentum of the outer optimizer nesterov."""
    elastic_rate: Annotated[float, Range("above 0, at most 1", lambda value: 0 < value <= 1)] | None = None
    """Share of the distance to the center by which easgd moves a replica; unset: 0.9 / number of replicas."""
    asynchronous: Literal["none", "parameter-server"] = "none"
    """Way in which workers do not wait for each other in each step."""
    num_servers: PositiveInt = 1
    """Ranks, the last ones, that keep the weights for asynchronous parameter-server."""
    max_staleness: NonNegativeInt = 0
    """Updates by which the weights of a worker may be behind those of the slowest one's step."""
    backup_workers: NonNegativeInt = 0
    """Workers whose gradients a step does not wait for."""
    drop_stragglers_after: PositiveFloat | None = None
    """Time after which a step does not wait for late workers, in units of the median step's."""
