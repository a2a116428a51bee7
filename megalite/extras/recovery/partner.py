"""Partners: the rank of another node that keeps a rank's copy, and the links over which copies travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.recovery import RecoveryConfig
from megalite.errors import ConfigurationError, CorruptCheckpointError
from megalite.extras.recovery.slot import HEADER, HEADER_BYTES, Header, Slot
from megalite.parallel.mesh import ParallelMesh
from megalite.torch_internals import Store, new_process_group

_CHUNK = 1 << 24
"""Bytes of one message."""


def goes_on_without_nodes(environment: Mapping[str, str], recovery: RecoveryConfig) -> bool:
    """Tell whether a run may go on without a node: only then does a rank need its copy on another one."""
    return recovery.goes_on_without_nodes or int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def partners_of(hosts: Sequence[str], distance: int) -> tuple[int, ...] | None:
    """Return each rank's partner: the rank at its position `distance` nodes further.

    Returns None if there is one node, or if nodes have unequal numbers of ranks. Raises ConfigurationError if the
    partner would be on the same node.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    places = list(nodes.values())
    if len(places) == 1 or len({*map(len, places)}) > 1:
        return None
    if distance % len(places) == 0:
        listed = "; ".join(f"{host} has ranks {', '.join(map(str, ranks))}" for host, ranks in nodes.items())
        raise ConfigurationError(
            f"--memory-checkpoint-partner {distance}: with {len(places)} nodes, each node would be its own partner "
            f"({listed}): give a number that is no multiple of {len(places)}"
        )
    found = [0] * len(hosts)
    for number, ranks in enumerate(places):
        for rank, partner in zip(ranks, places[(number + distance) % len(places)], strict=True):
            found[rank] = partner
    return tuple(found)


def rounds_of(partners: Sequence[int]) -> list[int]:
    """Return by rank the round, of three, in which it connects with its partner: no rank has two of one round."""
    found = [-1] * len(partners)
    for first in range(len(partners)):
        circle: list[int] = []
        rank = first
        while found[rank] < 0:
            found[rank] = len(circle) % 2
            circle.append(rank)
            rank = partners[rank]
        if len(circle) % 2:  # the last one would meet the first one
            found[circle[-1]] = 2
    return found


class Links:
    """Connections of a rank with its partner, and with the rank whose partner it is.

    They are of gloo, also where the ranks train by NCCL: copies are in the host's memory, and travel beside the steps.
    """

    def __init__(self, partners: Sequence[int], mesh: ParallelMesh) -> None:
        """Connect. Called by all ranks together."""
        rank = mesh.whole.rank
        self.partner, self.source = partners[rank], partners.index(rank)
        rounds = rounds_of(partners)  # nobody waits in a circle, nor in a line of all nodes
        self._groups: dict[int, dist.ProcessGroup] = {}
        for source in sorted((rank, self.source), key=rounds.__getitem__):
            self._groups[source] = _connect(rank, source, partners[source])
        self._own, self._other = self._groups[rank], self._groups[self.source]

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
        del self._own, self._other

    def exchange(self, own: Slot, header: Header, kept: Slot) -> Header:
        """Send this rank's copy to its partner, and receive that of the other rank, which becomes `kept`."""
        heads = [torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8), torch.empty(HEADER_BYTES).byte()]
        self._both(heads[0], heads[1])
        received = _header(heads[1])
        kept.discard()
        kept.allocate(received.stop)
        self._both(own.memory[HEADER : header.stop], kept.memory[HEADER : received.stop])
        return _committed(kept, received)

    def _both(self, sent: Tensor, received: Tensor) -> None:
        """Send and receive at once, message by message."""
        here, there = sent.split(_CHUNK), received.split(_CHUNK)
        for number in range(max(len(here), len(there))):
            works = []
            if number < len(there):
                works.append(dist.irecv(there[number], self.source, group=self._other))
            if number < len(here):
                works.append(dist.isend(here[number], self.partner, group=self._own))
            for work in works:
                if work is not None:
                    work.wait()

    def give_back(self, kept: Slot, header: Header | None) -> None:
        """Send the rank whose partner this one is the copy that was kept for it; None: it is damaged."""
        head = bytes(HEADER_BYTES) if header is None else header.to_bytes()
        dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), self.source, group=self._other)
        if header is not None:
            for part in kept.memory[HEADER : header.stop].split(_CHUNK):
                dist.send(part, self.source, group=self._other)

    def take_back(self, own: Slot) -> bool:
        """Receive this rank's copy from its partner into `own`. Returns False if the partner's is damaged."""
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.recv(head, self.partner, group=self._own)
        own.discard()
        if (header := Header.from_bytes(head.numpy().tobytes())) is None:
            return False
        own.allocate(header.stop)
        for part in own.memory[HEADER : header.stop].split(_CHUNK):
            dist.recv(part, self.partner, group=self._own)
        _committed(own, header)
        return True


def _header(data: Tensor) -> Header:
    header = Header.from_bytes(data.numpy().tobytes())
    if header is None:
        raise CorruptCheckpointError("the header of a copy in memory was damaged on its way")
    return header


def _committed(slot: Slot, header: Header) -> Header:
    """Make received bytes a copy."""
    slot.commit(header)
    if slot.header() is None:
        slot.discard()
        raise CorruptCheckpointError(f"the manifest of the copy in memory of step {header.step} was damaged on its way")
    return header


def _connect(rank: int, source: int, partner: int) -> dist.ProcessGroup:
    name = f"megalite copies {source}-{partner}"

    def unique_name(store: Store) -> str:
        return f"{name} #{store.add(f'{name} on {rank}', 1)}"

    return new_process_group(rank, sorted((source, partner)), unique_name, None, backend="gloo")
