"""Refusal of a folder that has no checkpoint, before torch is imported; it names folders near it that have one."""

from __future__ import annotations

import os
import time
from difflib import SequenceMatcher
from pathlib import Path

from megalite.config.checkpoint import CheckpointConfig, checkpoints_in, is_url
from megalite.config.run import RunConfig
from megalite.errors import ConfigurationError

_FOLDERS, _NAMED = 200, 4
"""Number of folders that are looked into, and of those that a message names."""
_SECONDS = 2.0
"""Time after which no further folder is looked into: one of a cluster's file system may have very many files."""
_NAMES = ("manifest.json", ".metadata", "config.json", "adapter_config.json", "latest_checkpointed_iteration.txt")


def require_checkpoints(config: RunConfig) -> None:
    """Raise ConfigurationError if a run would find nothing where it begins, or in a folder of another model."""
    require_load(config.checkpoint)
    if (teacher := config.distillation.distill_from) is not None:
        require_checkpoint(teacher, "--distill-from")
    if (reference := config.preferences.reference_model) is not None:
        require_checkpoint(reference, "--reference-model")


def require_load(settings: CheckpointConfig) -> None:
    """Look into --load, unless that is the folder that the run saves to, or into the run that it branches from."""
    if settings.resume == "auto" and settings.save is not None and _may_have_checkpoint(settings.save):
        return
    if (branch := settings.branch) is not None:
        require_checkpoint(branch.run, "--branch-from")
    elif settings.load is not None and not settings.loads_where_it_saves:
        require_checkpoint(settings.load)


def require_checkpoint(load: str, flag: str = "--load") -> None:
    """Raise ConfigurationError if a flag's folder has nothing that looks like a checkpoint. URLs are not looked at."""
    if not _may_have_checkpoint(load):
        raise ConfigurationError(no_checkpoint(load, flag))


def no_checkpoint(load: str, flag: str = "--load") -> str:
    """Return the message that the folder of a flag has no checkpoint, with folders near it that have one."""
    near = [] if is_url(load) else folders_near(Path(load))
    why = f"{flag} {load} {'has no checkpoint' if is_url(load) or os.path.isdir(load) else 'is no folder'}"
    return f"{why}; there are some in {', '.join(near)}" if near else f"{why}: give the --save of a training"


def _may_have_checkpoint(load: str) -> bool:
    if is_url(load):
        return True
    try:
        names = os.listdir(load)
    except (OSError, ValueError):
        return os.path.isdir(load)  # what cannot be read is reported where it is read
    return any(name.startswith("iter_") or name in _NAMES for name in names) or Path(load).name.startswith("iter_")


def folders_near(load: Path) -> list[str]:
    """Return folders with checkpoints: in the folder, beside it, or beside the first of its parents that exists."""
    start = next((place for place in (load, *load.parents) if os.path.isdir(place)), Path())
    places = [(start, 2), (start.parent, 1)] if start == load else [(start, 2)]
    found, end = list[str](), time.monotonic() + _SECONDS
    for place, depth in places:  # grows meanwhile
        if time.monotonic() > end:
            break
        try:
            if checkpoints_in(place) == "megalite" or any(place.glob("model*.safetensors")):
                found.append(str(place))
            elif depth and len(places) < _FOLDERS:
                below = [each for each in place.iterdir() if each.is_dir() and not each.name.startswith(".")]
                places += [(each, depth - 1) for each in sorted(below)][:_FOLDERS]
        except OSError:
            continue  # a folder of somebody else
    likeness = {each: SequenceMatcher(None, each, str(load)).ratio() for each in found}
    return sorted(likeness, key=lambda each: -likeness[each])[:_NAMED]
