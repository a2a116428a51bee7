"""Memory of a rank by kind, measured at the start of a run.

The kinds are parameters, gradients, optimizer state (moments, and fp32 masters of narrower parameters), and the
activations that all micro-batches in flight keep from forward to backward. What offloading keeps in the host's memory
is counted apart, also on the CPU, where both are one memory. Short-lived memory (buffers of collectives, temporaries of
kernels) is not included; `peak_memory_bytes` of the metrics includes it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megalite.modules.forward_state import ForwardState
from megalite.offload.activations import ActivationOffload
from megalite.optim.host_memory import bytes_on_host
from megalite.optim.optimizer import Optimizer
from megalite.process.output import in_words
from megalite.torch_internals import storage_identity


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    """Parameters, and the state of modules."""
    gradients: int
    optimizer: int
    activations: int
    """Peak of the micro-batches in flight, on the device."""
    host: int = 0
    """Bytes that offloading keeps in the host's memory, and that no other figure has."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def lines(self, whose: str) -> dict[str, str]:
        """Return the total of the device and each kind as text. `whose`: the rank, in words."""
        sizes = {kind: size for kind, size in asdict(self).items() if size or kind != "host"}
        kinds = {f"  {kind}": in_words(size) for kind, size in sizes.items()}
        return {"memory": f"{in_words(self.total)} {whose}", **kinds}


def measured(
    optimizer: Optimizer,
    forwards: Iterable[Callable[[], object]],
    peak: Callable[[Sequence[int], Sequence[int]], int] = lambda kept, _: sum(kept),
    offloading: ActivationOffload | None = None,
    buffers: Callable[[Sequence[int]], int] = sum,
) -> Memory:
    """Measure the tensors of this rank.

    Called by all ranks together. `forwards` run each chunk of the network over one micro-batch; the state of modules
    that they change is restored afterwards. `peak` computes the peak of a step from the bytes that each chunk keeps per
    micro-batch and those that its last offloaded layer offloads, and `buffers` those of the host from the bytes that
    each chunk offloads.
    """
    parameters, gradients, state = storages_by_kind(optimizer).values()
    with ForwardState(optimizer.module_states).unchanged():
        saved = [_kept(forward, parameters, offloading, chunk) for chunk, forward in enumerate(forwards)]
    return Memory(
        parameters=sum(parameters.values()),
        gradients=sum(gradients.values()),
        optimizer=sum(state.values()),
        activations=peak([size for size, _, _ in saved], [size for _, _, size in saved]),
        host=bytes_on_host(optimizer) + (0 if offloading is None else buffers([size for _, size, _ in saved])),
    )


def storages_by_kind(optimizer: Optimizer) -> dict[str, dict[int, int]]:
    """Return the bytes of each storage on the device that a rank keeps between steps, by its identity, by kind."""
    flats, states = [*optimizer.buckets, *optimizer.frozen], [each.values for each in optimizer.module_states]
    slices = [each.parameter_shard for each in flats if not each.slice_on_host]
    parameters = _storages([*(each.parameters for each in flats), *slices, *states])
    accumulators = [accumulator for bucket in optimizer.buckets for accumulator in bucket.accumulators]
    gradients = _storages(tensor for a in accumulators for tensor in (*a.flats.values(), a.gradient_shard))
    kept = _storages(tensor for shard in optimizer.shards for tensor in shard.tensors())
    alone = {storage: size for storage, size in kept.items() if storage not in parameters}
    return {"parameters": parameters, "gradients": gradients, "optimizer": alone}


def _kept(
    forward: Callable[[], object], parameters: Container[int], offloading: ActivationOffload | None, chunk: int
) -> tuple[int, int, int]:
    """Return the bytes that a chunk's forward keeps for backward on the device, those that it offloads to the host, and
    those of them that its last offloaded layer does, without the storages of parameters.
    """
    activations: dict[int, int] = {}
    offloaded: dict[int, dict[int, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage_identity(tensor) not in parameters:
            layer = None if offloading is None else offloading.taken_by(tensor)
            (activations if layer is None else offloaded.setdefault(layer, {})).update(_storages([tensor]))
        return tensor.detach()  # an output that its own node keeps would never be freed

    counting = nullcontext() if offloading is None else offloading.counting(chunk)
    with counting, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = forward()  # kept alive until all hooks have run, so that no address is used twice
    del graph
    of_layers = [sum(offloaded[layer].values()) for layer in sorted(offloaded)]
    return sum(activations.values()), sum(of_layers), sum(of_layers[-1:])


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors, each storage once."""
    return {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
