from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.data.loader import MicroBatchArrays, MicroBatchLoader
from megalite.data.sampler import Deal
from museum.own_flags import DENSE, FROM_FILES, TRAINING, write_documents

FLAGS = f"{DENSE} {FROM_FILES} {TRAINING}"
RANKS = 2
STEPS_BEFORE = 2
DATA = write_documents


def wrong() -> AbstractContextManager[Any]:
    right = MicroBatchLoader.micro_batches

    def micro_batches(loader: MicroBatchLoader, consumed: int, deal: Deal) -> list[MicroBatchArrays]:
        return right(loader, consumed - 8, deal)

    return mock.patch.object(MicroBatchLoader, "micro_batches", micro_batches)
