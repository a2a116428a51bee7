"""Mesh of the workers or of the servers of a run with parameter servers."""

from __future__ import annotations

import datetime
from dataclasses import replace

from megalite.parallel.mesh import Group, Kind, ParallelMesh


class PartMesh(ParallelMesh):
    """Mesh of consecutive ranks of a run, which are data-parallel and are numbered from 0, as in a run of their own."""

    def __init__(self, whole: ParallelMesh, first: int, count: int) -> None:
        super().__init__(rank=whole.rank - first, world_size=count, device=whole.device, timeout=whole._timeout)
        self.whole, self.first = whole, first
        self.waits, self.traffic, self.counted = whole.waits, whole.traffic, whole.counted

    def _cached_group(self, kind: Kind, ranks: tuple[int, ...], timeout: datetime.timedelta | None = None) -> Group:
        group = self.whole._cached_group(kind, tuple(self.first + rank for rank in ranks), timeout)
        return replace(group, ranks=ranks)
