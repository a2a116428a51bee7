"""The manifest of a checkpoint: which box of which tensor stands in which file, and what run it came from.

One JSON object with a checksum of its own. Version 1:

    format, version   "megalite", 1
    training          iteration, consumed_samples, optimizer_steps, loss_scale, seen_samples
    config            the run's configuration, by section
    files             size in bytes by file name
    tensors           by name: shape, dtype and boxes; of a box: offset, size, file and checksum (CRC-32 of its bytes)
    checksum          CRC-32 of all of the above

Names are `model/NAME` for a weight and `optimizer/STATE/NAME` for the state that stands for it, NAME the logical
tensor's. Shapes are those of the mathematics: nothing of the layout that saved it shows but how the boxes are cut.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megalite.checkpoint.storage import AnyPath
from megalite.errors import CheckpointError, DamagedCheckpointError
from megalite.parallel.sharding import Box

NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands; everything else follows from it and the configuration."""

    iteration: int
    consumed_samples: int
    optimizer_steps: int
    """Updates made; a skipped step is none."""
    loss_scale: dict[str, Any] | None = None
    """The state of a dynamic loss scale."""
    seen_samples: list[tuple[int, int]] | None = None
    """Numbers of some samples consumed, each with a checksum of its tokens: they tell a changed order of the data."""


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor, and where it is."""

    tensor: str
    box: Box
    file: str
    checksum: int

    @property
    def entry(self) -> str:
        """Its name in its safetensors file."""
        return entry(self.tensor, self.box)


@dataclass(frozen=True)
class SavedTensor:
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[SavedBox, ...]
    """Together the whole tensor, each element once."""


@dataclass(frozen=True)
class Manifest:
    training: TrainingState
    config: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, SavedTensor]

    @property
    def checksum(self) -> int:
        return _checksum(self._fields())

    def to_json(self) -> str:
        fields = self._fields()
        return json.dumps(fields | {"checksum": _checksum(fields)})

    def _fields(self) -> dict[str, Any]:
        return {
            "format": "megalite",
            "version": VERSION,
            "training": asdict(self.training),
            "config": self.config,
            "files": self.files,
            "tensors": {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()},
        }

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError, KeyError, TypeError or AttributeError where the text is no whole manifest, CheckpointError
        where it is one of another version."""
        fields = json.loads(text)
        if fields.pop("checksum") != _checksum(fields):
            raise ValueError("its checksum does not match")
        if fields["format"] != "megalite" or fields["version"] != VERSION:
            raise CheckpointError(f"it is not of format version {VERSION}, the one this program reads")
        return Manifest(
            TrainingState(**fields["training"]),
            fields["config"],
            fields["files"],
            {name: _tensor_from_json(name, tensor) for name, tensor in fields["tensors"].items()},
        )


def read_manifest(path: AnyPath) -> Manifest:
    """The manifest of the checkpoint in folder `path`.

    Raises DamagedCheckpointError where there is none, or a damaged one, CheckpointError where it cannot be read.
    """
    try:
        return Manifest.from_json((path / NAME).read_text())
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is no checkpoint: it has no {NAME}") from error
    except OSError as error:
        raise unreadable(path / NAME, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path / NAME} is damaged or foreign: {error}. Load another checkpoint"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path / NAME} cannot be used: {error}") from error


def unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    """The error to raise where the system did not read a file: what the medium has lost or never had is damage; all
    else, like a missing permission, may pass."""
    lost = error.errno in (errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENODATA)
    kind = DamagedCheckpointError if lost else CheckpointError
    return kind(f"{path} cannot be read: {error.strerror or error}. Load another checkpoint")


def read_config(path: AnyPath) -> dict[str, Any]:
    """The configuration, by section, of the run that saved the checkpoint in folder `path`."""
    return read_manifest(path).config


def entry(tensor: str, box: Box) -> str:
    """The name of a tensor's box in a safetensors file."""
    return f"{tensor}@{','.join(map(str, box.offset))}"


def logical_name(tensor: str) -> str:
    """The name of the weight that a tensor of a checkpoint is, or stands for as a state of the optimizer."""
    return tensor.split("/", 1 if tensor.startswith("model/") else 2)[-1]


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Whether the boxes hold each element of `target` exactly once."""
    parts = [part for box in boxes if (part := box.intersection(target)) is not None]
    if sum(part.numel for part in parts) != target.numel:
        return False
    open_parts: list[Box] = []  # those that reach the first dimension's index where the sweep stands
    for part in sorted(parts, key=lambda part: part.offset):
        open_parts = [other for other in open_parts if other.offset[0] + other.size[0] > part.offset[0]]
        if any(part.intersection(other) is not None for other in open_parts):
            return False
        open_parts.append(part)
    return True


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    boxes = [
        {"offset": saved.box.offset, "size": saved.box.size, "file": saved.file, "checksum": saved.checksum}
        for saved in tensor.boxes
    ]
    return {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": boxes}


def _tensor_from_json(name: str, fields: dict[str, Any]) -> SavedTensor:
    boxes = tuple(
        SavedBox(name, Box(tuple(saved["offset"]), tuple(saved["size"])), saved["file"], saved["checksum"])
        for saved in fields["boxes"]
    )
    return SavedTensor(tuple(fields["shape"]), fields["dtype"], boxes)
