"""Relations between the options of data parallelism that communicates less, and the sites that nodes are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from megalite.config.fields import flag_of, needs
from megalite.config.synchronization import Algorithm
from megalite.errors import ConfigurationError

if TYPE_CHECKING:
    from megalite.config.run import TaskConfig

AnyConfig = TypeVar("AnyConfig", bound="TaskConfig")
_SERVERS = "--asynchronous parameter-server"
_SPARSE = ("topk", "randomk", "threshold", "dgc", "count-sketch")
_AVERAGES = ("local-sgd", "post-local-sgd", "fedavg", "diloco")


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
    yield from _compression_problems(config)
    yield from _local_update_problems(config)
    if chosen.has_servers:
        yield from _server_problems(config, world_size)
        return
    yield from needs(chosen, "num_servers max_staleness backup_workers", _SERVERS)
    yield from _site_problems(config, world_size)
    yield from _peer_problems(config, world_size)
    yield from _algorithm_problems(config)
    if chosen.leaves_out:
        yield from _late_problems(config, world_size)


def _compression_problems(config: TaskConfig) -> Iterator[str]:
    """Yield what is wrong with the compression of gradients."""
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
    model = getattr(config, "model", None)
    if "powersgd" not in names:
        yield from needs(chosen, "compression_rank", "--gradient-compression powersgd")
    elif model is not None and chosen.compression_rank > model.hidden_size:
        yield f"--compression-rank {chosen.compression_rank} is more than --hidden-size {model.hidden_size}"
    if not chosen.compresses:
        yield from needs(chosen, "compression_warmup_iters error_feedback", "--gradient-compression")
        return
    given_names = f"--gradient-compression {' '.join(chosen.gradient_compression)}"
    steps = config.training.train_iters
    if steps is not None and chosen.compression_warmup_iters >= steps and "dgc" not in names:
        yield f"--compression-warmup-iters {chosen.compression_warmup_iters}: the run ends after step {steps}"
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
        if optimizer.narrow:
            narrow = ", ".join(map(flag_of, optimizer.narrow))
            yield f"--gradient-compression onebit-adam keeps its moments in fp32: drop {narrow}"
        if chosen.is_hierarchical:
            yield "--gradient-compression onebit-adam sums momenta over all ranks at once: drop --sites"
        if not chosen.compression_warmup_iters or not chosen.error_feedback:
            yield (
                "--gradient-compression onebit-adam needs --compression-warmup-iters, at whose end Adam's second "
                "moment is frozen, and error feedback"
            )


def _local_update_problems(config: TaskConfig) -> Iterator[str]:
    """Yield what is wrong with local updates."""
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
    period, steps = chosen.local_update_period, config.training.train_iters
    first = chosen.local_update_warmup_iters + period // chosen.local_update_fragments + chosen.local_update_delay
    if steps is not None and first > steps:
        yield f"--local-update-period {period}: the first exchange ends after step {first}, the run after step {steps}"
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
    if config.checkpoint.save is not None and not config.checkpoint.save_optim:
        yield "--no-save-optim with --local-update would lose what replicas have not exchanged: save the state, too"
    if config.training.moe_record_routing is not None:
        yield "--moe-record-routing needs replicas with the same weights: drop --local-update"
    model = getattr(config, "model", None)
    if model is not None and model.moe_router_enable_expert_bias:
        yield "--moe-router-enable-expert-bias: replicas do not exchange biases: drop --local-update"
    if model is not None and model.balances_by_quantiles:
        quantiles = "--moe-router-load-balancing-type quantile_balancing"
        yield f"{quantiles}: replicas do not exchange offsets: drop --local-update"
    if (
        model is not None
        and chosen.local_update_warmup_iters
        and "global_aux_loss" in model.moe_router_load_balancing_type
    ):
        yield "--local-update-warmup-iters: global_aux_loss is of a replica, not of all data: give another loss"


def _site_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the division of ranks into sites or replicas."""
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


def _peer_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield that what a group of ranks would compress within itself has only one rank."""
    chosen, parallel, within = config.synchronization, config.parallel, config.synchronization.compression_within
    copies = parallel.data_parallel_size(world_size)
    groups = chosen.replicas(copies) if chosen.has_replicas else chosen.sites
    if within == "none" or copies % groups:
        return
    what = f"--gradient-compression {' '.join(chosen.gradient_compression)}"
    where = {(True, False): "replica", (False, True): "site"}.get((chosen.has_replicas, chosen.sites > 1), "run")
    if copies * parallel.context_parallel_size == groups:
        yield f"{what}: {within} changes nothing, since a {where} has one data-parallel rank"
    of_experts = world_size // parallel.expert_tensor_model_pipeline_parallel_size
    model = getattr(config, "model", None)
    if within in ("dgc", "onebit-adam") and model is not None and model.num_experts and of_experts == groups:
        yield f"{what}: {within} needs several ranks with the same experts: lower --expert-model-parallel-size"


def _algorithm_problems(config: TaskConfig) -> Iterator[str]:
    """Yield what is wrong with --all-reduce-algorithm."""
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


def _late_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield what is wrong with late ranks that leave out micro-batches: each must be able to be late alone."""
    chosen, parallel = config.synchronization, config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    what, copies = f"--drop-stragglers-after {chosen.drop_stragglers_after}", parallel.data_parallel_size(world_size)
    if copies == 1:
        yield f"{what} needs two data-parallel ranks, of which one may be late: {world_size} ranks have one"
    if parallel.zero_stage >= 2:
        yield (
            f"{what}: --data-parallel-sharding-strategy {strategy} makes all ranks meet in every micro-batch, so "
            "nobody is late alone: give optim or no_shard"
        )
    of_experts = parallel.expert_tensor_model_pipeline_parallel_size // parallel.pipeline_model_parallel_size
    within = parallel.model_parallel_size // parallel.pipeline_model_parallel_size
    if within % of_experts:
        yield (
            f"{what}: the {of_experts} ranks of --expert-model-parallel-size x --expert-tensor-parallel-size make "
            "data-parallel ranks meet in every layer with experts, so nobody is late alone: let them divide the "
            f"{within} of --tp x --cp"
        )
    others = {
        "--gradient-compression": chosen.compresses,
        "--local-update": chosen.has_replicas,
        "--sites": chosen.sites > 1,
        "--all-reduce-algorithm": chosen.all_reduce_algorithm != "backend",
        "--moe-record-routing: a micro-batch that is left out has no routing": config.training.moe_record_routing,
    }
    yield from (f"{what}: drop {name}" for name, is_given in others.items() if is_given)


def _server_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation that does not hold in a run with parameter servers."""
    chosen, parallel, training = config.synchronization, config.parallel, config.training
    servers, workers = chosen.num_servers, world_size - chosen.num_servers
    if servers >= world_size:
        yield f"--num-servers {servers} of {world_size} ranks leaves no worker"
        return
    if chosen.max_staleness and (chosen.backup_workers or chosen.drop_stragglers_after is not None):
        yield "--backup-workers and --drop-stragglers-after leave late gradients out of a step: drop --max-staleness"
    if chosen.backup_workers >= workers:
        yield f"--backup-workers {chosen.backup_workers} of {workers} workers leaves none whose gradients are applied"
    if parallel.model_parallel_size > 1 or parallel.expert_model_parallel_size > 1:
        yield f"{_SERVERS}: a worker is one rank: drop --tp, --pp, --cp and --ep"
    unsharded, logging = parallel.zero_stage == 0, config.logging
    others = {
        "--gradient-compression": chosen.compresses,
        "--local-update": chosen.has_replicas,
        "--sites": chosen.sites > 1,
        "--all-reduce-algorithm": chosen.all_reduce_algorithm != "backend",
        "--use-distributed-optimizer or --data-parallel-sharding-strategy: servers shard the optimizer": not unsharded,
        "--overlap-grad-reduce: a worker sends its gradients at once": parallel.overlap_grad_reduce,
        "--store-param-remainders": config.optimizer.store_param_remainders,
        "--async-save": config.checkpoint.async_save,
        "--fp16: all workers would share its loss scale": training.fp16,
        "--moe-record-routing": training.moe_record_routing is not None,
        "--profile-pipeline": config.profiling.profile_pipeline is not None,
        "--log-params-norm: no rank has all masters": logging.log_params_norm,
        "--log-num-zeros-in-grad: no rank has all gradients": logging.log_num_zeros_in_grad,
    }
    yield from (f"{_SERVERS}: drop {name}" for name, is_given in others.items() if is_given)
