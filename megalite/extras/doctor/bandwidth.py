"""Timing of collectives and messages between two ranks, by size, within nodes and across them.

The collectives are those that training uses (megalite/parallel/collectives.py). Sizes in bytes are counted as in
nccl-tests: the whole tensor that is reduced, gathered or scattered, or that each rank sends away. Latency, bandwidth
and slow nodes are computed from the timings.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megalite.extras.doctor.findings import SMALLEST, Finding
from megalite.parallel import collectives, device
from megalite.parallel.mesh import Group, ParallelMesh

WITHIN, ACROSS = "within a node", "across nodes"
POINT_TO_POINT = "point to point"
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", POINT_TO_POINT)
_CLEARLY_SLOWER = 0.6
_NODES_TO_COMPARE = 3  # with two nodes, either may be the slow one
_ROUNDS = 5
_DTYPE = torch.float32

# ------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Timing:
    """Duration of an operation, as one of its ranks measured it."""

    scope: str
    operation: str
    bytes: int
    ranks: tuple[int, ...]
    """Ranks: the first of the group, or the pair that sends back and forth."""
    seconds: float


@dataclass
class Measurement:
    """Timings of this rank so far, among the ranks of each of the `nodes`, and the operation that it is timing now."""

    nodes: Sequence[Sequence[int]]
    max_bytes: int
    seconds: float
    """Time limit for all measurements; sizes too large for it are skipped."""
    timings: list[Timing] = field(default_factory=list)
    now: str = "making the process group"

    def run(self, mesh: ParallelMesh) -> None:
        """Time everything; all ranks call this together and go from size to size at the same time."""
        own = next(ranks for ranks in self.nodes if mesh.rank in ranks)
        place = own.index(mesh.rank)
        alike = [ranks[place] for ranks in self.nodes if len(ranks) > place]  # ranks with the same index on each node
        groups = {WITHIN: mesh.group_of(own), ACROSS: mesh.group_of(alike)}
        scopes = [scope for scope, group in groups.items() if _greatest(group.size, mesh) > 1]
        for scope in scopes:
            for operation in OPERATIONS:
                self._time(scope, groups[scope], operation, mesh, self.seconds / len(scopes) / len(OPERATIONS))
        self.now = ""

    def _time(self, scope: str, group: Group, operation: str, mesh: ParallelMesh, seconds: float) -> None:
        size, start = SMALLEST, time.monotonic()
        while size <= self.max_bytes:
            self.now = f"{operation} of {size:,} bytes {scope}"
            if 1 < group.size <= size // _DTYPE.itemsize:
                for ranks, taken in _timed(operation, size, group, mesh.device):
                    self.timings.append(Timing(scope, operation, size, ranks, taken))
            if _greatest(time.monotonic() - start, mesh) > seconds:
                return
            size *= 4


def _greatest(value: float, mesh: ParallelMesh) -> float:
    """Return the greatest value over all ranks, which also synchronizes them."""
    tensor = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    return float(collectives.all_reduce_(tensor, mesh.world(), "max").item())


def _timed(
    operation: str, size: int, group: Group, compute_device: torch.device
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield pairs of ranks and their seconds; the ranks are the group's first rank, or a pair with this rank."""
    buffer = torch.zeros(size // _DTYPE.itemsize // group.size * group.size, dtype=_DTYPE, device=compute_device)
    if operation != POINT_TO_POINT:
        yield (group.ranks[0],), _median_seconds(_collective(operation, buffer, group), compute_device)
        return
    for first, second in ring_pairs(group.size):
        if group.rank in (first, second):
            there_and_back = _median_seconds(lambda: _exchange(buffer, group, first, second), compute_device)  # noqa: B023
            yield (group.ranks[first], group.ranks[second]), there_and_back / 2


def _collective(operation: str, buffer: torch.Tensor, group: Group) -> Callable[[], object]:
    parts = buffer.chunk(group.size)
    own = parts[group.rank]
    return {
        "all-reduce": lambda: collectives.all_reduce_(buffer, group),
        "all-gather": lambda: collectives.all_gather(own, group),
        "reduce-scatter": lambda: collectives.reduce_scatter(buffer, group),
        "all-to-all": lambda: collectives.all_to_all(parts, [own.numel()] * group.size, group),
    }[operation]


def _exchange(buffer: torch.Tensor, group: Group, first: int, second: int) -> None:
    """Send from the first rank to the second, and back."""
    for source, destination in ((first, second), (second, first)):
        if group.rank == source:
            work = dist.isend(buffer, group=group.process_group, group_dst=destination)
        else:
            work = dist.irecv(buffer, group=group.process_group, group_src=source)
        collectives.Pending(work, buffer).wait()


def ring_pairs(size: int) -> list[tuple[int, int]]:
    """Return the neighbours in a ring, in an order in which as many pairs as possible communicate at the same time."""
    pairs = [(at, (at + 1) % size) for at in range(size if size > 2 else size - 1)]
    odd_one = [pairs.pop()] if len(pairs) % 2 and size > 2 else []
    return [*pairs[::2], *pairs[1::2], *odd_one]


def _median_seconds(act: Callable[[], object], compute_device: torch.device) -> float:
    """Return the median seconds of one call, after a first call that does not count."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        act()
        device.synchronize(compute_device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


# ------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Line:
    """Line with seconds = alpha + beta x bytes."""

    alpha: float
    beta: float


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from nccl-tests' algorithm bandwidth to that of the slowest link (doc/PERFORMANCE.md)."""
    if operation == POINT_TO_POINT:
        return 1.0
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks


def fit(points: Mapping[int, float]) -> Line:
    """Fit a line to seconds by bytes, with no negative coefficient, by the squares of relative errors.

    Relative errors give a size of 1 KiB as much weight as one of 1 GiB. At least two points are needed.
    """
    weights = 1 / np.array(list(points.values()))
    speeds = weights * np.array(list(points))
    # Minimize the sum of (weight x (alpha + beta x size) - 1) squared.
    solution, *_ = np.linalg.lstsq(np.stack((weights, speeds), axis=1), np.ones(len(points)), rcond=None)
    alpha, beta = map(float, solution)
    if alpha < 0:
        return Line(0.0, float(speeds.sum() / (speeds @ speeds)))
    return Line(alpha, beta) if beta >= 0 else Line(float(weights.sum() / (weights @ weights)), 0.0)


@dataclass(frozen=True)
class Figure:
    """Figures of an operation, as medians over groups."""

    scope: str
    operation: str
    ranks: int
    """Number of ranks in the largest group."""
    seconds: Mapping[int, float]
    """Seconds by bytes."""
    line: Line | None
    """Line through these points, if there are at least two."""


_Grouped = dict[tuple[str, str], dict[int, dict[tuple[int, ...], float]]]
"""Seconds by scope and operation, by bytes, and by ranks."""


def _slowest_views(timings: Iterable[Timing]) -> _Grouped:
    """Return the seconds that the slowest rank of each group measured: the others may have begun later."""
    slowest: _Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for each in timings:
        by_ranks = slowest[each.scope, each.operation][each.bytes]
        by_ranks[each.ranks] = max(by_ranks[each.ranks], each.seconds)
    return slowest


def figures(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    """Yield the figure of each scope and operation that was timed."""
    ranks = {WITHIN: max(map(len, nodes.values())), ACROSS: len(nodes)}
    for (scope, operation), by_size in _slowest_views(timings).items():
        medians = {size: statistics.median(by_ranks.values()) for size, by_ranks in by_size.items()}
        yield Figure(scope, operation, ranks[scope], medians, fit(medians) if len(medians) > 1 else None)


def slow_nodes(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Yield nodes that are clearly slower than the others at the largest size, if there are enough to compare."""
    node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    for (scope, operation), by_size in _slowest_views(timings).items():
        if scope == ACROSS and operation != POINT_TO_POINT:
            continue  # all nodes take part: the time says nothing about one node
        size = max(by_size)
        by_node = _by_node(by_size[size], node_of)
        if len(by_node) < _NODES_TO_COMPARE:
            continue
        median = statistics.median(by_node.values())
        for node, seconds in by_node.items():
            if median < _CLEARLY_SLOWER * seconds:
                speeds = f"{size / seconds / 1e9:.3g} GB/s, and {size / median / 1e9:.3g} is the median of all nodes"
                yield Finding("warning", f"slow {scope}: {operation} of {size:,} bytes at {speeds}", node)


def _by_node(by_ranks: Mapping[tuple[int, ...], float], node_of: Mapping[int, str]) -> dict[str, float]:
    """Return the seconds of each node.

    Of a node's pairs with other nodes the fastest counts: a slow neighbour makes one pair slow, and a slow node makes
    all of its pairs slow.
    """
    by_nodes: dict[frozenset[str], float] = defaultdict(float)
    for ranks, seconds in by_ranks.items():
        together = frozenset(node_of[rank] for rank in ranks)
        by_nodes[together] = max(by_nodes[together], seconds)
    found: dict[str, float] = defaultdict(lambda: float("inf"))
    for together, seconds in by_nodes.items():
        for node in together:
            found[node] = min(found[node], seconds)
    return found
