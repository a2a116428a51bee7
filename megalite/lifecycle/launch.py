"""Connection of the processes of a run: their places on the mesh, process group and watchdog, and equal flags."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megalite import torch_internals
from megalite.config import ParallelConfig
from megalite.config.monitoring import WatchdogConfig
from megalite.errors import CommunicationError, ConfigurationError
from megalite.lifecycle.failure import report
from megalite.parallel import device
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.process.host import too_many_open_files
from megalite.process.launchers import hosted_by_launcher, starts_again
from megalite.process.place import Place
from megalite.storage import AnyPath
from megalite.watchdog.sections import MEETING, Limits, Sections
from megalite.watchdog.watchdog import Watchdog, nobody_watches

if TYPE_CHECKING:
    from megalite.mailbox import Mailbox


def locate(parallel: ParallelConfig, place: Place) -> ParallelMesh:
    """Return this process's place on the mesh, without communication.

    Raises ConfigurationError if the flags do not fit the number of ranks or the device.
    """
    where = device.local_device(place.local_rank)
    device.activate(where)
    mesh = ParallelMesh(
        rank=place.rank,
        world_size=place.world_size,
        **parallel.mesh_sizes,
        device=where,
        timeout=_timeout(parallel),
    )
    backend = _backend(parallel, mesh)
    if backend == "nccl" and not (where.type == "cuda" and dist.is_nccl_available()):
        raise ConfigurationError(f"--distributed-backend nccl connects only GPUs, but this run is on {where}: use gloo")
    if where.type == "cuda":
        require_sends(backend, parallel.pipeline_model_parallel_size)
    return mesh


def require_sends(backend: str, stages: int) -> None:
    """Raise ConfigurationError if a communication library cannot send between the GPUs of so many stages."""
    if backend == "gloo" and stages > 1:
        raise ConfigurationError("--distributed-backend gloo cannot send from GPU to GPU, as stages must: use nccl")


def connect_ranks(
    parallel: ParallelConfig,
    place: Place,
    mesh: ParallelMesh,
    description: str,
    watch: Callable[[Mailbox | None], bool] = lambda mailbox: False,
) -> None:
    """Wait for all ranks and start the process group, unless the program has one. A run of one process has no group.

    Args:
        description: the configuration of this rank as lines of text; must be equal on all ranks.
        watch: called with the mailbox before this rank waits for others, or with None in a run of one process. Returns
            True if it will detect the death of rank 0.

    Raises:
        ConfigurationError: the description of some rank differs from rank 0's. Raised on every rank.
        CommunicationError: the other ranks cannot be reached; RendezvousError if some did not come.
    """
    timeout = _timeout(parallel)
    if place.world_size == 1:
        watch(None)
        return
    from megalite.lifecycle import rendezvous  # imported here: a process alone meets nobody
    from megalite.mailbox import Mailbox

    if dist.is_initialized():
        watch(Mailbox(torch_internals.default_store(), place.world_size, timeout.total_seconds()))
        _compare(description, mesh)
    else:
        mailbox = rendezvous.connect(place, timeout.total_seconds(), rendezvous.PURPOSE)
        rendezvous.wait_for_all_ranks(mailbox, place, timeout.total_seconds(), partial(watch, mailbox))
        backend = _backend(parallel, mesh)
        try:
            store = mailbox.store
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
            _compare(description, mesh)
        except RuntimeError as error:
            if "oo many open files" in str(error):
                raise too_many_open_files(str(error)) from error
            raise CommunicationError(
                f"the {place.world_size} ranks have met at {rendezvous.store_name(place)}, but cannot reach each "
                f"other: {error}"
            ) from error


def _timeout(parallel: ParallelConfig) -> datetime.timedelta:
    return datetime.timedelta(minutes=parallel.distributed_timeout_minutes)


def _backend(parallel: ParallelConfig, mesh: ParallelMesh) -> str:
    return parallel.distributed_backend or device.default_backend(mesh.device)


def _compare(description: str, mesh: ParallelMesh) -> None:
    """Raise ConfigurationError on all ranks if their descriptions differ.

    Uses only the world group: ranks that were started with different layouts share no other group.
    """
    digests = all_gather_json(hashlib.blake2b(description.encode(), digest_size=16).hexdigest(), mesh)
    lowest = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if lowest is not None:
        texts = all_gather_json(description if mesh.rank in (0, lowest) else "", mesh)
        theirs, first = (texts[rank].splitlines() for rank in (lowest, 0))
        pairs = [(a.strip(), b.strip()) for a, b in zip_longest(theirs, first, fillvalue="nothing") if a != b]
        raise ConfigurationError(
            f"rank {lowest} was started with other flags than rank 0: "
            + "; ".join(f"{a!r} there, {b!r} on rank 0" for a, b in pairs)
        )


def disconnect(mesh: ParallelMesh, *, all_groups: bool = True) -> None:
    """Destroy the process groups at the end of a run. `all_groups`: that of all ranks, too."""
    if mesh.world_size > 1 and not dist.is_initialized():  # the program has destroyed all groups
        return
    mesh.close()
    if all_groups and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(parallel: ParallelConfig, place: Place, description: str) -> Iterator[ParallelMesh]:
    """Yield the place on the mesh of a process that has no run directory, with a watchdog, connected to all others.

    `description`: the configuration of this rank as lines of text; must be equal on all ranks.
    """
    mesh, sections = locate(parallel, place), Sections()
    with ExitStack() as stack:

        def watch(mailbox: Mailbox | None) -> bool:
            watchdog = run_watchdog(WatchdogConfig(), parallel, sections, place, None, mailbox) if mailbox else None
            return watchdog is not None and stack.enter_context(watchdog).linked

        with sections(MEETING):
            connect_ranks(parallel, place, mesh, description, watch)
        yield mesh
    disconnect(mesh)


def run_watchdog(
    settings: WatchdogConfig,
    parallel: ParallelConfig,
    sections: Sections,
    place: Place,
    directory: AnyPath | None,
    mailbox: Mailbox | None,
) -> Watchdog | None:
    """Return a context manager that ends a hanging run and names dead ranks; None with --no-watchdog.

    Args:
        settings: the options of the watchdog.
        parallel: the layout, which has the time limit of communication.
        sections: where this rank is.
        place: its number, and those of all.
        directory: the run directory, where dumps are written.
        mailbox: that of the rendezvous; None in a run of one process.
    """
    if not settings.watchdog:
        if mailbox is not None and place.rank == 0:
            nobody_watches(mailbox)
        return None
    return Watchdog(
        sections,
        Limits(settings.watchdog_min_seconds, 60.0 * parallel.distributed_timeout_minutes, starts_again()),
        report,
        place,
        mailbox=None if mailbox is None else mailbox.clone(),  # for other threads
        store_is_of_rank_0=not hosted_by_launcher(),
        folder=directory / "hangs" if isinstance(directory, Path) else None,
        shared=directory if isinstance(directory, Path) and not place.on_one_machine else None,
    )
