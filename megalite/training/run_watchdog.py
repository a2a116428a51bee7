"""The watchdog of a run, from its configuration."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from megalite.checkpoint import AnyPath
from megalite.config import RunConfig
from megalite.process.place import Place
from megalite.training.failure import default_store, report
from megalite.training.meeting import hosted_by_launcher
from megalite.watchdog.limits import Limits
from megalite.watchdog.sections import Sections
from megalite.watchdog.watchdog import Watchdog


def run_watchdog(
    config: RunConfig, sections: Sections, place: Place, directory: AnyPath | None
) -> AbstractContextManager[object]:
    """Within it a run that hangs is ended, and a rank that dies is named; nothing happens under --no-watchdog."""
    if not config.watchdog.watchdog:
        return nullcontext()
    store = default_store()
    if store is not None:
        store = cast(Any, store).clone()  # on a connection of its own: the main thread may be waiting over the other
    return Watchdog(
        sections,
        Limits(config.watchdog.watchdog_min_seconds, 60.0 * config.parallel.distributed_timeout_minutes),
        report,
        place,
        store=store,
        store_is_of_rank_0=not hosted_by_launcher(),
        folder=directory / "hangs" if isinstance(directory, Path) else None,
    )
