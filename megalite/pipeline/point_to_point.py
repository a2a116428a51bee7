"""Messages between neighbouring pipeline ranks: one process group of two ranks per direction.

All chunks share the group, for hidden states and gradients. Receives are posted in the order of the sends, so no tags
are needed. (On NCCL, two directions in the same group would block each other.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import Pending, completed, launch
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.pipeline.stages import Stages


class Links:
    """Process groups of this rank, `outgoing` and `incoming`, by the pipeline rank at the other end."""

    def __init__(self, outgoing: Mapping[int, Group], incoming: Mapping[int, Group]) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """Start to send `tensor`, which must not change until the result has been waited for."""
        group = self.outgoing[peer]
        group.record("send", tensor.nbytes)
        if not group.is_connected:
            return completed(tensor)
        return Pending(launch(dist.ProcessGroup.send, group.process_group, [tensor], 1, 0), tensor, group)

    def receive(self, tensor: Tensor, peer: int) -> Pending:
        """Start to receive into `tensor`."""
        group = self.incoming[peer]
        group.record("receive", tensor.nbytes)
        if not group.is_connected:
            return completed(tensor if tensor.is_meta else tensor.zero_())
        return Pending(launch(dist.ProcessGroup.recv, group.process_group, [tensor], 0, 0), tensor, group)


def make_links(mesh: ParallelMesh, stages: Stages) -> Links:
    """Create this rank's links, in the same order on all ranks, and send a first message, at which NCCL connects."""
    ranks, own = mesh.ranks("pp"), mesh.coordinate("pp")
    outgoing: dict[int, Group] = {}
    incoming: dict[int, Group] = {}
    for source, destination in directions(stages):
        if own == source:
            outgoing[destination] = mesh.link(ranks[source], ranks[destination])
        elif own == destination:
            incoming[source] = mesh.link(ranks[source], ranks[destination])
    links = Links(outgoing, incoming)
    for source, destination in directions(stages):
        greeting = torch.zeros(1, device=mesh.device)
        if own == source:
            links.send(greeting, destination).wait()
        elif own == destination:
            links.receive(greeting, source).wait()
    return links


def directions(stages: Stages) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks (source, destination) that exchange messages."""
    places = [stages.place(stage)[0] for stage in range(stages.count)]
    neighbours = [(a, b) for a, b in itertools.pairwise(places) if a != b]
    return sorted({*neighbours, *((b, a) for a, b in neighbours)})
