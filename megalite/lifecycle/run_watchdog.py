"""Construction of a run's watchdog from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megalite.config.run import TaskConfig
from megalite.lifecycle.failure import report
from megalite.process.launchers import hosted_by_launcher
from megalite.process.place import Place
from megalite.storage import AnyPath
from megalite.watchdog.sections import Limits, Sections
from megalite.watchdog.watchdog import Watchdog, nobody_watches

if TYPE_CHECKING:
    from megalite.torch_internals import Store


def run_watchdog(
    config: TaskConfig, sections: Sections, place: Place, directory: AnyPath | None, store: Store | None
) -> Watchdog | None:
    """Return a context manager that ends a hanging run and names dead ranks; None with --no-watchdog.

    Args:
        store: the store of the rendezvous; None in a run of one process.
    """
    if not config.watchdog.watchdog:
        if store is not None and place.rank == 0:
            nobody_watches(store)
        return None
    if store is not None:
        store = cast(Any, store).clone()  # a separate connection: the main thread may block the other one by waiting
    return Watchdog(
        sections,
        Limits(config.watchdog.watchdog_min_seconds, 60.0 * config.parallel.distributed_timeout_minutes),
        report,
        place,
        store=store,
        store_is_of_rank_0=not hosted_by_launcher(),
        folder=directory / "hangs" if isinstance(directory, Path) else None,
        shared=directory if isinstance(directory, Path) and not place.on_one_machine else None,
    )
