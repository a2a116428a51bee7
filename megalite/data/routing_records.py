"""Records of routing: the experts that each token of a sample chose, one file per sample in a folder.

The file of sample 12 is `000000000012.npy`; samples are counted in the order in which a run consumes them. It is an
array of whole numbers [tokens, layers, topk], as inference engines return it (`routed_experts`). The layers are those
with experts, or all layers. The router chooses for a token that has -1, and for tokens after the last one of the array.
A run that writes records also writes `run.json`, which tells its records from those of another run.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalite.atomic_files import write_atomically
from megalite.errors import DataError, FileError
from megalite.small_files import read_json

_PARSING = threading.Lock()
"""Lock of a thread that parses the header of a file: in two threads at once, Python 3.11's `ast` may fail."""


@dataclass(frozen=True)
class RoutingRecords:
    """Folder of records for one network.

    Attributes:
        layers: for each layer of the network, whether it has experts.
        experts: number of experts of a layer.
        topk: experts that a token chooses.
        run: what tells the run that writes records from others, in terms of JSON.
    """

    folder: Path
    layers: tuple[bool, ...]
    experts: int
    topk: int
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if there are no files of samples."""
        return not any(self.folder.glob("*.npy"))

    @property
    def may_be_written(self) -> bool:
        """True if the folder has no records, or only those of this run, which may have stopped before its first save.

        A run that saves nothing cannot be told from others.
        """
        if self.is_empty:
            return True
        try:
            return self.run.get("save") is not None and read_json(self._run_path) == self.run
        except (OSError, FileError, ValueError):
            return False

    @property
    def _run_path(self) -> Path:
        return self.folder / "run.json"

    def path(self, sample: int) -> Path:
        return self.folder / f"{sample:012d}.npy"

    def write_run(self) -> None:
        """Write what tells this run from others. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._run_path, json.dumps(self.run, indent=1).encode())

    def require(self, sample: int) -> None:
        """Raise DataError unless there is a record of this sample."""
        if not self.path(sample).is_file():
            raise DataError(f"{self.path(sample)} is missing: --moe-replay-routing needs a file for each sample")

    def read(self, sample: int, length: int) -> np.ndarray:
        """Return the choices of a sample of `length` tokens: [length, layers with experts, topk] int64.

        Raises DataError if they are missing or not possible.
        """
        path = self.path(sample)
        try:
            self.require(sample)
            with _PARSING:
                found: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # so no header can ask for memory
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            raise DataError(f"{path} is not a record of routing: {error}") from error
        counts = {len(self.layers), sum(self.layers)}
        if (
            found.ndim != 3
            or found.dtype.kind not in "iu"
            or found.shape[0] > length
            or found.shape[1] not in counts
            or found.shape[2] != self.topk
        ):
            layers = " or ".join(map(str, sorted(counts)))
            raise DataError(
                f"{path} has {found.dtype} {list(found.shape)}, but the samples of this network have whole numbers "
                f"[{length} or fewer tokens, {layers} layers, {self.topk} experts]"
            )
        if found.shape[1] != sum(self.layers):
            found = found[:, list(self.layers)]
        choices = np.full((length, sum(self.layers), self.topk), -1, dtype=np.int64)
        choices[: len(found)] = found
        self._check(path, choices)
        return choices

    def _check(self, path: Path, choices: np.ndarray) -> None:
        """Raise DataError unless each row has -1 alone, or different experts."""
        ordered = np.sort(choices, axis=-1)
        possible = (ordered[..., 0] >= 0) & (ordered[..., -1] < self.experts)
        possible &= (ordered[..., 1:] > ordered[..., :-1]).all(axis=-1)
        possible |= (choices == -1).all(axis=-1)
        if not possible.all():
            token, layer = np.argwhere(~possible)[0]
            number = np.flatnonzero(self.layers)[layer]
            raise DataError(
                f"{path}: token {token} has the experts {choices[token, layer].tolist()} in layer {number}, but it "
                f"needs {self.topk} different ones from 0 to {self.experts - 1}, or -1 alone"
            )

    def write(self, sample: int, choices: np.ndarray) -> None:
        """Write the choices of a sample, [tokens, layers with experts, topk]. Raises OSError."""
        file = io.BytesIO()
        np.save(file, choices.astype(np.int16 if self.experts < 2**15 else np.int32), allow_pickle=False)
        write_atomically(self.path(sample), file.getvalue())
