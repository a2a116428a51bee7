"""Messages between neighbours in the pipeline: a process group of two ranks for each direction.

All chunks share it, and hidden states and gradients too: the order in which the sender sends is the order in which the
receiver posts its receives, so no tags are needed. (Both directions in one group would block one another on NCCL.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import Pending, launch
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.pipeline.stages import Stages


class Links:
    """The groups of this rank: `outgoing` and `incoming` by the pipeline rank at the other end."""

    def __init__(self, outgoing: Mapping[int, Group], incoming: Mapping[int, Group]) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """Start to send; the tensor must not change before the result is waited for."""
        group = self.outgoing[peer]
        return Pending(launch(dist.ProcessGroup.send, group.process_group, [tensor], 1, 0), lambda: tensor, group.waits)

    def receive(self, tensor: Tensor, peer: int) -> Pending:
        """Start to receive into `tensor`."""
        group = self.incoming[peer]
        return Pending(launch(dist.ProcessGroup.recv, group.process_group, [tensor], 0, 0), lambda: tensor, group.waits)


def make_links(mesh: ParallelMesh, stages: Stages) -> Links:
    """Make and warm this rank's links, in one order on all ranks: NCCL connects two ranks at their first message."""
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
    """The pairs of pipeline ranks (source, destination) between which messages go."""
    places = [stages.place(stage)[0] for stage in range(stages.count)]
    neighbours = [(a, b) for a, b in itertools.pairwise(places) if a != b]
    return sorted({*neighbours, *((b, a) for a, b in neighbours)})
