"""Validation of a run whose survivors finish their step when a rank fails."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.run import RunConfig
from megalite.config.synchronization import SynchronizationConfig

_FLAG = "--survivors-finish-step"


def survivor_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each option with which ranks cannot keep the gradients of a step."""
    if not config.recovery.survivors_finish_step:
        return
    parallel, interval = config.parallel, config.recovery.memory_checkpoint_interval
    if interval != 1:
        yield (
            f"{_FLAG} needs --memory-checkpoint-interval 1: within a step, ranks start again from the state before it"
        )
    if parallel.zero_stage >= 2:
        yield (
            f"{_FLAG}: ZeRO {parallel.zero_stage} reduces gradients in each micro-batch, so that ranks have none of "
            "their own to keep: use ZeRO 0 or 1, or drop the flag"
        )
    elif parallel.overlap_grad_reduce:
        yield (
            f"{_FLAG}: with --overlap-grad-reduce, reductions begin before all ranks have their gradients: drop "
            "one of the two"
        )
    if config.model.num_experts is not None:
        yield f"{_FLAG}: data-parallel ranks meet in each layer of experts, so that none finishes alone: drop the flag"
    if parallel.data_parallel_shares is not None:
        yield f"{_FLAG} divides the rest of a step itself: leave out --data-parallel-shares"
    if config.synchronization != SynchronizationConfig():
        yield f"{_FLAG} needs data parallelism that sums all gradients in each step: drop what communicates less"
    if config.corruption.rerun_on_replica_interval:
        yield f"{_FLAG}: --rerun-on-replica-interval computes steps in another way. Drop one of the two"
