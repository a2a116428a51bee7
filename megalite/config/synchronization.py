"""Options of data parallelism that communicates less: compressed gradients, local updates, parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from megalite.config.fields import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    needs,
)
from megalite.config.parameter_server import server_problems
from megalite.errors import ConfigurationError

if TYPE_CHECKING:
    from megalite.config.run import TaskConfig

AnyConfig = TypeVar("AnyConfig", bound="TaskConfig")

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
_SPARSE = ("topk", "randomk", "threshold", "dgc", "count-sketch")
_AVERAGES = ("local-sgd", "post-local-sgd", "fedavg", "diloco")


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
    """Steps by which a worker may be ahead of the slowest one: 0 makes one update of a step's gradients; otherwise each
    worker's gradient is an update of its own."""
    backup_workers: NonNegativeInt = 0
    """Workers whose gradients a step does not wait for; late ones are dropped."""
    drop_stragglers_after: PositiveFloat | None = None
    """Time for which a step waits for late workers after the first one, in units of the median time of a gradient."""

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


def with_sites(config: AnyConfig, world_size: int, node_ranks: int | None) -> AnyConfig:
    """Return the configuration with a site per node, if it asks for sums within nodes, then between them.

    If all data-parallel ranks are on one node, there is nothing between nodes, and the backend sums.

    Args:
        config: the configuration.
        world_size: the number of ranks.
        node_ranks: the number of ranks on this rank's node; None: it is not known.

    Raises:
        ConfigurationError: the nodes do not have equal numbers of data-parallel ranks.
    """
    chosen, parallel = config.synchronization, config.parallel
    by_node = chosen.all_reduce_algorithm == "hierarchical" and chosen.sites == 1 and not chosen.has_replicas
    of_stage, uneven = divmod(world_size, parallel.pipeline_model_parallel_size)
    node_ranks = 1 if world_size == 1 else node_ranks
    if not by_node or uneven or node_ranks is None:  # the validation tells why not
        return config
    widths = (parallel.model_parallel_size, parallel.expert_tensor_model_pipeline_parallel_size)
    if node_ranks % of_stage == 0:
        sites = 1
    elif of_stage % node_ranks == 0 and all(world_size // width % (of_stage // node_ranks) == 0 for width in widths):
        sites = of_stage // node_ranks
    else:
        raise ConfigurationError(
            f"--all-reduce-algorithm hierarchical: {world_size} ranks in nodes of {node_ranks} do not have equal "
            "numbers of data-parallel ranks: give --sites"
        )
    algorithm: Algorithm = "hierarchical" if sites > 1 else "backend"
    return replace(config, synchronization=replace(chosen, sites=sites, all_reduce_algorithm=algorithm))


def synchronization_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation of these options that does not hold."""
    chosen = config.synchronization
    if chosen == SynchronizationConfig():
        return
    yield from _compression_problems(config)
    yield from _local_update_problems(config)
    if chosen.has_servers:
        yield from server_problems(config, world_size)
        return
    needed = "--asynchronous parameter-server"
    yield from needs(chosen, "num_servers max_staleness backup_workers drop_stragglers_after", needed)
    yield from _site_problems(config, world_size)
    yield from _algorithm_problems(config)


def _compression_problems(config: TaskConfig) -> Iterator[str]:
    chosen, parallel, optimizer = config.synchronization, config.parallel, config.optimizer
    names = set(chosen.gradient_compression)
    if len(chosen.gradient_compression) > 2 or not chosen.gradient_compression:
        yield "--gradient-compression: give one value, or two: within sites or replicas, and between them"
    elif len(chosen.gradient_compression) == 2 and chosen.sites == 1 and not chosen.has_replicas:
        yield "--gradient-compression: two values need --sites or --local-update"
    if not names & set(_SPARSE):
        yield from needs(
            chosen, "compression_ratio", f"--gradient-compression {', '.join(_SPARSE[:-1])} or {_SPARSE[-1]}"
        )
    if "powersgd" not in names:
        yield from needs(chosen, "compression_rank", "--gradient-compression powersgd")
    if not chosen.compresses:
        yield from needs(chosen, "compression_warmup_iters error_feedback", "--gradient-compression")
        return
    given_names = f"--gradient-compression {' '.join(chosen.gradient_compression)}"
    if parallel.grad_reduce_in_bf16 or optimizer.main_grads_dtype == "bf16":
        yield f"{given_names}: what it leaves out is kept in fp32; drop --grad-reduce-in-bf16 and --main-grads-dtype"
    if parallel.num_distributed_optimizer_instances > 1:
        yield f"{given_names}: give --sites instead of --num-distributed-optimizer-instances"
    if parallel.zero_stage >= 2 and chosen.compression_within != "none":
        yield (
            f"{given_names} under --data-parallel-sharding-strategy {parallel.data_parallel_sharding_strategy}: "
            "gradients are reduced after every micro-batch there; optim, or no_shard, reduces those of a step at once"
        )
    if chosen.compression_between in ("powersgd", "dgc", "onebit-adam"):
        yield f"{given_names}: between sites or replicas, give another compression than {chosen.compression_between}"
    if chosen.has_replicas and chosen.local_update_warmup_iters and chosen.compression_within != "none":
        yield f"{given_names} within replicas: drop --local-update-warmup-iters, whose steps sum over all replicas"
    if chosen.is_hierarchical and chosen.compression_within == "powersgd":
        yield f"{given_names}: powersgd sums over all ranks at once; within --sites, give another compression"
    if "dgc" in names:
        if optimizer.optimizer != "sgd":
            yield f"--gradient-compression dgc corrects the momentum of --optimizer sgd, not of {optimizer.optimizer}"
        if not chosen.error_feedback:
            yield "--gradient-compression dgc: drop --no-error-feedback, without which it is topk"
    if "onebit-adam" in names:
        if optimizer.optimizer != "adam" or parallel.zero_stage:
            yield "--gradient-compression onebit-adam compresses the momentum of --optimizer adam that is not sharded"
        if optimizer.clip_grad:
            yield "--gradient-compression onebit-adam needs --clip-grad 0: it has no gradient to clip"
        if not chosen.compression_warmup_iters or not chosen.error_feedback:
            yield (
                "--gradient-compression onebit-adam needs --compression-warmup-iters, at whose end Adam's second "
                "moment is frozen, and error feedback"
            )


def _local_update_problems(config: TaskConfig) -> Iterator[str]:
    chosen, parallel, method = config.synchronization, config.parallel, config.synchronization.local_update
    if not chosen.has_replicas:
        yield from needs(chosen, "local_update_* outer_* elastic_rate", "--local-update")
        return
    if method not in _AVERAGES:
        yield from needs(chosen, "outer_*", f"--local-update {', '.join(_AVERAGES[:-1])} or {_AVERAGES[-1]}")
    if method != "easgd":
        yield from needs(chosen, "elastic_rate", "--local-update easgd")
    if method != "diloco":
        yield from needs(
            chosen, "local_update_fragments local_update_delay local_update_mixing", "--local-update diloco"
        )
    if chosen.outer_optimizer == "sgd" or (chosen.outer_optimizer is None and method != "diloco"):
        yield from needs(chosen, "outer_momentum", "--outer-optimizer nesterov")
    period = chosen.local_update_period
    if method == "post-local-sgd" and not chosen.local_update_warmup_iters:
        yield "--local-update post-local-sgd needs --local-update-warmup-iters, its steps of plain data parallelism"
    if chosen.local_update_fragments > period:
        yield f"--local-update-fragments {chosen.local_update_fragments} is more than --local-update-period {period}"
    if chosen.local_update_delay >= period:
        yield f"--local-update-delay {chosen.local_update_delay} must be less than --local-update-period {period}"
    if parallel.num_distributed_optimizer_instances > 1:
        yield "--local-update: give the number of replicas by --sites, not --num-distributed-optimizer-instances"
    if config.optimizer.store_param_remainders:
        yield f"--local-update {method} needs whole master weights: drop --store-param-remainders"
    interval = config.checkpoint.save_interval
    if (
        config.checkpoint.save is not None
        and not config.checkpoint.save_optim
        and interval is not None
        and interval % period
    ):
        yield (
            f"--no-save-optim with --local-update-period {period} would lose the replicas' own weights: "
            f"--save-interval {interval} must be a multiple of the period"
        )
    if config.training.moe_record_routing is not None:
        yield "--moe-record-routing needs replicas with the same weights: drop --local-update"


def _site_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    chosen, parallel = config.synchronization, config.parallel
    copies = parallel.data_parallel_size(world_size)
    of_experts = world_size // parallel.expert_tensor_model_pipeline_parallel_size
    count = chosen.replicas(copies) if chosen.has_replicas else chosen.sites
    if chosen.has_replicas and count == 1:
        yield f"--local-update {chosen.local_update} needs two data-parallel ranks: {world_size} ranks have one"
    what = f"--sites {chosen.sites}" if chosen.sites > 1 else f"--local-update with {count} replicas"
    for size, kind in ((copies, "data-parallel ranks"), (of_experts, "data-parallel ranks of experts")):
        if count > 1 and size % count:
            yield f"{what} does not divide {size} {kind}"
            return
    if chosen.is_hierarchical:
        if parallel.num_distributed_optimizer_instances > 1:
            yield "--sites are instances of hybrid sharding: drop --num-distributed-optimizer-instances"
        if parallel.zero_stage and count == copies * parallel.context_parallel_size:
            yield f"--sites {count}: with one rank in each nothing is sharded"


def _algorithm_problems(config: TaskConfig) -> Iterator[str]:
    chosen, strategy = config.synchronization, config.parallel.data_parallel_sharding_strategy
    what = f"--all-reduce-algorithm {chosen.all_reduce_algorithm}"
    if chosen.all_reduce_algorithm == "hierarchical":
        if chosen.has_replicas:
            yield f"{what} sums over sites in each step, --local-update {chosen.local_update} does not: drop one"
        elif chosen.sites == 1:
            yield f"{what} needs --sites: the launcher does not tell the nodes"
    elif chosen.all_reduce_algorithm != "backend":
        if chosen.compression_within != "none":
            yield f"{what} sums gradients as they are: drop --gradient-compression {chosen.compression_within}"
        if chosen.is_hierarchical:
            yield f"{what}: --sites {chosen.sites} needs hierarchical"
        if chosen.local_update_warmup_iters:
            yield f"{what} sums within replicas: drop --local-update-warmup-iters, whose steps sum over all replicas"
        if chosen.all_reduce_algorithm == "tree" and config.parallel.zero_stage >= 2:
            yield f"{what} gives all ranks the whole sum: not under --data-parallel-sharding-strategy {strategy}"
