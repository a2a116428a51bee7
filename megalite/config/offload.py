"""Options of offloading: what a run keeps in the host's memory, and what of it is copied beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megalite.config.fields import NonNegativeInt, Share, needs
from megalite.config.kernels import KernelsConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.synchronization import SynchronizationConfig

OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
"""Modules that offload, in the order in which a layer runs them."""
MODULES_OF_EXPERTS: tuple[OffloadModule, ...] = ("expert_fc1", "moe_act")


@dataclass(frozen=True)
class OffloadConfig:
    """Options of offloading to the host's memory."""

    optimizer_cpu_offload: bool = False
    """Keep optimizer state and master weights in the host's memory, and update these weights there."""
    optimizer_offload_fraction: Share = 1.0
    """Share of a rank's weights whose state is on the host."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients to the host while backward runs, and weights back while the next forward runs."""
    pin_cpu_grads: bool = True
    """Let the host's copy of gradients be page-locked."""
    pin_cpu_params: bool = True
    """Let the host's copy of weights be page-locked."""
    parameter_offload: bool = False
    """Keep this rank's slices of the weights in the host's memory, and fetch them one block ahead; needs ZeRO 3."""
    cpu_offloading_num_layers: NonNegativeInt = 0
    """Offload what the first layers of each rank, this number of them, save for backward."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """Keep the host's memory for these layers from one step to the next, instead of freeing it after each."""
    fine_grained_activation_offloading: bool = False
    """Offload what the modules of offload-modules save for backward, in place of whole layers."""
    offload_modules: tuple[OffloadModule, ...] = ()
    """Modules of each layer: the norm before attention, the projections to queries, keys and values, the core of
    attention, its output layer, the norm before the feed-forward layer, or the first product or the activation of
    experts. Of a recurrent layer, the parts in the place of those of attention."""
    activation_offload_fraction: Share = 1.0
    """Share of a rank's modules that are offloaded, the first in the order of forward."""
    min_offloaded_tensor_size: NonNegativeInt = 1024 * 1024
    """Elements of the smallest tensor that modules offload."""

    @property
    def offloads_activations(self) -> bool:
        return self.fine_grained_activation_offloading or self.cpu_offloading_num_layers > 0

    @property
    def fraction_on_host(self) -> float:
        """Share of a rank's weights whose optimizer state is on the host; 0 without --optimizer-cpu-offload."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0


def offload_problems(
    offload: OffloadConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    synchronization: SynchronizationConfig,
    kernels: KernelsConfig,
) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    if not offload.optimizer_cpu_offload:
        names = "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params"
        yield from needs(offload, names, "--optimizer-cpu-offload")
    elif optimizer.optimizer_backend == "apex":
        yield "--optimizer-cpu-offload with --optimizer-backend apex: apex updates on GPUs only; use auto or torch"
    elif kernels.kernels == "triton":
        yield "--optimizer-cpu-offload with --kernels triton: the host has no Triton; --kernels auto has it on GPUs"
    elif not (synchronization.is_plain or synchronization.leaves_out):
        yield (
            "--optimizer-cpu-offload needs data parallelism that sums all gradients in each step: leave out "
            "--gradient-compression, --local-update, --asynchronous and --all-reduce-algorithm, or the offloading"
        )
    if offload.parameter_offload:
        yield from _parameters(offload, parallel)


def _parameters(offload: OffloadConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what --parameter-offload needs and does not have."""
    if parallel.zero_stage != 3:
        yield (
            "--parameter-offload needs --data-parallel-sharding-strategy optim_grads_params (ZeRO 3), not ZeRO "
            f"{parallel.zero_stage}: the other stages use all weights where they are"
        )
    if offload.fraction_on_host < 1.0:
        yield (
            "--parameter-offload needs --optimizer-cpu-offload with --optimizer-offload-fraction 1, not "
            f"{offload.fraction_on_host:g}: slices on the host are updated there"
        )
