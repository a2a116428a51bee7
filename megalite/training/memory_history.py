"""What CUDA's allocator gave and took, and for which line of Python: for docs.pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.config.profiling import ProfilingConfig
from megalite.files import temporary_path

_EVENTS = 100_000  # the last so many are kept, in host memory


class MemoryHistory:
    """Recorded from now on, on this rank. Where memory runs out a snapshot is written at once, before it is freed."""

    def __init__(self, config: ProfilingConfig, rank: int) -> None:
        self._path, self._rank = Path(config.memory_snapshot_path), rank
        self._written = rank in config.profile_ranks
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]

    def write(self) -> None:
        """Replace the snapshot of this rank, where it is one of --profile-ranks. Raises OSError."""
        if self._written:
            self._dump(f"rank_{self._rank}")

    def _out_of_memory(self, device: int, wanted: int, total: int, free: int) -> None:
        self._dump(f"out_of_memory_rank_{self._rank}")

    def _dump(self, what: str) -> None:
        path = self._path.with_stem(f"{self._path.stem}_{what}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        torch.cuda.memory._dump_snapshot(str(temporary))
        temporary.rename(path)
