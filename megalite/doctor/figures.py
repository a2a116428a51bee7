"""Figures from timings: latency, bandwidth, and the nodes that are slower than the others."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalite.doctor.findings import Finding

WITHIN, ACROSS = "within a node", "across nodes"
POINT_TO_POINT = "point to point"
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", POINT_TO_POINT)
SMALLEST = 1024
"""Smallest size in bytes; each size is four times the one before."""
_CLEARLY_SLOWER = 0.6
_NODES_TO_COMPARE = 3  # of two, either may be the odd one


@dataclass(frozen=True)
class Timing:
    """Duration of an operation, as one of its ranks measured it."""

    scope: str
    operation: str
    bytes: int
    ranks: tuple[int, ...]
    """Ranks: the first of the group, or the pair that sends back and forth."""
    seconds: float


@dataclass(frozen=True)
class Line:
    """Line with seconds = alpha + beta x bytes."""

    alpha: float
    beta: float

    def bandwidth(self) -> float:
        """Bytes per second without latency: 1 / beta, the algorithm bandwidth of nccl-tests."""
        return 1 / self.beta if self.beta > 0 else float("inf")


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from nccl-tests' algorithm bandwidth to that of the slowest link (doc/PERFORMANCE.md)."""
    if operation == POINT_TO_POINT:
        return 1.0
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks


def fit(points: Mapping[int, float]) -> Line:
    """Fit a line to seconds by bytes, with no negative coefficient, by the squares of relative errors.

    Relative errors give a size of 1 KiB as much weight as one of 1 GiB. At least two points are needed.
    """
    weights = {size: 1 / seconds for size, seconds in points.items()}
    # Minimize the sum of (weight x (alpha + beta x size) - 1) squared.
    aa = sum(w * w for w in weights.values())
    ab = sum(w * w * size for size, w in weights.items())
    bb = sum((w * size) ** 2 for size, w in weights.items())
    a, b = sum(weights.values()), sum(w * size for size, w in weights.items())
    determinant = aa * bb - ab * ab
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        return Line(0.0, b / bb)
    return Line(alpha, beta) if beta >= 0 else Line(a / aa, 0.0)


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


def slowest_views(timings: Iterable[Timing]) -> dict[tuple[str, str, int, tuple[int, ...]], float]:
    """Return the seconds that the slowest rank of each group measured: the others may have begun later."""
    slowest: dict[tuple[str, str, int, tuple[int, ...]], float] = defaultdict(float)
    for each in timings:
        key = each.scope, each.operation, each.bytes, each.ranks
        slowest[key] = max(slowest[key], each.seconds)
    return slowest


def figures(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    """Yield the figure of each scope and operation that was timed."""
    ranks = {WITHIN: max(map(len, nodes.values())), ACROSS: len(nodes)}
    seconds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (scope, operation, size, _), taken in slowest_views(timings).items():
        seconds[scope, operation][size].append(taken)
    for (scope, operation), by_size in seconds.items():
        medians = {size: statistics.median(taken) for size, taken in by_size.items()}
        yield Figure(scope, operation, ranks[scope], medians, fit(medians) if len(medians) > 1 else None)


def slow_nodes(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Yield nodes that are clearly slower than the others at the largest size, if there are enough to compare."""
    node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    largest: dict[tuple[str, str], int] = defaultdict(int)
    views = slowest_views(timings)
    for scope, operation, size, _ in views:
        largest[scope, operation] = max(largest[scope, operation], size)
    for (scope, operation), size in largest.items():
        among = {ranks: s for (*key, bytes, ranks), s in views.items() if (*key, bytes) == (scope, operation, size)}
        by_node = _by_node(scope, operation, among, node_of)
        if len(by_node) < _NODES_TO_COMPARE:
            continue
        median = statistics.median(by_node.values())
        for node, seconds in by_node.items():
            if median < _CLEARLY_SLOWER * seconds:
                speeds = f"{size / seconds / 1e9:.3g} GB/s, and {size / median / 1e9:.3g} in the middle of all nodes"
                yield Finding("warning", f"slow {scope}: {operation} of {size:,} bytes at {speeds}", node)


def _by_node(
    scope: str, operation: str, among: Mapping[tuple[int, ...], float], node_of: Mapping[int, str]
) -> dict[str, float]:
    """Return the seconds of each node.

    Between nodes only pairs tell, and of a node's pairs the fastest counts: a slow neighbour makes one pair slow, and a
    slow node makes all of its pairs slow.
    """
    if scope == ACROSS and operation != POINT_TO_POINT:
        return {}
    by_nodes: dict[frozenset[str], float] = defaultdict(float)
    for ranks, seconds in among.items():
        where = frozenset(node_of[rank] for rank in ranks)
        by_nodes[where] = max(by_nodes[where], seconds)
    found = dict.fromkeys((node for where in by_nodes for node in where), float("inf"))
    for where, seconds in by_nodes.items():
        for node in where:
            found[node] = min(found[node], seconds)
    return found
