"""Validation of a run that goes on with fewer nodes."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.idle_flags import stages_per_rank
from megalite.config.run import RunConfig
from megalite.config.synchronization import SynchronizationConfig


def elastic_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each option that does not fit a number of nodes that changes."""
    if not config.recovery.elastic:
        return
    parallel, instances = config.parallel, config.parallel.num_distributed_optimizer_instances
    if parallel.data_parallel_shares is not None:
        yield "--elastic divides micro-batches itself, for each number of ranks: leave out --data-parallel-shares"
    if config.synchronization != SynchronizationConfig():
        yield "--elastic needs data parallelism that sums all gradients in each step: drop what communicates less"
    if instances > 1:
        yield (
            f"--elastic: --num-distributed-optimizer-instances {instances} might not divide the data-parallel ranks "
            "that are left. Drop one of the two"
        )
    if parallel.device_classes is not None:
        yield "--elastic: --device-classes describes nodes of one number. Drop one of the two"
    if config.corruption.rerun_on_replica_interval:
        yield "--elastic: --rerun-on-replica-interval needs replicas with equal shares. Drop one of the two"
    if config.training.moe_record_routing is not None:
        yield "--elastic: --moe-record-routing records no empty slots, which experts may need. Drop one of the two"
    if parallel.overlap_grad_reduce and parallel.zero_stage < 2 and stages_per_rank(config) > 1:
        yield (
            "--elastic: data-parallel ranks with one micro-batch more than others would reduce the gradients of "
            "several stages in another order: leave out --overlap-grad-reduce, or have one stage on each rank"
        )
