"""Timing of collectives and messages between two ranks, by size, within nodes and across them.

The collectives are those that training uses (megalite/parallel/collectives.py). Sizes in bytes are counted as in
nccl-tests: the whole tensor that is reduced, gathered or scattered, or that each rank sends away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megalite.doctor.figures import ACROSS, OPERATIONS, POINT_TO_POINT, SMALLEST, WITHIN, Timing
from megalite.parallel import collectives, device
from megalite.parallel.mesh import Group, ParallelMesh

_ROUNDS = 5
_DTYPE = torch.float32


@dataclass
class Measurement:
    """Timings of this rank so far, among the ranks of each of the `nodes`, and the operation that it is timing now."""

    nodes: Sequence[Sequence[int]]
    max_bytes: int
    seconds: float
    """Time for everything; sizes too large for it are left out."""
    timings: list[Timing] = field(default_factory=list)
    now: str = "making the process group"

    def run(self, mesh: ParallelMesh) -> list[Timing]:
        """Time everything; all ranks call this together and go from size to size at the same time."""
        own = next(ranks for ranks in self.nodes if mesh.rank in ranks)
        place = own.index(mesh.rank)
        alike = [ranks[place] for ranks in self.nodes if len(ranks) > place]  # the same place on their nodes
        groups = {WITHIN: mesh.group_of(own), ACROSS: mesh.group_of(alike)}
        scopes = [scope for scope, group in groups.items() if _greatest(group.size, mesh) > 1]
        for scope in scopes:
            for operation in OPERATIONS:
                self._time(scope, groups[scope], operation, mesh, self.seconds / len(scopes) / len(OPERATIONS))
        self.now = ""
        return self.timings

    def _time(self, scope: str, group: Group, operation: str, mesh: ParallelMesh, seconds: float) -> None:
        size, start = SMALLEST, time.monotonic()
        while size <= self.max_bytes:
            self.now = f"{operation} of {size:,} bytes {scope}"
            if 1 < group.size <= size // _DTYPE.itemsize:
                self.timings += [
                    Timing(scope, operation, size, ranks, taken)
                    for ranks, taken in _timed(operation, size, group, mesh.device)
                ]
            if _greatest(time.monotonic() - start, mesh) > seconds:
                return
            size *= 4


def _greatest(value: float, mesh: ParallelMesh) -> float:
    """Return the greatest value over all ranks, which also synchronizes them."""
    tensor = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    return float(collectives.all_reduce_(tensor, mesh.world(), "max").item())


def _timed(operation: str, size: int, group: Group, where: torch.device) -> list[tuple[tuple[int, ...], float]]:
    """Return pairs of ranks and their seconds; the ranks are the group's first rank, or a pair with this rank."""
    buffer = torch.zeros(size // _DTYPE.itemsize // group.size * group.size, dtype=_DTYPE, device=where)
    if operation != POINT_TO_POINT:
        return [((group.ranks[0],), _median_seconds(_collective(operation, buffer, group), where))]
    timed: list[tuple[tuple[int, ...], float]] = []
    for pairs in ring_rounds(group.size):
        for first, second in pairs:
            if group.rank in (first, second):
                there_and_back = _median_seconds(lambda: _exchange(buffer, group, first, second), where)  # noqa: B023
                timed.append(((group.ranks[first], group.ranks[second]), there_and_back / 2))
    return timed


def _collective(operation: str, buffer: torch.Tensor, group: Group) -> Callable[[], object]:
    own = buffer.chunk(group.size)[group.rank]
    parts, sizes = buffer.chunk(group.size), [own.numel()] * group.size
    return {
        "all-reduce": lambda: collectives.all_reduce_(buffer, group),
        "all-gather": lambda: collectives.all_gather(own, group),
        "reduce-scatter": lambda: collectives.reduce_scatter(buffer, group),
        "all-to-all": lambda: collectives.all_to_all(parts, sizes, group),
    }[operation]


def _exchange(buffer: torch.Tensor, group: Group, first: int, second: int) -> None:
    """Send from the first rank to the second, and back."""
    for source, destination in ((first, second), (second, first)):
        if group.rank == source:
            work = dist.isend(buffer, group=group.process_group, group_dst=destination)
        else:
            work = dist.irecv(buffer, group=group.process_group, group_src=source)
        collectives.Pending(work, lambda: buffer).wait()


def ring_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the neighbours in a ring, in rounds of pairs that talk at the same time, each member in one pair."""
    pairs = [(at, (at + 1) % size) for at in range(size if size > 2 else size - 1)]
    odd_one = [pairs.pop()] if len(pairs) % 2 and size > 2 else []
    return [each for each in (pairs[::2], pairs[1::2], odd_one) if each]


def _median_seconds(act: Callable[[], object], where: torch.device) -> float:
    """Return the median seconds of one call, after a first call that does not count."""

    def seconds() -> float:
        start = time.perf_counter()
        act()
        device.synchronize(where)
        return time.perf_counter() - start

    return statistics.median([seconds() for _ in range(_ROUNDS + 1)][1:])
