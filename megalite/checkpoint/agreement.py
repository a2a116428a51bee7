"""Work that fails on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from megalite.errors import CheckpointError, MegaliteError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh

_EXPECTED = (OSError, SafetensorError, MegaliteError)  # anything else is a defect and keeps its traceback


@contextmanager
def together(mesh: ParallelMesh, doing: str, advice: str = "") -> Iterator[None]:
    """Run the block on every rank; where it fails on one, no other waits for a rank that has gone.

    Raises CheckpointError with the same message on every rank: what was being done (`doing`), on which rank, the lowest
    that failed, and why, and `advice`. The block itself must not communicate.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    message = None if failure is None else f"{doing} failed{_where(mesh)}: {_describe(failure)}"
    messages = [json.loads(text) for text in all_gather_text(json.dumps(message), mesh)]
    if failure is not None and not isinstance(failure, _EXPECTED):
        raise failure
    failed = [message for message in messages if message is not None]
    if failed:
        raise CheckpointError(f"{failed[0]}\n{advice}" if advice else failed[0]) from failure


def _where(mesh: ParallelMesh) -> str:
    return f" on rank {mesh.rank}" if mesh.world_size > 1 else ""


def _describe(failure: Exception) -> str:
    return str(failure) if isinstance(failure, _EXPECTED) else f"{type(failure).__name__}: {failure}"


def all_gather_text(text: str, mesh: ParallelMesh) -> list[str]:
    """The text of every rank, in rank order, on every rank; it must not be empty."""
    return collectives.all_gather_text(text, mesh.world(), mesh.device)
