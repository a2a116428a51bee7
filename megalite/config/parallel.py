"""How the run is split over ranks, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    """The layout: which axes the ranks span and when their communication happens."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (short: --tp)."""
    sequence_parallel: bool = False
    """Split activations between the matrices along the sequence, over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state and master weights over the data-parallel ranks (ZeRO 1)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """What stays sharded over data-parallel ranks (ZeRO 0 to 3); unset: optim with use-distributed-optimizer."""
    num_distributed_optimizer_instances: int = 1
    """Groups of data-parallel ranks that each hold a whole set of shards (hybrid sharding)."""
    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while backward goes on."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward goes on."""
    ddp_bucket_size: int | None = None
    """Parameters in a bucket of the gradient reduction; unset, with overlap-grad-reduce: max(40 million,
    1 million x data-parallel size); without, one bucket (one a block under ZeRO 2 and 3)."""
    grad_reduce_in_bf16: bool = False
    """With bf16: accumulate and reduce gradients in bf16 instead of fp32."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; unset: nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: int = 10
    """How long a rank waits in a collective before the run fails."""

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` ranks (which `validate` has found divisible)."""
        return world_size // self.tensor_model_parallel_size

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        if self.data_parallel_sharding_strategy is None:
            return 1 if self.use_distributed_optimizer else 0
        return ("no_shard", "optim", "optim_grads", "optim_grads_params").index(self.data_parallel_sharding_strategy)

    @property
    def accumulate_allreduce_grads_in_fp32(self) -> bool:
        """Gradients of bf16 parameters are accumulated and reduced in fp32."""
        return not self.grad_reduce_in_bf16
