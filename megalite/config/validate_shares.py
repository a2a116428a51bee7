"""Validation of the data-parallel ranks' shares in the micro-batches of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.parallel import ParallelConfig
from megalite.config.run import TaskConfig
from megalite.config.synchronization import SynchronizationConfig

FLAG = "--data-parallel-shares"
AUTO = "auto"


def given_shares(parallel: ParallelConfig) -> tuple[int, ...] | None:
    """Return the shares of the flag, without their common factor; None for `auto`, or if they are no such numbers."""
    text = parallel.data_parallel_shares or ""
    if not re.fullmatch(r"[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})*", text, re.ASCII):
        return None
    shares = [int(part) for part in text.split(":")]
    return tuple(share // math.gcd(*shares) for share in shares)


def ranks_together(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of consecutive data-parallel ranks that share collectives within each micro-batch.

    Those of experts do, and those that reduce or gather shards of ZeRO 2 and 3 in it. `world_size` is divisible.
    """
    of_copy = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    meet = [parallel.mesh_sizes["expert_parallel_size"] * parallel.mesh_sizes["expert_tensor_parallel_size"]]
    if parallel.zero_stage >= 2:
        of_stage = world_size // parallel.pipeline_model_parallel_size
        meet.append(of_stage // parallel.num_distributed_optimizer_instances)
    # Blocks of ranks that meet may end within a data-parallel rank, which then joins two of them.
    return math.lcm(of_copy, *meet) // of_copy


def batch_unit(parallel: ParallelConfig, world_size: int) -> tuple[int, str]:
    """Return the number of micro-batches of which a step must have a multiple, with its origin in words."""
    shares = given_shares(parallel)
    if shares is not None:
        return sum(shares), f"{sum(shares)}, the sum of {FLAG} {parallel.data_parallel_shares}"
    together = ranks_together(parallel, world_size)
    return together, f"{together} data-parallel ranks that take equal shares"


def share_problems(config: TaskConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each relation of unequal shares that does not hold. The ranks can be divided into groups."""
    parallel, training = config.parallel, config.training
    text, copies = parallel.data_parallel_shares, parallel.data_parallel_size(world_size)
    shares, together = given_shares(parallel), ranks_together(parallel, world_size)
    if text != AUTO and shares is None:
        yield f"{FLAG} {text}: give {AUTO}, or a whole number from 1 on for each data-parallel rank, such as 3:2"
        return
    if copies == 1:
        yield f"{FLAG} {text}: there is one data-parallel rank, which takes all micro-batches. Drop it"
    elif shares is not None and len(shares) != copies:
        yield f"{FLAG} {text} has {len(shares)} shares, and there are {copies} data-parallel ranks: give one for each"
    elif shares is None and together == copies:
        yield (
            f"{FLAG} {AUTO}: all {copies} data-parallel ranks share collectives in each micro-batch, so none can take "
            "fewer. Experts do so, and ZeRO 2 and 3: use ZeRO 0 or 1, or --num-distributed-optimizer-instances"
        )
    elif shares is None and (training.global_batch_size or 0) < 2 * training.micro_batch_size * copies:
        yield (
            f"{FLAG} {AUTO}: a step of --global-batch-size {training.global_batch_size or 'unset'} has fewer than two "
            f"micro-batches for each of {copies} data-parallel ranks: raise it to "
            f"{2 * training.micro_batch_size * copies} or more"
        )
    if text == AUTO and config.checkpoint.save is None:
        yield f"{FLAG} {AUTO}: shares change when the run saves, and it does not. Give --save, or shares in numbers"
    # Of the synchronizations that are not plain, only this one leaves each rank's sum of gradients as it is.
    plain = replace(config.synchronization, drop_stragglers_after=None)
    if plain != SynchronizationConfig():
        yield f"{FLAG} {text}: data parallelism that communicates less takes equal shares. Drop one of the two"
    if getattr(training, "moe_record_routing", None) is not None and together > 1:
        yield f"{FLAG} {text}: --moe-record-routing records no empty slots, which experts need here. Drop one"
