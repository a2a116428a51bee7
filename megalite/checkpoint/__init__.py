"""Checkpoints by global coordinates: safetensors and a JSON manifest, loaded under any layout."""

from __future__ import annotations

from megalite.checkpoint.compatibility import check_compatible, read_model_config
from megalite.checkpoint.directory import latest
from megalite.checkpoint.loading import find_latest, load
from megalite.checkpoint.manifest import Manifest, TrainingState, read_config, read_manifest
from megalite.checkpoint.saving import save

__all__ = [
    "Manifest",
    "TrainingState",
    "check_compatible",
    "find_latest",
    "latest",
    "load",
    "read_config",
    "read_manifest",
    "read_model_config",
    "save",
]
