"""Receivers of exported weights: a folder, and the update calls of vLLM and SGLang. `weight_link.py` has the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.atomic_files import new_folder, open_itself
from megalite.checkpoint.file_writer import create_files
from megalite.checkpoint.formats import Format, Placed
from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.shard_file import bytes_of, write_index
from megalite.checkpoint.tensors import Kind
from megalite.conversion.huggingface import weight_files, write_related
from megalite.errors import CheckpointError, CommunicationError
from megalite.process.bounded import in_thread

BOX = 1 << 25
"""Size in bytes of a box of a tensor. One row may be larger."""
SECONDS = 600.0
"""Time limit of a phase of an update, of a send or a receive."""
GROUP = 1 << 29
"""Size in bytes of a group of whole tensors. One tensor may be larger."""


class Receiver(Protocol):
    """Receiver of tensors under Hugging Face's names. Only rank 0 calls it."""

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        """Expect these tensors, in this order. `config`: the content of the model's config.json."""

    def box(self, name: str, row: int, values: Tensor) -> None:
        """Take the rows of a tensor from `row` on. They come in order. `values` is on the device of the training."""

    def finish(self) -> None:
        """Complete the work. All boxes have come."""

    def abandon(self) -> None:
        """Remove what is incomplete, after an error."""


def row_ranges(kind: Kind) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows of a tensor's boxes, (first, one past the last)."""
    rows = kind.shape[0]
    step = max(BOX // max(kind.size // max(rows, 1), 1), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


class FolderReceiver:
    """Hugging Face folder, which appears complete or not at all, with the same files as `convert` writes."""

    def __init__(self, folder: Path, *, shard: int = 5 * 10**9, companions: Path | None = None) -> None:
        """Set the place.

        `shard`: maximum size of a file in bytes. `companions`: folder whose tokenizer files are copied.
        """
        self._folder, self._shard, self._companions = folder.absolute(), shard, companions
        self._writing = ExitStack()
        self._places: dict[str, tuple[Path, int, int]] = {}
        """File, first byte, and bytes per row of each tensor."""

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        """Create the files under a temporary name. Raises CheckpointError if the folder exists and is not empty."""
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise CheckpointError(f"{self._folder} already exists: choose another folder")
        self._config = config
        self._temporary = self._writing.enter_context(new_folder(self._folder))
        shards, self._format = weight_files(tensors, self._shard)
        self._placed: Placed = create_files(tensors, self._temporary, shards, self._format)
        for file, parts in self._placed.items():
            for part, byte_range in parts:
                row = part.size // max(part.shape[0], 1)
                self._places[part.name] = self._temporary / file, byte_range.start, row

    _config: Mapping[str, Any]
    _temporary: Path
    _format: Format

    def box(self, name: str, row: int, values: Tensor) -> None:
        """Write rows into their file."""
        file, start, size = self._places[name]
        with open_itself(file, "r+b") as stream:
            stream.seek(start + row * size)
            stream.write(bytes_of(values.cpu().contiguous()))

    def finish(self) -> None:
        """Write the index and config.json, and rename the folder."""
        with self._writing:
            for file in self._placed:
                with open_itself(self._temporary / file, "r+b") as stream:
                    os.fsync(stream.fileno())
            write_index(self._temporary, self._format, self._placed)
            write_related(self._temporary, self._config, {}, self._companions)

    def abandon(self) -> None:
        """Remove the temporary folder."""
        with suppress(CheckpointError), self._writing:
            raise CheckpointError("the export was abandoned")


class TensorGroups:
    """Receiver that hands over whole tensors in groups of bounded size. Subclasses say to whom."""

    def __init__(self, most_bytes: int = GROUP) -> None:
        """`most_bytes`: size of a group. A larger tensor is a group of its own."""
        self._most = most_bytes
        self._group: list[tuple[str, Tensor]] = []
        self._bytes = 0

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        """Expect these tensors."""
        self._kinds = tensors
        self._group, self._bytes = [], 0

    def box(self, name: str, row: int, values: Tensor) -> None:
        """Add rows to their tensor. A tensor that no longer fits into the group ends it."""
        kind = self._kinds[name]
        if row == 0:
            if self._group and self._bytes + kind.size > self._most:
                self._hand_over(last=False)
            self._group.append((name, torch.empty(kind.shape, dtype=kind.dtype, device=values.device)))
            self._bytes += kind.size
        self._group[-1][1][row : row + len(values)] = values

    def finish(self) -> None:
        """Hand over the last group."""
        self._hand_over(last=True)

    def abandon(self) -> None:
        """Forget the group. The engine may have some of the new weights: only a complete export makes them whole."""
        self._group = []

    def _hand_over(self, *, last: bool) -> None:
        group, self._group, self._bytes = self._group, [], 0
        self.update(group, last=last)

    def update(self, group: list[tuple[str, Tensor]], *, last: bool) -> None:
        """Hand over a group. `last`: True for the last one of the export."""
        raise NotImplementedError


class _UpdatedInPhases(Protocol):
    def init_weight_transfer_engine(self, request: dict[str, Any]) -> object:
        """Join the group of the transfer. Returns when the training has joined it, too."""

    def start_weight_update(self) -> object:
        """Get ready for an update."""

    def update_weights(self, request: dict[str, Any]) -> object:
        """Receive the tensors that the request names, in its order, from the group."""

    def finish_weight_update(self) -> object:
        """Use the new weights."""


class VLLMReceiver(TensorGroups):
    """Update of a vLLM engine in its four phases: init, before the first export, then start, update and finish.

    `update_weights` names a group of tensors and runs in a thread, while `send` passes their values, one after the
    other, to the group of the transfer.
    """

    def __init__(
        self,
        engine: _UpdatedInPhases,
        connect: Callable[[], Callable[[Tensor], object]],
        init_info: Mapping[str, Any],
        most_bytes: int = GROUP,
        seconds: float = SECONDS,
    ) -> None:
        """Set the engine.

        `connect`: joins the group of the transfer, and returns `send`. `init_info`: what the engine needs to join it,
        such as master_address, master_port, rank_offset and world_size. `seconds`: time limit of a phase.
        """
        super().__init__(most_bytes)
        self._engine, self._connect, self._init_info, self._seconds = engine, connect, init_info, seconds
        self._send: Callable[[Tensor], object] | None = None
        self._broken = False

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        """Join the group of the transfer, unless an export before has, and start an update."""
        if self._broken:
            raise CommunicationError(
                "an export to this vLLM has failed, and may have left it waiting for tensors: start the engine again"
            )
        if self._send is None:
            request, connected = {"init_info": dict(self._init_info)}, in_thread(self._connect)
            joined = in_thread(lambda: self._engine.init_weight_transfer_engine(request))
            self._await("join the group of the transfer", joined, connected)
            self._send = connected.result()
        self._await("get ready", in_thread(self._engine.start_weight_update))
        super().begin(tensors, config)

    def abandon(self) -> None:
        """Forget the group. The engine may still wait for tensors, so it takes no further export."""
        super().abandon()
        self._broken = True

    def update(self, group: list[tuple[str, Tensor]], *, last: bool) -> None:
        """Send a group. Raises CommunicationError if the engine does not take it in time."""
        send = self._send
        assert send is not None
        info = {
            "names": [name for name, _ in group],
            "dtype_names": [dtype_name(tensor.dtype) for _, tensor in group],
            "shapes": [list(tensor.shape) for _, tensor in group],
        }
        taken = in_thread(lambda: self._engine.update_weights({"update_info": info}))

        def send_all() -> None:
            for _, tensor in group:
                with torch.cuda.device_of(tensor):  # a thread begins on the first device
                    send(tensor)

        sent = in_thread(send_all)
        self._await(f"take {group[0][0]} and {len(group) - 1} more tensors", taken, sent)
        if last:
            self._await("use the new weights", in_thread(self._engine.finish_weight_update))

    def _await(self, words: str, *phases: Future[Any]) -> None:
        """Wait for the engine and then this side of a phase. If one fails, its error is raised; the engine's first."""
        waiting = wait(phases, self._seconds, return_when=FIRST_EXCEPTION).not_done
        for phase in phases:
            if phase.done():
                phase.result()
        if waiting:
            raise CommunicationError(f"vLLM does not {words} within {self._seconds:.0f} s: its own log says why")


class _UpdatedByTensors(Protocol):
    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> object:
        """Update weights."""


class SGLangReceiver(TensorGroups):
    """Update of an SGLang engine: `Engine.update_weights_from_tensor(named_tensors, load_format, flush_cache)`.

    The engine's cache of prefixes is flushed with the last group only. A folder from `FolderReceiver` is what
    `Engine.update_weights_from_disk(model_path)` reads.
    """

    def __init__(self, engine: _UpdatedByTensors, most_bytes: int = GROUP) -> None:
        super().__init__(most_bytes)
        self._engine = engine

    def update(self, group: list[tuple[str, Tensor]], *, last: bool) -> None:
        """Update a group. Raises CheckpointError if the engine reports that it failed."""
        answer = self._engine.update_weights_from_tensor(named_tensors=group, load_format=None, flush_cache=last)
        if isinstance(answer, tuple) and answer and not answer[0]:
            raise CheckpointError(f"SGLang did not take {group[0][0]} and {len(group) - 1} more tensors: {answer[1:]}")
