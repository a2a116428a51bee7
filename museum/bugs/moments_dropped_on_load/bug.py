from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.checkpoint import Manifest
from megalite.training.resume import ResumePoint
from megalite.training.trainer import Trainer
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}"
LAYOUT = "--use-distributed-optimizer"
RANKS = 2
STEPS_BEFORE = 2


def wrong() -> AbstractContextManager[Any]:
    right = Trainer.load

    def load(trainer: Trainer, path: Path, described: Manifest, point: ResumePoint) -> None:
        right(trainer, path, described, replace(point, optimizer=False))

    return mock.patch.object(Trainer, "load", load)
