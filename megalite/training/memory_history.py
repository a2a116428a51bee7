"""History of CUDA's allocator, with the lines of Python that asked: for docs.pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path

from megalite.atomic_files import temporary_path
from megalite.config.monitoring import ProfilingConfig
from megalite.torch_internals import dump_memory, record_memory

_EVENTS = 100_000  # the last so many are kept, in host memory


def record_memory_history(config: ProfilingConfig, rank: int) -> None:
    """Start recording on this rank. When memory runs out, a snapshot is written at once, before any of it is freed."""

    def out_of_memory(device: int, wanted: int, total: int, free: int) -> None:
        _dump(config, f"out_of_memory_rank_{rank}")

    record_memory(_EVENTS, out_of_memory)


def write_snapshot(config: ProfilingConfig, rank: int) -> str | None:
    """Replace the snapshot of this rank, where it is one of --profile-ranks. Returns what to tell where that fails."""
    try:
        if rank in config.profile_ranks:
            _dump(config, f"rank_{rank}")
    except OSError as error:
        return f"WARNING: --memory-snapshot-path {config.memory_snapshot_path} cannot be written: {error.strerror}"
    return None


def _dump(config: ProfilingConfig, what: str) -> None:
    path = Path(config.memory_snapshot_path)
    path = path.with_stem(f"{path.stem}_{what}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    dump_memory(str(temporary))
    temporary.rename(path)
