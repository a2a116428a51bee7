"""Layout of a run that its flags leave open, written out before it is checked."""

from __future__ import annotations

from megalite.config import RunConfig
from megalite.config.pipeline_layout import is_automatic
from megalite.extras.planner.device_classes import require_valid_classes, with_device_classes


def with_written_layout(config: RunConfig, world_size: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return a run with the text of its classes of devices and the letters of its stages, and notes on these.

    Raises:
        ConfigurationError: see `with_device_classes`, `with_stages` and `require_valid_classes`.
    """
    notes: tuple[str, ...] = ()
    if config.parallel.device_classes is not None:
        config = with_device_classes(config, world_size)
    if is_automatic(config.parallel):
        from megalite.extras.planner.stage_layout import with_stages  # imports torch

        config, notes = with_stages(config, world_size)
    if config.parallel.device_classes is not None:
        require_valid_classes(config, world_size)
    return config, notes
