"""Time that ranks spend in the sections of a step, and the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.process.host import host_name
from megalite.watchdog.sections import OF_A_STEP, WAITING


@dataclass(frozen=True)
class Timing:
    """Host seconds per step in each section, by rank. A rank that others wait for spends more time on its own work."""

    seconds: Sequence[Sequence[float]]
    """[rank][section of OF_A_STEP]"""
    hosts: Sequence[str]

    def figures(self) -> dict[str, float]:
        """Return metrics: the median over ranks of each section, and the slowest rank with its time of work."""
        medians = {f"iteration_time_s/{name.replace(' ', '_')}": median for name, median in self._medians().items()}
        slowest = self._slowest()
        return medians | {
            "iteration_time_s/slowest_rank": float(slowest),
            "iteration_time_s/slowest_rank_work": self._work(slowest),
        }

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


def gather_timing(seconds: Mapping[str, float], steps: int, mesh: ParallelMesh) -> Timing:
    """Gather the seconds per step of each rank, over `steps` steps. Called by all ranks together."""
    own = torch.tensor([[seconds.get(name, 0.0) / steps for name in OF_A_STEP]], dtype=torch.float64)
    gathered = collectives.all_gather(own.to(mesh.device), mesh.world())
    return Timing(gathered.tolist(), collectives.all_gather_json(host_name(), mesh))
