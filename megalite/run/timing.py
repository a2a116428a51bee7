"""Time that ranks spend in the sections of a step and waiting for others, the slowest rank, and the fullest one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megalite.parallel import collectives
from megalite.parallel.device import peak_memory_bytes
from megalite.parallel.mesh import ParallelMesh
from megalite.process.host import host_name
from megalite.watchdog.sections import OF_A_STEP, WAITING, waiting_on
from megalite_kernels.implementation import on_gpu


def key_of(section: str) -> str:
    """Return the key of a section's seconds in records."""
    return f"iteration_time_s/{section.replace(' ', '_')}"


@dataclass(frozen=True)
class Timing:
    """Host seconds per step in each section, by rank. A rank that others wait for spends more time on its own work."""

    seconds: Sequence[Sequence[float]]
    """[rank][section of OF_A_STEP]"""
    hosts: Sequence[str]
    waits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Parts of the last section by the axis of the mesh, [rank] each."""
    peaks: Sequence[float] = ()
    """[rank]: the most memory in use so far, in bytes."""
    shows_waits: bool = True
    """False if ranks wait on their devices, where the host does not see it."""

    def figures(self) -> dict[str, float]:
        """Return metrics: medians over ranks, the slowest rank with its time of work, the fullest, waits by axis."""
        figures = {key_of(name): median for name, median in self._medians().items()}
        slowest = self._slowest()
        figures["iteration_time_s/slowest_rank"] = float(slowest)
        figures["iteration_time_s/slowest_rank_work"] = self._work(slowest)
        for axis, of_ranks in self.waits.items():
            figures[f"wait_s/{axis}"] = statistics.median(of_ranks)
            figures |= largest(f"wait_s/{axis}", of_ranks)
            figures[f"wait_s/{axis}/min_rank"] = float(min(range(len(of_ranks)), key=of_ranks.__getitem__))
        if self.peaks:
            figures |= largest("peak_memory_bytes", self.peaks)
        return figures | self._shares()

    def _shares(self) -> dict[str, float]:
        """Return the share of a step that ranks work, and that in which even the rank that waits least waits."""
        steps = [sum(own) for own in self.seconds]
        if len(steps) == 1 or not self.shows_waits or not all(steps):
            return {}
        working = [self._work(rank) / step for rank, step in enumerate(steps)]
        return {"scaling_efficiency": statistics.fmean(working), "communication_share": 1.0 - max(working)}

    def line(self) -> str:
        """Return a line for the screen."""
        parts = [f"{name} {1000 * seconds:,.1f}" for name, seconds in self._medians().items()]
        if len(self.seconds) == 1:
            return f"ms per step: {', '.join(parts[:-1])}"
        slowest = self._slowest()
        slowest_work, median_work = self._work(slowest), statistics.median(map(self._work, range(len(self.seconds))))
        excess = [own - median for own, median in zip(self.seconds[slowest], self._medians().values(), strict=True)]
        section = max(range(len(OF_A_STEP) - 1), key=excess.__getitem__)  # the last section is the wait for others
        return (
            f"ms per step, median of {len(self.seconds)} ranks: {', '.join(parts)}; slowest: rank {slowest} on "
            f"{self.hosts[slowest]}, {1000 * slowest_work:,.1f} of work against {1000 * median_work:,.1f}, "
            f"most of the difference in {OF_A_STEP[section]}"
        )

    def _medians(self) -> dict[str, float]:
        columns = zip(*self.seconds, strict=True)
        return {name: statistics.median(column) for name, column in zip(OF_A_STEP, columns, strict=True)}

    def _work(self, rank: int) -> float:
        return sum(seconds for name, seconds in zip(OF_A_STEP, self.seconds[rank], strict=True) if name != WAITING)

    def _slowest(self) -> int:
        return max(range(len(self.seconds)), key=self._work)


def largest(name: str, of_ranks: Sequence[float]) -> dict[str, float]:
    """Return the largest value and its rank."""
    rank = max(range(len(of_ranks)), key=of_ranks.__getitem__)
    return {f"{name}/max": of_ranks[rank], f"{name}/max_rank": float(rank)}


def gather_timing(seconds: Mapping[str, float], steps: int, mesh: ParallelMesh) -> Timing:
    """Gather the seconds per step of each rank, over `steps` steps, and its memory. Called by all ranks together."""
    axes = mesh.counted
    own = [seconds.get(name, 0.0) / steps for name in (*OF_A_STEP, *map(waiting_on, axes))]
    numbers = torch.tensor([[*own, peak_memory_bytes(mesh.device)]], dtype=torch.float64)
    columns = collectives.all_gather(numbers.to(mesh.device), mesh.world()).t().tolist()
    of_sections, of_axes = columns[: len(OF_A_STEP)], columns[len(OF_A_STEP) : -1]
    return Timing(
        list(zip(*of_sections, strict=True)),
        collectives.all_gather_json(host_name(), mesh),
        dict(zip(axes, of_axes, strict=True)),
        columns[-1],
        shows_waits=not on_gpu(mesh.device),
    )
