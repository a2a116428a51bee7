"""Options of data parallelism that communicates less: compressed gradients, local updates, parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.config.fields import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    ShareAboveZero,
    ShareBelowOne,
)

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
Algorithm = Literal["backend", "ring", "tree", "hierarchical"]
LocalUpdate = Literal["none", "local-sgd", "post-local-sgd", "easgd", "fedavg", "diloco"]


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
    all_reduce_algorithm: Algorithm = "backend"
    """Algorithm of the sum of gradients: the backend's own, or by messages around a ring or a binary tree of ranks;
    hierarchical sums within sites, then between them."""
    sites: PositiveInt = 1
    """Groups of data-parallel ranks with a slow network between them. Without local-update they imply
    all-reduce-algorithm hierarchical; with hierarchical and no sites, each node is one."""
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
    local_update_mixing: ShareBelowOne = 0.0
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
    """Steps by which a worker may be ahead of the slowest one: 0 makes one update of a step's gradients; otherwise each
    worker's gradient is an update of its own."""
    backup_workers: NonNegativeInt = 0
    """Workers whose gradients a step does not wait for; late ones are dropped."""
    drop_stragglers_after: PositiveFloat | None = None
    """Time for which a step waits for late ranks after the first one, in units of the median time of its gradients:
    they leave out the micro-batches that they have not begun by then. With parameter servers, for late workers."""

    @property
    def is_plain(self) -> bool:
        """True if in each step the backend sums all gradients over all ranks at once."""
        sums = self.all_reduce_algorithm == "backend" and self.sites == 1 and not self.compresses
        return sums and not self.has_replicas and not self.has_servers and not self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """True if late data-parallel ranks leave out micro-batches of a step."""
        return self.drop_stragglers_after is not None and not self.has_servers

    @property
    def compresses(self) -> bool:
        return any(name != "none" for name in self.gradient_compression)

    @property
    def has_replicas(self) -> bool:
        """True if replicas have weights of their own."""
        return self.local_update != "none"

    @property
    def has_servers(self) -> bool:
        """True if the last ranks are parameter servers."""
        return self.asynchronous != "none"

    def workers(self, world_size: int) -> int:
        """Return the number of ranks that compute gradients."""
        return max(world_size - self.num_servers, 1) if self.has_servers else world_size

    @property
    def is_hierarchical(self) -> bool:
        """True if each step sums gradients within sites, then between them: what sites mean without local updates."""
        return self.sites > 1 and not self.has_replicas

    @property
    def compression_within(self) -> Compression:
        """Compression of what data-parallel ranks exchange: within a site or a replica, if there are any."""
        levels = self.sites > 1 or self.has_replicas
        return "none" if levels and len(self.gradient_compression) == 1 else self.gradient_compression[0]

    @property
    def compression_between(self) -> Compression:
        """Compression of what sites or replicas exchange."""
        return self.gradient_compression[-1] if self.sites > 1 or self.has_replicas else "none"

    @property
    def outer_is_nesterov(self) -> bool:
        """True if the outer optimizer has Nesterov's momentum."""
        return (self.outer_optimizer or ("nesterov" if self.local_update == "diloco" else "sgd")) == "nesterov"

    def instances(self, of_optimizer: int) -> int:
        """Return the number of instances of hybrid sharding: the sites, if these have the same weights."""
        return self.sites if self.is_hierarchical else of_optimizer

    def replicas(self, data_parallel_size: int) -> int:
        """Return the number of replicas with weights of their own."""
        if not self.has_replicas:
            return 1
        return self.sites if self.sites > 1 else data_parallel_size
