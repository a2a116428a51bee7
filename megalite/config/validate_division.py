"""Rules of division: ranks by groups, and batches by micro-batches and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import flag_of
from megalite.config.parallel import ParallelConfig
from megalite.config.run import TaskConfig

_TORCHRUN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone"


def division_problems(config: TaskConfig, world_size: int, seq_length: int) -> Iterator[str]:
    """Yield what does not divide: ranks by groups, and batches by micro-batches and data-parallel ranks."""
    training, parallel = config.training, config.parallel
    if uneven := list(uneven_groups(parallel, world_size)):
        yield from uneven
        return
    copies = parallel.data_parallel_size(world_size)
    if parallel.data_parallel_shares is not None:
        from megalite.config.validate_shares import share_problems

        if problems := list(share_problems(config, world_size)):
            yield from problems
            return
    unit, words = (1, "1") if config.recovery.elastic else _share_unit(parallel, world_size)
    batch = training.global_batch_size or training.micro_batch_size * least_micro_batches(parallel, world_size)
    sizes, grows = [("--global-batch-size", batch)], training.rampup_batch_size or training.step_batch_size_schedule
    if training.rampup_batch_size is not None:
        start, increment, _ = training.rampup_batch_size
        sizes += [("--rampup-batch-size: the start", start), ("--rampup-batch-size: the increment", increment)]
    schedule = training.batch_size_schedule(seq_length)
    # A run that continues may be past the first sizes of a schedule, which may be too small for its ranks.
    continues = config.checkpoint.may_continue or config.checkpoint.resume is not None
    multiple, least = training.micro_batch_size * unit, training.micro_batch_size * copies
    fits = [size % multiple == 0 and size >= least for _, size in schedule]
    first = fits.index(True) if continues and True in fits else 0
    sizes += [("--step-batch-size-schedule: the size", size) for _, size in schedule[first:]]
    if training.eval_global_batch_size is not None:
        sizes.append(("--eval-global-batch-size", training.eval_global_batch_size))
    for name, size in sizes:
        if size % multiple:
            yield f"{name} {size} is not a multiple of --micro-batch-size {training.micro_batch_size} x {words}"
        elif size < least and "increment" not in name:
            yield f"{name} {size} has fewer micro-batches than {copies} data-parallel ranks"
    yield from _instances(parallel, world_size)
    if training.train_samples is not None and training.train_samples < batch and not grows:
        yield f"--train-samples {training.train_samples} is less than one --global-batch-size {batch}"


def _share_unit(parallel: ParallelConfig, world_size: int) -> tuple[int, str]:
    """Return the number of micro-batches of which a step must have a multiple, with its origin in words."""
    if parallel.data_parallel_shares is not None:
        from megalite.config.validate_shares import batch_unit

        return batch_unit(parallel, world_size)
    copies = max(parallel.data_parallel_size(world_size), 1)
    return copies, f"{copies} data-parallel ranks"


def least_micro_batches(parallel: ParallelConfig, world_size: int) -> int:
    """Return the least number of micro-batches in a step, with at least one for each data-parallel rank."""
    return max(_share_unit(parallel, world_size)[0], parallel.data_parallel_size(world_size), 1)


def uneven_groups(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each group of ranks of a layout into which so many ranks cannot be divided."""
    shared = "tensor_model" if parallel.expert_tensor_parallel_size is None else "expert_tensor"
    groups = {  # if both sizes are equal, the second entry replaces the first
        parallel.expert_tensor_model_pipeline_parallel_size: (f"{shared}_parallel_size", "expert_model_parallel_size"),
        parallel.model_parallel_size: ("tensor_model_parallel_size", "context_parallel_size"),
    }
    for size, names in [(size, names) for size, names in groups.items() if world_size % size]:
        sizes = {name: getattr(parallel, name) for name in (*names, "pipeline_model_parallel_size")}
        flags = " x ".join(f"{flag_of(name)} {number}" for name, number in sizes.items() if number > 1)
        start = f": start {size} processes, as by {_TORCHRUN} --nproc-per-node {size}" if world_size == 1 else ""
        yield f"{world_size} ranks cannot be divided into groups of {flags}{start}"


def _instances(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the instances of hybrid sharding."""
    instances, copies = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size(world_size)
    peers = copies * parallel.context_parallel_size
    of_experts = world_size // parallel.expert_tensor_model_pipeline_parallel_size
    if peers % instances:
        kinds = "data-parallel" if peers == copies else "data- and context-parallel"
        yield f"--num-distributed-optimizer-instances {instances} does not divide {peers} {kinds} ranks"
    elif of_experts % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the experts' data-parallel size, "
            f"{of_experts}"
        )
    elif peers == instances > 1:
        yield f"--num-distributed-optimizer-instances {instances}: with one rank in each nothing is sharded"
    if instances > 1 and parallel.zero_stage == 0:
        yield (
            f"--num-distributed-optimizer-instances {instances} needs shards: --use-distributed-optimizer or another "
            "--data-parallel-sharding-strategy than no_shard"
        )
