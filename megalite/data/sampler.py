"""Which samples a rank takes: pure functions of the number of samples consumed, the only state to resume from.

Megatron-LM's `--dataloader-type single`: the samples are taken in order; micro-batch m of a step, over all
data-parallel ranks together, is the next `micro_batch_size * data_parallel_size` of them, each rank's part contiguous.
"""

from __future__ import annotations


def micro_batch_samples(
    consumed_samples: int, micro_batch: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """The global sample ids of micro-batch `micro_batch` (from 0) on one rank, in the step that starts at
    `consumed_samples`."""
    start = consumed_samples + (micro_batch * data_parallel_size + data_parallel_rank) * micro_batch_size
    return range(start, start + micro_batch_size)
