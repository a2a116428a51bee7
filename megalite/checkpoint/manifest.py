"""Manifest of a checkpoint: the position of each box of each tensor in the files, and the state of the run.

The manifest is one JSON object that includes its own checksum. Version 2:

    format, version   "megalite", 2
    training          iteration, consumed_samples, optimizer_steps, loss_scale, seen_samples,
                    evaluation_left; optimizers, by name, if there are several
    config            the run's configuration, by section
    files             by file name: the size in bytes, and the checksum of the bytes that are in no box
    tensors           by name: shape, dtype, boxes, and relayout if its first axis enumerates replicas;
                    per box: offset, size, file, start and checksums
    checksum          CRC-32 of all of the above

The values of a box begin at byte `start` of `file`, in row-major order, little-endian. A reader needs no other
knowledge of the file's format. `checksums` has 8 hexadecimal digits per block of 4 MiB of the box: the CRC-32 of all
bytes of the box up to the end of the block. To check one block alone, start from the CRC-32 of the block before.

Names are `model/NAME` for a weight, `state/NAME` for state of a module that is not a weight, and `optimizer/STATE/NAME`
for optimizer state of weight NAME, which may have another shape than the weight. NAME is the logical name. Shapes are
global and unpadded. Only the boundaries of the boxes depend on the layout that saved the checkpoint. Weights and master
weights are floating-point numbers; state may also be int64.

Two kinds of names depend on the layout. A tensor of which each replica has values of its own is `replica/` and one of
the names above. Its first axis enumerates the replicas, and `relayout` is the rule for another number of them: sum,
average, drop or refuse. `rank/R/STATE` is private state of rank R and its data-parallel peers, which a run may drop.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import add, gt
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.integrity import unreadable
from megalite.checkpoint.tensors import Kind, TensorBox
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.optim.replica import RELAYOUTS
from megalite.parallel.sharding import Box
from megalite.small_files import MIB, MOST_MARKS, parse_json, shown
from megalite.storage import AnyPath, read_small

NAME = "manifest.json"
MODEL, STATE, OPTIMIZER = "model/", "state/", "optimizer/"
MASTER = OPTIMIZER + "master/"
MEAN = OPTIMIZER + "ema/"
"""Prefix of the mean of a weight that a run has kept."""
REPLICA = "replica/"
"""Prefix of a tensor whose first axis enumerates replicas."""
RANK = "rank/"
VERSION = 2
BLOCK = 1 << 22
"""Size in bytes of the blocks into which a box is divided; each block has one checksum."""
_FILE_NAME = re.compile(r"\.?\w[\w.-]{0,200}")
_LONGEST_NAME, _MOST_AXES = 1000, 16
_MOST_REPLICAS, _MOST_IN_BOXES = 1 << 20, 1 << 26
"""Maximum numbers of a tensor's replicas, and of replicas in all of its boxes."""
_DTYPES = {kind: getattr(torch, kind) for kind in ("float64", "float32", "bfloat16", "float16", "int64")}
_LARGEST = 512 * MIB
"""Maximum size of a manifest in bytes.

It is enough for three million boxes: 1,000 tensors with three states per tensor, on 750 ranks.
"""
_BYTES_A_MARK = 6
"""Minimum average number of bytes per brace, bracket, comma and colon in a large manifest.

A box takes at least 100 bytes, which contain 15 to 17 of these characters.
"""


@dataclass(frozen=True)
class TrainingState:
    """Progress of a run. All other state follows from it and from the configuration."""

    iteration: int
    consumed_samples: int
    optimizer_steps: int
    """Number of updates, not including skipped steps."""
    loss_scale: dict[str, Any] | None = None
    """State of a dynamic loss scaler."""
    seen_samples: list[tuple[int, int]] | None = None
    """Numbers of some consumed samples, each with a checksum of its tokens. They detect a changed order of the data."""
    evaluation_left: bool = False
    """True if the run stopped after this step, before the evaluation of this step was complete."""
    optimizers: dict[str, dict[str, Any]] | None = None
    """State of each optimizer of a run that has several, by name: the numbers of its steps and its updates (`steps`,
    `updates`), and the state of its dynamic loss scaler or None (`loss_scale`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the state in its JSON form in the manifest, without `optimizers` if there is only one."""
        return {name: value for name, value in asdict(self).items() if name != "optimizers" or value}


@dataclass(frozen=True)
class SavedBox(TensorBox):
    """Box of a tensor, and its position in a file."""

    file: str
    start: int
    """Position of the first byte in the file."""
    checksums: tuple[int, ...]
    """CRC-32 of the box's bytes up to the end of each block."""

    @property
    def stop(self) -> int:
        """Position after the last byte in the file."""
        return self.start + self.size

    def blocks(self) -> Iterator[Block]:
        before = 0
        for start, checksum in zip(range(self.start, self.stop, BLOCK), self.checksums, strict=True):
            yield Block(self, start, min(start + BLOCK, self.stop), before, checksum)
            before = checksum


@dataclass(frozen=True)
class Block:
    """Part of a box's bytes that is read and verified at once."""

    saved: SavedBox
    start: int
    stop: int
    """End of the byte range [start, stop) of the file."""
    before: int
    """CRC-32 of the box's bytes before this block."""
    checksum: int
    """CRC-32 of the box's bytes up to the end of this block."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def elements(self) -> tuple[int, int]:
        """Range [first, stop) of the block's elements, counted from the first element of its box."""
        item = self.saved.dtype.itemsize
        return (self.start - self.saved.start) // item, (self.stop - self.saved.start) // item

    def parts(self) -> list[tuple[Box, int]]:
        """Return the boxes that make up the block, each with the number of its first element in the block."""
        first, stop = self.elements
        return [(part, position - first) for part, position in self.saved.box.flat_range(first, stop)]


@dataclass(frozen=True)
class SavedFile:
    size: int
    checksum: int
    """CRC-32 of the file's bytes that are in no box."""


@dataclass(frozen=True)
class SavedTensor(Kind):
    boxes: tuple[SavedBox, ...]
    """Boxes that together hold each element of the tensor once."""

    def boxes_at(self, box: Box) -> Sequence[SavedBox]:
        """Return the boxes that may overlap a box; of a tensor with replicas, those of the box's first replica."""
        return self.boxes if self.relayout is None else self._by_replica.get(box.offset[0], ())

    @cached_property
    def _by_replica(self) -> Mapping[int, Sequence[SavedBox]]:
        boxes: dict[int, list[SavedBox]] = {}
        for saved in self.boxes:
            for replica in saved.box.indices(0):
                boxes.setdefault(replica, []).append(saved)
        return boxes


@dataclass(frozen=True)
class Manifest:
    training: TrainingState
    config: dict[str, Any]
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    checksum: int | None = field(default=None, compare=False)
    """Checksum of the manifest that was read; None if it was not read from a file."""

    def to_json(self) -> str:
        """Return the text. Raises CheckpointError if it is larger than what can be read."""
        fields = {
            "format": "megalite",
            "version": VERSION,
            "training": self.training.to_json(),
            "config": self.config,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {name: tensor_to_json(kind) for name, kind in self.tensors.items()},
        }
        text = json.dumps(fields | {"checksum": _checksum(fields)})
        if len(text) > _LARGEST:
            count = sum(len(tensor.boxes) for tensor in self.tensors.values())
            raise CheckpointError(
                f"a checkpoint of this layout has {count:,} boxes of tensors, but its {NAME} can describe only "
                f"{_LARGEST * count // len(text):,}: with more pipeline stages (--pp), each rank has slices of fewer "
                "layers; --no-save-optim saves the weights alone"
            )
        return text

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Parse a manifest.

        Raises ValueError, KeyError, TypeError or AttributeError if the text is not a complete manifest, and
        CheckpointError if it is of another version.
        """
        fields = parse_json(text, most_marks=max(MOST_MARKS, len(text) // _BYTES_A_MARK))
        checksum = fields.pop("checksum")
        if checksum != _checksum(fields):
            raise ValueError("its checksum does not match")
        if fields["format"] != "megalite" or fields["version"] != VERSION:
            raise CheckpointError(f"its format version is not {VERSION}, the one this program reads")
        read = Manifest(
            _training_from_json(fields["training"]),
            _config_from_json(fields["config"]),
            {name: SavedFile(**file) for name, file in fields["files"].items()},
            {name: _tensor_from_json(name, tensor) for name, tensor in fields["tensors"].items()},
            checksum,
        )
        for name, file in read.files.items():
            if not _FILE_NAME.fullmatch(name) or not _is_count(file.size):
                raise ValueError(f"{shown(name)} is not a file in its folder")
        for name, tensor in read.tensors.items():
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise ValueError(f"a tensor is called {shown(name)}")
            if not all(map(_is_count, tensor.shape)):
                raise ValueError(f"{name} has no shape")
            if tensor.relayout is not None and not 1 <= next(iter(tensor.shape), 0) <= _MOST_REPLICAS:
                raise ValueError(f"{name} has no axis of replicas")
            for saved in tensor.boxes:
                _check_box(saved, read.files)
            if tensor.relayout is not None and sum(saved.box.size[0] for saved in tensor.boxes) > _MOST_IN_BOXES:
                raise ValueError(f"{name} has too many replicas in its boxes")
        return read


def read_manifest(path: AnyPath) -> Manifest:
    """Read the manifest of the checkpoint in folder `path`.

    Raises CorruptCheckpointError if it is missing or damaged, and CheckpointError if it cannot be read.
    """
    try:
        return Manifest.from_json(read_small(path / NAME, largest=_LARGEST))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} is not a checkpoint: it has no {NAME}{advise_import(path)}") from error
    except OSError as error:
        raise unreadable(path / NAME, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path / NAME} is damaged or not ours: {str(error)[:300]}. Load another checkpoint"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path / NAME} cannot be used: {error}") from error


def advise_import(path: AnyPath) -> str:
    """Return the end of an error message: advice if Megatron-LM has written the folder, otherwise an empty text."""
    if isinstance(path, Path) and ((path / ".metadata").is_file() or any(path.glob("mp_rank_*"))):
        return "; megalite-convert --loader megatron imports one of Megatron-LM"
    return ""


def read_config(path: AnyPath) -> dict[str, Any]:
    """Read the configuration, by section, of the run that saved the checkpoint in folder `path`."""
    return read_manifest(path).config


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def split_name(tensor: str) -> tuple[str, str]:
    """Split a tensor's name into its kind, such as `model` or `optimizer/exp_avg`, and its logical name."""
    plain = plain_name(tensor)
    *kind, logical = plain.split("/", 2 if plain.startswith(OPTIMIZER) else 1)
    return tensor[: len(tensor) - len(plain)] + "/".join(kind), logical


def plain_name(tensor: str) -> str:
    """Return the name that a tensor has without an axis of replicas."""
    return tensor.removeprefix(REPLICA)


def owner_name(tensor: str) -> str:
    """Return the name of the weight to which optimizer state belongs. For any other tensor, return its plain name."""
    plain = plain_name(tensor)
    return MODEL + split_name(plain)[1] if plain.startswith(OPTIMIZER) else plain


def is_optimizer_state(tensor: str) -> bool:
    """Return whether a tensor is state of the optimizer, or private state of a rank."""
    return plain_name(tensor).startswith((OPTIMIZER, RANK))


def _is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**53."""
    return type(value) is int and 0 <= value <= 2**53


def _training_from_json(fields: dict[str, Any]) -> TrainingState:
    """Return the training state. Raises ValueError or another error of Python if it is not one."""
    state = TrainingState(**fields)
    if not all(map(_is_count, (state.iteration, state.consumed_samples, state.optimizer_steps))):
        raise ValueError("its training state has no counts of steps and samples")
    _check_loss_scale(state.loss_scale)
    for each in (state.optimizers or {}).values():
        if not all(map(_is_count, (each["steps"], each["updates"]))):
            raise ValueError("an optimizer of its training state has no counts of steps and updates")
        _check_loss_scale(each["loss_scale"])
    for seen in state.seen_samples or ():
        if len(seen) != 2 or not all(map(_is_count, seen)):
            raise ValueError(f"it has seen the sample {shown(seen)}")
    if type(state.evaluation_left) is not bool:
        raise ValueError("it does not say whether an evaluation is left")
    return state


def _check_loss_scale(saved: dict[str, Any] | None) -> None:
    if saved is not None:
        value, good, left = (saved[name] for name in ("value", "good_steps", "overflows_left"))
        if type(value) not in (int, float) or not 0 < value < math.inf or not _is_count(good) or type(left) is not int:
            raise ValueError(f"its loss scale is {shown(saved)}")


def _config_from_json(sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check that the sections exist; their fields differ between versions, and are checked where they are used."""
    if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
        raise TypeError("it has no configuration by section")
    for name in (*sections, *(name for section in sections.values() for name in section)):
        if not name.isprintable():
            raise ValueError(f"its configuration has {shown(name)}")
    return sections


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _check_box(saved: SavedBox, files: dict[str, SavedFile]) -> None:
    """Raise ValueError or TypeError if a box is not inside its tensor or its file.

    This check keeps a malicious manifest from making megalite read outside of the checkpoint.
    """
    offset, size, shape, start = saved.box.offset, saved.box.size, saved.shape, saved.start
    if {*map(type, (*offset, *size, *shape, start))} != {int} or not len(offset) == len(size) == len(shape):
        raise TypeError(f"{saved.entry} is not a box of {list(shape)}")
    beyond = any(map(gt, map(add, offset, size), shape))
    if beyond or min(offset, default=0) < 0 or min(size, default=1) < 1:
        raise ValueError(f"{saved.entry} is not within {list(shape)}")
    stop = saved.stop  # multiplies only as many numbers as the shape has, because of the check above
    if saved.file not in files or not 0 <= start < stop <= files[saved.file].size:
        raise ValueError(f"{saved.entry} is not within {saved.file!r}")
    if len(saved.checksums) != -(-(stop - start) // BLOCK):
        raise ValueError(f"{saved.entry} does not have a checksum for each block")


def box_to_json(saved: SavedBox) -> dict[str, Any]:
    """Return a box in its JSON form in the manifest."""
    return {
        "offset": saved.box.offset,
        "size": saved.box.size,
        "file": saved.file,
        "start": saved.start,
        "checksums": "".join(f"{checksum:08x}" for checksum in saved.checksums),
    }


def tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    """Return a tensor in its JSON form in the manifest."""
    relayout = {} if tensor.relayout is None else {"relayout": tensor.relayout}
    shape, boxes = tensor.shape, [*map(box_to_json, tensor.boxes)]
    return {"shape": shape, "dtype": dtype_name(tensor.dtype), **relayout, "boxes": boxes}


def _tensor_from_json(name: str, fields: dict[str, Any]) -> SavedTensor:
    """Return the record of a tensor. Raises ValueError, TypeError or KeyError if it is not one."""
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise TypeError(f"{shown(name)} is of {shown(fields['dtype'])}, which is not a dtype of a checkpoint")
    if not dtype.is_floating_point and plain_name(name).startswith((MODEL, MASTER)):
        raise TypeError(f"{shown(name)} is a weight, but has whole numbers, {dtype_name(dtype)}")
    relayout = fields.get("relayout")
    if ("relayout" in fields) != name.startswith(REPLICA) or ("relayout" in fields and relayout not in RELAYOUTS):
        raise ValueError(f"{shown(name)} has {shown(relayout)} as the rule for its replicas")
    shape = _axes(name, fields["shape"])
    boxes = tuple(_box_from_json(name, shape, dtype, saved) for saved in fields["boxes"])
    return SavedTensor(shape, dtype, boxes, relayout=relayout)


def _box_from_json(name: str, shape: tuple[int, ...], dtype: torch.dtype, fields: dict[str, Any]) -> SavedBox:
    digits = fields["checksums"]
    checksums = tuple(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    box = Box(_axes(name, fields["offset"]), _axes(name, fields["size"]))
    return SavedBox(name, shape, dtype, box, fields["file"], fields["start"], checksums)


def _axes(name: str, values: Any) -> tuple[int, ...]:
    """Return the values as a tuple if they are a short list.

    `from_json` later checks that they are integers, before they are multiplied.
    """
    if not isinstance(values, list) or len(values) > _MOST_AXES:
        raise TypeError(f"{shown(name)} has {shown(values)} as a shape, or as the offset or size of a box")
    return tuple(values)
