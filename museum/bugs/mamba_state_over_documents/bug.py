from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.model.recurrent import Run
from megalite_kernels.recurrence import Segment
from museum.own_flags import FROM_FILES, MAMBA, TRAINING, write_documents

FLAGS = f"{MAMBA} {FROM_FILES} {TRAINING} --reset-attention-mask"
LAYOUT = "--context-parallel-size 2"
RANKS = 2
DATA = write_documents


def wrong() -> AbstractContextManager[Any]:
    whole = property(lambda run: [Segment(tokens, None) for tokens in run.context.layout.runs])
    return mock.patch.object(Run, "segments", whole)
