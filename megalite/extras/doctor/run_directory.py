"""Check that the run directory is the same for all nodes, is writable, and has room for checkpoints."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.checkpoint.manifest import is_optimizer_state
from megalite.checkpoint.run_lock import SEEN_WITHIN
from megalite.config import ParallelConfig, RunConfig
from megalite.config.synchronization import SynchronizationConfig
from megalite.extras.doctor.findings import Finding
from megalite.parallel.mesh import ParallelMesh
from megalite.process.bounded import within
from megalite.process.output import in_words
from megalite.storage import AnyPath, write_atomically
from megalite.training.builder import make_chunks, make_plan, make_stages
from megalite.training.data import open_tokenizer, vocab_size

_REMOVING_SECONDS = 5.0


class Probe:
    """File that rank 0 puts into the run directory for all nodes to find."""

    def __init__(self, directory: AnyPath) -> None:
        """Write the file. Raises OSError or FileError if the directory cannot be written to."""
        self._directory = directory
        self._made = isinstance(directory, Path) and not directory.exists()
        self.name, self.text = f"doctor_{uuid.uuid4().hex}", uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / self.name, self.text.encode())

    def remove(self) -> None:
        """Remove the file, and the directory if it was made for the file."""
        with suppress(OSError, TimeoutError):  # a file system that does not answer has already been reported
            within(_REMOVING_SECONDS, self._remove)

    def _remove(self) -> None:
        (self._directory / self.name).unlink()
        if self._made and isinstance(self._directory, Path):
            self._directory.rmdir()


@dataclass(frozen=True)
class Seen:
    """Run directory, as seen by one node."""

    same: bool
    """True if the node sees the probe."""
    free: int | None = None
    """Free bytes; None: on an object store, or if there is no directory."""
    problem: str = ""
    """Reason that the node cannot write there."""


def look(directory: AnyPath, name: str, text: str) -> Seen:
    """Look at a directory in which rank 0 has put a probe, and return what this node sees."""
    deadline = time.monotonic() + SEEN_WITHIN
    while True:
        with suppress(OSError):
            if (directory / name).read_bytes() == text.encode():
                break
        if time.monotonic() > deadline:
            return Seen(False)
        time.sleep(0.1)
    own = directory / f"{name}_{os.getpid()}"
    try:
        write_atomically(own, text.encode())
        own.unlink()
    except Exception as error:  # any kind of error, from a file system or an object store
        return Seen(True, problem=str(error))
    return Seen(True, shutil.disk_usage(directory).free if isinstance(directory, Path) else None)


def examine_run_directory(
    save: str, seen: Mapping[str, Seen], checkpoint_size: int | None, checkpoints: int
) -> Iterator[Finding]:
    """Yield what is wrong with `--save`, from each node's view of it, rank 0's first."""
    blind = [node for node, each in seen.items() if not each.same]
    if 1 < len(blind) == len(seen) - 1:
        nodes = ", ".join(blind)
        yield Finding("wrong", f"--save {save} is not one directory: {nodes} do not see what rank 0 writes there")
        blind = []
    for node in blind:
        yield Finding("sick", f"--save {save} is another directory here: is its file system mounted?", node)
    for node, each in seen.items():
        if each.problem:
            yield Finding("sick", f"--save {save} cannot be written to: {each.problem}", node)
    free = [each.free for each in seen.values() if each.free is not None]
    if free and checkpoint_size is not None and min(free) < checkpoints * checkpoint_size:
        needed = f"{checkpoints} checkpoints take {in_words(checkpoints * checkpoint_size)}"
        advice = "free space there, or keep fewer (--save-retain-interval, and --checkpoints here)"
        yield Finding("wrong", f"--save {save} has {in_words(min(free))} free, and {needed}: {advice}")


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the size of one checkpoint of the run, which does not depend on the layout: the network is built on the
    meta device.

    Raises DataError or ConfigurationError, as the run would, if its tokenizer cannot be opened.
    """
    config = replace(config, parallel=ParallelConfig(), synchronization=SynchronizationConfig())
    model = replace(config.model, vocab_size=vocab_size(open_tokenizer(config), config.model))
    stages, mesh = make_stages(config), ParallelMesh(device=torch.device("meta"))
    plan = make_plan(config, lambda at: make_chunks(config, model, at, stages), mesh, stages)
    with_state = config.checkpoint.save_optim
    return sum(part.size for part in plan.saved(0) if with_state or not is_optimizer_state(part.name))
