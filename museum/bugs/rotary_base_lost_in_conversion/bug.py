from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.conversion import huggingface
from megalite.conversion.huggingface_files import read_config
from museum.own_flags import DENSE, MADE_UP, TRAINING

HUGGINGFACE = f"{DENSE} --rotary-base 500000"
FLAGS = f"--use-checkpoint-args {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    def without(folder: Path) -> dict[str, Any]:
        return {key: value for key, value in read_config(folder).items() if key != "rope_theta"}

    return mock.patch.object(huggingface, "read_config", without)
