"""What timings say: latency and bandwidth, and which node is slower than the others."""

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
"""Bytes; each size is four times the one before."""
_CLEARLY_SLOWER = 0.6
_NODES_TO_COMPARE = 3  # of two, either may be the odd one


@dataclass(frozen=True)
class Timing:
    """How long ranks took, as one of them saw it."""

    scope: str
    operation: str
    bytes: int
    ranks: tuple[int, ...]
    """The first of the group, or the pair that sends to and fro."""
    seconds: float


@dataclass(frozen=True)
class Line:
    """seconds = alpha + beta x bytes."""

    alpha: float
    beta: float

    def bandwidth(self) -> float:
        """Bytes a second once latency counts for nothing: 1 / beta, the algorithm's bandwidth of nccl-tests."""
        return 1 / self.beta if self.beta > 0 else float("inf")


def bus_factor(operation: str, ranks: int) -> float:
    """What nccl-tests multiplies the algorithm's bandwidth by for that of the slowest link (doc/PERFORMANCE.md)."""
    if operation == POINT_TO_POINT:
        return 1.0
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks


def fit(points: Mapping[int, float]) -> Line:
    """The line through seconds by bytes, neither coefficient negative, that is best by the squares of relative errors:
    so that a size of 1 KiB says as much as one of 1 GiB. Two points at least."""
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
    """What timings say of an operation, in the median over groups."""

    scope: str
    operation: str
    ranks: int
    """Of the largest group."""
    seconds: Mapping[int, float]
    """By bytes."""
    line: Line | None
    """Through them, where there are two."""


def slowest_views(timings: Iterable[Timing]) -> dict[tuple[str, str, int, tuple[int, ...]], float]:
    """Of each group the seconds that its slowest rank saw: the others may have begun later."""
    slowest: dict[tuple[str, str, int, tuple[int, ...]], float] = defaultdict(float)
    for each in timings:
        key = each.scope, each.operation, each.bytes, each.ranks
        slowest[key] = max(slowest[key], each.seconds)
    return slowest


def figures(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Figure]:
    """Of each scope and operation that was timed."""
    ranks = {WITHIN: max(map(len, nodes.values())), ACROSS: len(nodes)}
    seconds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (scope, operation, size, _), taken in slowest_views(timings).items():
        seconds[scope, operation][size].append(taken)
    for (scope, operation), by_size in seconds.items():
        medians = {size: statistics.median(taken) for size, taken in by_size.items()}
        yield Figure(scope, operation, ranks[scope], medians, fit(medians) if len(medians) > 1 else None)


def slow_nodes(timings: Iterable[Timing], nodes: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Nodes that are clearly slower than the others at the largest size, where there are enough to compare."""
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
    """Seconds of each node. Between nodes only pairs tell, and of a node's pairs the fastest: a slow neighbour makes
    one slow, and a slow node makes all of its own."""
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
