"""Check of the options of the search for silent corruption, with those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.run import TaskConfig


def corruption_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    corruption, synchronization = config.corruption, config.synchronization
    hashes = "--check-weight-hash-across-dp-replicas-interval"
    if not corruption.finds_right_steps:
        yield from needs(corruption, "on_corruption", f"{hashes} or --rerun-on-replica-interval")
    if not corruption.is_watched:
        return
    if corruption.on_corruption == "go-back" and (config.checkpoint.save is None or config.checkpoint.resume != "auto"):
        yield "--on-corruption go-back needs --save and --resume auto: the run continues from its checkpoints"
    if corruption.check_weight_hash_across_dp_replicas_interval is not None and (
        synchronization.has_replicas or synchronization.has_servers
    ):
        yield f"{hashes}: with local updates or parameter servers, replicas have different weights. Drop one of the two"
    if corruption.rerun_on_replica_interval is not None:
        yield from _rerun_problems(config, world_size)
    if corruption.check_gradient_sync_interval is not None:
        flag = "--check-gradient-sync-interval"
        if world_size == 1:
            yield f"{flag} compares the gradients of ranks, and there is only one: leave it out"
        if config.recovery.survivors_finish_step:
            yield f"{flag} does not go with --survivors-finish-step, which adds what ranks have kept to the sums"
        yield from _sum_problems(config, flag)


def _rerun_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield the lines on steps that a second replica computes, too."""
    flag, parallel = "--rerun-on-replica-interval", config.parallel
    one = parallel.ranks_needed
    if world_size < 2 * one:
        yield (
            f"{flag} needs two replicas of the network: one takes {one} rank{'s' * (one > 1)}, and there "
            f"{'is' if world_size == 1 else 'are'} {world_size}"
        )
    yield from _sum_problems(config, flag)
    if parallel.data_parallel_shares is not None:
        yield f"{flag} needs replicas with equal shares: leave out --data-parallel-shares"


def _sum_problems(config: TaskConfig, flag: str) -> Iterator[str]:
    """Yield the lines on sums of gradients that cannot be looked at."""
    if not config.synchronization.is_plain:
        yield f"{flag} needs data parallelism that sums all gradients in each step: leave out what communicates less"
    if config.offload.optimizer_cpu_offload or config.offload.parameter_offload:
        yield f"{flag} does not go with an optimizer or weights on the host: gradients leave the device at once"
