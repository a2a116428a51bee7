"""Checkpoints in safetensors files with a JSON manifest. A checkpoint can be loaded under any layout.

Tensors are saved under global names, in global coordinates.
"""

from __future__ import annotations

from megalite.checkpoint.compatibility import (
    check_compatible,
    check_same_function,
    indexers_agree,
    model_config,
    same_depths,
    saved_section,
    with_rotary_of,
)
from megalite.checkpoint.directory import Candidates, iteration_of, latest
from megalite.checkpoint.formats import FORMATS
from megalite.checkpoint.loading import load, load_weights, relayout_notes
from megalite.checkpoint.manifest import Manifest, TrainingState, read_config, read_manifest
from megalite.checkpoint.plan import Contents, Plan
from megalite.checkpoint.run_lock import only_run
from megalite.checkpoint.saving import Saver
from megalite.checkpoint.selection import (
    check_whole,
    fall_back_notes,
    find_candidates,
    find_iteration,
    find_iterations,
    newest_whole,
    remove_old,
)

__all__ = [
    "FORMATS",
    "Candidates",
    "Contents",
    "Manifest",
    "Plan",
    "Saver",
    "TrainingState",
    "check_compatible",
    "check_same_function",
    "check_whole",
    "fall_back_notes",
    "find_candidates",
    "find_iteration",
    "find_iterations",
    "indexers_agree",
    "iteration_of",
    "latest",
    "load",
    "load_weights",
    "model_config",
    "newest_whole",
    "only_run",
    "read_config",
    "read_manifest",
    "relayout_notes",
    "remove_old",
    "same_depths",
    "saved_section",
    "with_rotary_of",
]
