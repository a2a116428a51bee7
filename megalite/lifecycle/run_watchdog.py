"""Construction of a run's watchdog from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megalite.config import ParallelConfig
from megalite.config.monitoring import WatchdogConfig
from megalite.lifecycle.failure import report
from megalite.lifecycle.launch import connect_ranks, disconnect, locate
from megalite.parallel.mesh import ParallelMesh
from megalite.process.launchers import hosted_by_launcher
from megalite.process.place import Place
from megalite.storage import AnyPath
from megalite.watchdog.sections import MEETING, Limits, Sections
from megalite.watchdog.watchdog import Watchdog, nobody_watches

if TYPE_CHECKING:
    from megalite.torch_internals import Store


@contextmanager
def joined(parallel: ParallelConfig, place: Place, description: str) -> Iterator[ParallelMesh]:
    """Yield the place on the mesh of a process that has no run directory, with a watchdog, connected to all others.

    `description`: the configuration of this rank as lines of text; must be equal on all ranks.
    """
    mesh, sections = locate(parallel, place), Sections()
    with ExitStack() as stack:

        def watch(store: Store | None) -> bool:
            watchdog = run_watchdog(WatchdogConfig(), parallel, sections, place, None, store) if store else None
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
    store: Store | None,
) -> Watchdog | None:
    """Return a context manager that ends a hanging run and names dead ranks; None with --no-watchdog.

    Args:
        settings: the options of the watchdog.
        parallel: the layout, which has the time limit of communication.
        sections: where this rank is.
        place: its number, and those of all.
        directory: the run directory, where dumps are written.
        store: the store of the rendezvous; None in a run of one process.
    """
    if not settings.watchdog:
        if store is not None and place.rank == 0:
            nobody_watches(store)
        return None
    if store is not None:
        store = cast(Any, store).clone()  # a separate connection: the main thread may block the other one by waiting
    return Watchdog(
        sections,
        Limits(settings.watchdog_min_seconds, 60.0 * parallel.distributed_timeout_minutes),
        report,
        place,
        store=store,
        store_is_of_rank_0=not hosted_by_launcher(),
        folder=directory / "hangs" if isinstance(directory, Path) else None,
        shared=directory if isinstance(directory, Path) and not place.on_one_machine else None,
    )
