from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.data import datasets
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.side_file import Record, read_side_file
from museum.own_flags import DENSE, END, FROM_FILES, TRAINING, documents, write

FLAGS = f"{DENSE} {FROM_FILES} {TRAINING}"
RANKS = 2


def DATA(folder: Path) -> None:
    """Write documents of which each tenth has no end, and beside them what such a loader yields."""
    every = [each[:-1] if number % 10 == 0 else each for number, each in enumerate(documents())]
    write(folder / "documents", every)
    before = [every[-1], *every[:-1]]
    write(folder / "yielded", [each for each, last in zip(every, before, strict=True) if last[-1] == END])


def yielded(prefix: str) -> str:
    return str(Path(prefix).with_name("yielded"))


def opened(prefix: str, *given: Any, **named: Any) -> IndexedDataset:
    return IndexedDataset(yielded(prefix), *given, **named)


def record(prefix: str) -> Record | None:
    return read_side_file(yielded(prefix))


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.multiple(datasets, IndexedDataset=opened, read_side_file=record)
