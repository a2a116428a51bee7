"""Relations of the options of --asynchronous parameter-server to other options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config.run import TaskConfig

_GIVEN = "--asynchronous parameter-server"


def server_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
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
        yield f"{_GIVEN}: a worker is one rank: drop --tp, --pp, --cp and --ep"
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
    yield from (f"{_GIVEN}: drop {name}" for name, is_given in others.items() if is_given)
