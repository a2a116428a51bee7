"""Memory of all ranks by kind, what it grows by with each step, and how far it is beyond what was counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from megalite.extras.corruption.replicas import uncounted
from megalite.extras.monitors.growth import LOOK_INTERVAL, Growth, Used, growth, remember
from megalite.extras.monitors.host_allocator import Allocated, allocated_on_host, resident_bytes
from megalite.parallel import collectives
from megalite.parallel.device import peak_memory_bytes
from megalite.process.host import host_name
from megalite.process.output import in_words
from megalite.run.monitor import Observation
from megalite.run.timing import largest
from megalite.tasks.memory import storages_by_kind
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer
from megalite_kernels.implementation import on_gpu

INTERVAL = 2 * LOOK_INTERVAL
"""Steps between those whose memory is gathered."""
_REMEMBERED = 200
"""Looks that are remembered, to tell since when memory grows."""
_KINDS, _GROWTH, _BEYOND = "memory_bytes", "memory_growth_bytes", "memory_beyond_prediction_bytes"


class MemoryMonitor:
    """Monitor of the memory of all ranks."""

    def __init__(self, trainer: Trainer, counted: int | None) -> None:
        """Begin, before the first step. `counted`: the peak that the start of the run has counted, if it has."""
        self._trainer, self._counted = trainer, counted
        self._hosts: list[str] = collectives.all_gather_json(host_name(), trainer.mesh)
        self._used: deque[Used] = deque(maxlen=_REMEMBERED)
        self._allocated, self._program = self._before()
        """Bytes that are none of the run's tensors, where these are on the host: allocated, and in memory."""
        self._growing: set[int] = set()

    def after_step(self, metrics: StepMetrics) -> Observation:
        """Look at the memory in use, and gather that of all ranks, if it is due. Called by all ranks together."""
        step, device = metrics.iteration, self._trainer.mesh.device
        shows = step % self._trainer.config.logging.log_interval == 0
        if step % LOOK_INTERVAL and not shows:
            return Observation()
        allocated = _allocated(device)
        if step % LOOK_INTERVAL == 0:
            remember(self._used, (step, allocated.used))
        if step % INTERVAL and not shows:
            return Observation()
        kinds, grows = self._kinds(allocated), growth(list(self._used))
        own = [*kinds.values(), self._beyond(), *((grows.per_step, grows.since, grows.total) if grows else (0, 0, 0))]
        numbers = torch.tensor([own], dtype=torch.float64, device=device)
        with uncounted(self._trainer.mesh):
            columns = collectives.all_gather(numbers, self._trainer.mesh.world()).t().tolist()
        *of_kinds, beyond, per_step, since, total = columns
        figures: dict[str, float] = {}
        for kind, of_ranks in zip(kinds, of_kinds, strict=True):
            figures |= largest(f"{_KINDS}/{kind}", of_ranks)
        if self._counted is not None:
            figures |= largest(_BEYOND, beyond)
        figures |= largest(_GROWTH, per_step)
        found = [Growth(*each) for each in zip(per_step, map(int, since), total, strict=True)]
        lines = [
            self._warning(rank, each) for rank, each in enumerate(found) if each.since and rank not in self._growing
        ]
        self._growing = {rank for rank, each in enumerate(found) if each.since}
        return Observation(figures, [*([_line(figures, tuple(kinds))] if shows else []), *lines])

    def _kinds(self, allocated: Allocated) -> Mapping[str, int]:
        """Return the bytes of this rank by kind, after a step."""
        kept, device = self._kept(), self._trainer.mesh.device
        kinds = {**kept, "other": allocated.used - self._allocated - sum(kept.values())}
        if on_gpu(device):
            free, size = torch.cuda.mem_get_info(device)
            kinds["activations"] = torch.cuda.max_memory_allocated(device) - allocated.used
            kinds["communication"] = size - free - sum(allocated)
        return {**kinds, "reserved_but_free": allocated.free}

    def _before(self) -> tuple[int, int]:
        if on_gpu(self._trainer.mesh.device):
            return 0, 0
        kept, (resident, shared) = sum(self._kept().values()), resident_bytes()
        return allocated_on_host().used - kept, resident - shared - kept

    def _kept(self) -> dict[str, int]:
        return {kind: sum(sizes.values()) for kind, sizes in storages_by_kind(self._trainer.optimizer).items()}

    def _beyond(self) -> int:
        """Return by how many bytes the peak so far is more than what was counted."""
        device = self._trainer.mesh.device
        of_program = 0 if on_gpu(device) else self._program + resident_bytes()[1]
        return peak_memory_bytes(device) - of_program - (self._counted or 0)

    def _warning(self, rank: int, found: Growth) -> str:
        return (
            f"WARNING: the memory of rank {rank} ({self._hosts[rank]}) grows by {in_words(found.per_step)} a step, "
            f"since about step {found.since} by {in_words(found.total)}: something keeps memory of each step, as a "
            "list of losses without .item() does"
        )


def _allocated(device: torch.device) -> Allocated:
    """Return what the allocator of a device has given out, and keeps."""
    if not on_gpu(device):
        return allocated_on_host()
    used = torch.cuda.memory_allocated(device)
    return Allocated(used, torch.cuda.memory_reserved(device) - used)


def _line(figures: Mapping[str, float], kinds: tuple[str, ...]) -> str:
    """Return a line for the screen: the most of each kind, and its rank."""
    shown = [
        f"{kind.replace('_', ' ')} {in_words(figures[f'{_KINDS}/{kind}/max'])} (rank "
        f"{figures[f'{_KINDS}/{kind}/max_rank']:.0f})"
        for kind in kinds
    ]
    if f"{_BEYOND}/max" in figures:
        beyond = figures[f"{_BEYOND}/max"]
        shown.append(f"peak {in_words(abs(beyond))} {'more' if beyond > 0 else 'less'} than counted at the start")
    return f"memory, most of all ranks: {', '.join(shown)}"
