"""Scaling of a run over ranks: speed-up and efficiency of measured steps, and the steps that the planner expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.config import RunConfig
from megalite.config.validate import resolve
from megalite.extras.planner.cluster import Cluster, find_cluster
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.parts import part_records
from megalite.extras.planner.plan import with_vocabulary
from megalite.extras.planner.step import Step


@dataclass(frozen=True)
class Run:
    """Measured run."""

    ranks: int
    batch: int
    """Samples of a step, over all ranks."""
    seconds: float
    """Median of its steps."""


@dataclass(frozen=True)
class Point:
    """Run in comparison with the first one of its series."""

    ranks: int
    batch: int
    seconds: float
    speed_up: float
    """Samples per second, as a multiple of the first run's."""
    efficiency: float
    """Speed-up per rank."""
    communication: float | None
    """Time beyond that of the same samples per rank on one rank alone, as a multiple of that time: communication, and
    what ranks on one machine take from each other. None if the first run was on several ranks, which communicate."""
    predicted: float | None
    """Seconds that the planner expects."""


def compare(runs: Sequence[Run], predicted: Sequence[float | None]) -> list[Point]:
    """Compare the runs of a series with its first one."""
    first, points = runs[0], []
    for run, expected in zip(runs, predicted, strict=True):
        speed_up = (run.batch / run.seconds) / (first.batch / first.seconds)
        efficiency = speed_up * first.ranks / run.ranks
        beyond = max(1.0 / efficiency - 1.0, 0.0) if first.ranks == 1 else None
        points.append(Point(run.ranks, run.batch, run.seconds, speed_up, efficiency, beyond, expected))
    return points


def table(points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "ranks  batch       step  speed-up  efficiency  comm./comp.    planner"
    for each in points:
        expected = "-" if each.predicted is None else f"{each.predicted:.4f} s"
        communication = "-" if each.communication is None else f"{each.communication:.2f}"
        yield (
            f"{each.ranks:5} {each.batch:6} {each.seconds:8.4f} s {each.speed_up:9.2f} {each.efficiency:11.0%} "
            f"{communication:>12} {expected:>10}"
        )


def predict(config: RunConfig, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a step that the planner expects.

    Raises MegaliteError if the configuration does not fit the ranks.
    """
    config = with_vocabulary(resolve(config, ranks))
    return Step(config, ranks, part_records(config), Prices(cluster)).simulated.seconds


def calibrated(config: RunConfig, run: Run) -> Cluster:
    """Return a cluster of CPUs on which computation takes the time of a measured run. Links stay as they are known."""
    cluster = find_cluster("cpu")
    factor, gpu = run.seconds / predict(config, run.ranks, cluster), cluster.gpu
    peak = {dtype: value / factor for dtype, value in gpu.peak.items()}
    slower = replace(gpu, peak=peak, bandwidth=gpu.bandwidth / factor)
    return replace(cluster, gpu=replace(slower, kernel=gpu.kernel * factor, launch=gpu.launch * factor))
