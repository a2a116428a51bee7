"""Recorder of training steps for `megalite-verify`: one file to copy beside your own code, which needs torch alone.

A plain loop:

    from megalite_trace import Recorder

    recorder = Recorder("trace", model, steps={1, 100})
    for number, micro_batches in enumerate(loader, start=1):
        total = 0.0
        with recorder.step(number):  # does nothing unless the step is chosen
            for tokens, labels in micro_batches:
                recorder.batch(tokens=tokens, labels=labels)
                loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / len(micro_batches)
                loss.backward()
                total += loss.item()
            recorder.gradients()  # after backward and what sums over ranks, before clipping
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.figures(loss=total, grad_norm=norm, learning_rate=scheduler.get_last_lr()[0])
        optimizer.zero_grad()

Megatron-LM, in train_step of megatron/training/training.py, where `model` is a list of chunks:

    axes = {"tp": (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()), "pp": ...}
    recorder = Recorder("trace", model, steps={1}, program="megatron", coordinates=axes)
    ...
    with recorder.step(iteration + 1):
        losses = forward_backward_func(...)  # forward_step calls recorder.batch(...) with what get_batch has returned
        recorder.gradients()
        update_successful, norm, zeros = optimizer.step()
        recorder.figures(grad_norm=norm, learning_rate=optimizer.param_groups[0]["lr"])

FSDP2, and models of DTensors: their placements are recorded, and a mesh with named dimensions tells the coordinates:

    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
    recorder = Recorder("trace", model, steps=range(1, 4), coordinates=mesh)

The loop is as above. Each rank writes FOLDER/step_0000001/rank_00000.json, which lists what was recorded, and
.safetensors files beside it. There is no pickle. `megalite-verify --trace FOLDER` reads them.

What is recorded: micro-batches; floating-point inputs and outputs of all modules, and the gradients of the loss with
respect to them, from all that use the tensor; parameters before and after the step, and their gradients; figures. Of
tensors other than micro-batches, a sketch of 2.6 kB is kept: seeded projections, which tell how far another tensor is,
and 64 elements. `whole=True` keeps all elements. A tensor that several modules see is kept once.

How modules are observed:
- A micro-batch is a forward of the whole model, or of its chunk. What modules do outside of it is not recorded.
- Recomputation is a forward within backward; it is not recorded again. If the first forward had no graph (reentrant
  checkpoints, Megatron-LM's), gradients are taken from the recomputation. Its micro-batch is the one that had the same
  first tensor.
- What is within a module compiled by torch.compile cannot be seen; its inputs and outputs are.
- A second call of a module in a micro-batch gets the name `NAME#2`.

The recorder changes no number of the training and draws no random ones. Its hooks exist during chosen steps only. If it
fails, it raises `TraceError`; with `on_error="warn"` it warns, drops the step's trace, and training goes on.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import json
import math
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Place", "Recorder", "TraceError", "project", "samples", "sketch"]

FORMAT, VERSION = "megalite_trace", 1

# ------------------------------------------------------------------------------------------------- sketches

SAMPLES = 64
"""Number of elements in a sketch."""
MOST_PROJECTIONS = 257
_ROWS, _MERGED = 512, 4
_MASK = (1 << 64) - 1
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of splitmix64


def project(tensor: Tensor, seed: int = 0) -> Tensor:
    """Return seeded random projections of a tensor of any shape, [257] in fp64, whose root mean square is its norm.

    Element i goes, with a hashed sign, into sum i mod 257, so that the square of the norm of any tensor or difference
    is estimated without bias and with a relative standard deviation of 9 %, which is 4.5 % of the norm: also of a row,
    a column, a head, or what is equal in all rows; 12 % of some constants. One element is exact, and so is all of up to
    257. (251 sums, if the size of a dimension after the first is a multiple of 257.) Signs depend on nothing but the
    seed. The projections are linear but for rounding: of fp32 tensors with 131,584 elements or more, four elements are
    added up before all else is in fp64, an error of 5e-8 of the norm. For half types it is 1e-9, otherwise 1e-16.
    """
    with torch.no_grad():
        return _sums(tensor, seed)


def samples(tensor: Tensor, seed: int = 0) -> Tensor:
    """Return up to 64 elements at hashed places, the same for each tensor of as many elements, in fp64."""
    flat = tensor.detach().reshape(-1)
    return flat[_sampled(flat.numel(), seed, flat.device)].double()


def sketch(tensor: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return what the recorder keeps of a tensor: projections, norm as they estimate it, samples, finite, shape, dtype.

    An exact norm would add a quarter to the time of a sketch.
    """
    projections = project(tensor, seed)
    return {
        "norm": float(projections.square().mean().sqrt()),
        "projections": projections,
        "samples": samples(tensor, seed),
        "finite": bool(projections.isfinite().all()),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
    }


def projections_of(shape: Sequence[int]) -> int:
    """Return the number of projections of a tensor of this shape."""
    # A column of a matrix would fall into one sum if its stride were a multiple of their number.
    return next((count for count in (MOST_PROJECTIONS, 251) if all(size % count for size in shape[1:] if size)), 241)


def _sums(tensor: Tensor, seed: int) -> Tensor:
    """Return the projections of a tensor.

    The elements of a block are laid out in rows of `width` (`_rows`), get hashed signs, and columns are added up.
    """
    flat = tensor.detach().reshape(-1)
    width, device = projections_of(tensor.shape), flat.device
    wide = torch.float64 if flat.dtype == torch.float64 or not flat.is_floating_point() else torch.float32
    of_rows, of_elements, ones = _signs(seed, width, device)
    total = torch.zeros(width, dtype=torch.float64, device=device)
    for number, block in enumerate(flat.split(_MERGED * _ROWS * width)):
        rows = _rows(_converted(block, wide, "block"), width, of_rows)
        place = _hashed(seed * _MASK + number)
        # Two blocks have equal signs in one column only if their offsets differ by a multiple of `width`.
        offset = (place >> 8) % (_ROWS - 1) * width + number % width
        rows *= of_elements[offset : offset + rows.numel()].view(rows.shape)
        rows = _converted(rows, torch.float64, "rows")
        total.addmv_(rows.t(), ones[: len(rows)], alpha=1 - (place >> 4 & 1) * 2)
    return total * math.sqrt(width)


def _rows(block: Tensor, width: int, of_rows: Tensor) -> Tensor:
    """Return a block as rows of `width`: those of its four quarters added up with their signs, and then the rest.

    A block of less than 512 rows stays as it is, so that small tensors have no sums in fp32.
    """
    count = block.numel() // (_MERGED * width) if block.numel() >= _ROWS * width else 0
    end = count * _MERGED * width
    more = -(-(block.numel() - end) // width)
    rows = _memory("sums", (count + more, width), block.dtype, block.device)
    if count:
        first, second, *others = block[:end].view(_MERGED, count, width)
        sums = torch.addcmul(first, second, of_rows[0, :count], out=rows[:count])
        for index, other in enumerate(others, start=1):
            sums.addcmul_(other, of_rows[index, :count])
    if more:
        rest = rows[count:].view(-1)
        rest[-width:] = 0.0
        rest[: block.numel() - end] = block[end:]
    return rows


def _converted(tensor: Tensor, dtype: torch.dtype, use: str) -> Tensor:
    """Return a tensor in another dtype, until the next one for the same use."""
    return tensor if tensor.dtype == dtype else _memory(use, tensor.shape, dtype, tensor.device).copy_(tensor)


def _memory(use: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory. On CPUs it is used again: the first use of a page takes longer than all sums of what is in it."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _kept_memory(use, dtype, threading.get_ident())[: math.prod(shape)].view(shape)


@functools.lru_cache(maxsize=16)
def _kept_memory(use: str, dtype: torch.dtype, thread: int) -> Tensor:
    return torch.empty(_MERGED * (_ROWS + 1) * MOST_PROJECTIONS, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=16)
def _signs(seed: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return signs of the rows of all quarters but the first [3, 512, 1] and of elements, in fp32; and ones in fp64."""
    few = (_MERGED - 1) * _ROWS
    signs = (1 - (_hashes(few + (2 * _ROWS + _MERGED) * width, seed) >> 7 & 1) * 2).float().to(device)
    ones = torch.ones(_ROWS + _MERGED, dtype=torch.float64, device=device)
    return signs[:few].view(_MERGED - 1, _ROWS, 1), signs[few:], ones


@functools.lru_cache(maxsize=4096)
def _sampled(count: int, seed: int, device: torch.device) -> Tensor:
    places = _hashes(SAMPLES, seed + count) >> 1 & _MASK >> 1
    return (torch.arange(count) if count <= SAMPLES else places % count).to(device)


def _hashed(value: int) -> int:
    """Return a hash of 64 bits."""
    value &= _MASK
    for shift, factor in _FACTORS:
        value = (value ^ value >> shift) * factor & _MASK
    return value ^ value >> 31


def _hashes(count: int, seed: int) -> Tensor:
    """Return the hashes of `count` numbers, in int64, whose products wrap."""
    values = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * _signed(0x9E3779B97F4A7C15)
    values += _signed(_hashed(seed + 1))
    for shift, factor in _FACTORS:
        values = (values ^ (values >> shift & _MASK >> shift)) * _signed(factor)
    return values ^ (values >> 31 & _MASK >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# ------------------------------------------------------------------------------------------------- places


class Split(NamedTuple):
    """Cut of a dimension over an axis of ranks, in blocks or (zigzag) in two chunks each, of which one is mirrored."""

    dimension: int
    axis: str
    kind: str = "block"


@dataclass(frozen=True)
class Place:
    """Place of a tensor in the tensor of the whole model, for the rules of a recorder.

    Attributes:
        dimensions: a letter for each dimension: s sequence, b batch, h features, t tokens (sequence and batch in one).
        splits: (dimension, axis), or (dimension, axis, "zigzag"), from the outermost to the innermost.
        partial: axes of ranks over which the tensor is still to be summed.
        offset: first corner of the part in the tensor of the whole model, if that is known and not from splits.
    """

    dimensions: str = ""
    splits: Sequence[Sequence[Any]] = ()
    partial: Sequence[str] = ()
    offset: Sequence[int] | None = None

    def resolved(self, coordinates: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """Return the place with this rank's part of each cut. Raises TraceError for an axis without coordinates."""
        splits = []
        for dimension, axis, kind in (Split(*split) for split in self.splits):
            if axis not in coordinates:
                raise TraceError(f"a place is split over {axis}, which is not in coordinates: {', '.join(coordinates)}")
            splits.append([dimension, axis, *coordinates[axis], kind])
        place = {"dimensions": self.dimensions, "splits": splits, "partial": list(self.partial), "of": "rule"}
        return place if self.offset is None else {**place, "offset": list(self.offset)}


def _place_of_dtensor(tensor: Any) -> dict[str, Any]:
    """Return the place of a DTensor's local part: its placements, with the names of the mesh's dimensions."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"mesh{index}" for index in range(mesh.ndim)]
    first: list[list[Any]] = []
    inner: list[list[Any]] = []
    partial: list[str] = []
    for index, placement in enumerate(tensor.placements):
        strided = type(placement).__name__ == "_StridedShard"  # of FSDP over TP: TP's cut is the outer one
        if strided or placement.is_shard():
            split = [placement.dim, names[index], mesh.get_local_rank(index), mesh.size(index), "block"]
            (inner if strided else first).append(split)
        elif placement.is_partial():
            partial.append(names[index])
    return {"dimensions": "", "splits": first + inner, "partial": partial, "of": "dtensor"}


def _place_of_megatron(parameter: Tensor, coordinates: Mapping[str, tuple[int, int]]) -> dict[str, Any] | None:
    """Return the place that attributes of Megatron-LM tell; None if there are none, or they do not tell it all."""
    if getattr(parameter, "partition_stride", 1) != 1 or not hasattr(parameter, "tensor_model_parallel"):
        return None
    axis = "tp" if getattr(parameter, "allreduce", True) else "etp"
    splits = []
    if parameter.tensor_model_parallel:
        if axis not in coordinates:
            return None
        splits.append([parameter.partition_dim, axis, *coordinates[axis], "block"])  # type: ignore[attr-defined]
    return {"dimensions": "", "splits": splits, "partial": [], "of": "attributes"}


def _coordinates(given: Any) -> dict[str, tuple[int, int]]:
    """Return index and count on each axis, from a mapping or from a DeviceMesh whose dimensions have names."""
    names = getattr(given, "mesh_dim_names", None)
    if names is None:
        return {axis: (int(index), int(count)) for axis, (index, count) in dict(given or {}).items()}
    return {name: (given.get_local_rank(number), given.size(number)) for number, name in enumerate(names)}


# ------------------------------------------------------------------------------------------------- files

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8"}
_DTYPES |= {torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"}
_LARGEST_PART = 256 << 20
"""Number of bytes of tensors that are kept in memory before they are written to a file of their own."""


class TraceError(RuntimeError):
    """A trace cannot be recorded."""


class _Files:
    """Safetensors files of one rank and step: rank_00000.safetensors, rank_00000_0001.safetensors, ..."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._stem = folder, f"rank_{rank:05d}"
        self._tensors: dict[str, Tensor] = {}
        self._bytes = self._count = 0
        self.names: list[str] = []
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.remove()

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """Take a tensor, which is copied; return where it stands."""
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size = copy.numel() * copy.element_size()
        if self._tensors and self._bytes + size > _LARGEST_PART:
            self.flush()
        key = f"t{self._count}"
        self._tensors[key] = copy
        self._bytes += size
        self._count += 1
        return {"file": len(self.names), "tensor": key}

    def flush(self) -> None:
        """Write the tensors that are in memory."""
        name = self._stem + (f"_{len(self.names):04d}" if self.names else "") + ".safetensors"
        # Large elements first: all of them lie at multiples of their size.
        ordered = sorted(self._tensors.items(), key=lambda item: -item[1].element_size())
        header: dict[str, Any] = {}
        end = 0
        for key, tensor in ordered:
            begin, end = end, end + tensor.numel() * tensor.element_size()
            fields = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[key] = fields
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        parts = (memoryview((ctypes.c_char * _size(each)).from_address(each.data_ptr())) for _, each in ordered)
        self._write(name, [len(text).to_bytes(8, "little"), text], parts)
        self.names.append(name)
        self._tensors, self._bytes = {}, 0

    def commit(self, index: dict[str, Any]) -> None:
        """Write the rest, and then the index."""
        if self._tensors or not self.names:
            self.flush()
        self._write(f"{self._stem}.json", [json.dumps({**index, "files": self.names}).encode()], ())

    def remove(self) -> None:
        """Remove what this rank has written of the step, or an earlier run has."""
        with _writing(self._folder):
            # The index first: without it, the others are not read.
            for pattern in (f"{self._stem}.json", f"{self._stem}.*", f"{self._stem}_*"):
                for path in self._folder.glob(pattern):
                    path.unlink(missing_ok=True)

    def _write(self, name: str, first: Sequence[bytes], rest: Iterable[memoryview]) -> None:
        path = self._folder / name
        partial = path.with_name(f"{name}.partial")
        with _writing(path):
            with open(partial, "wb") as file:
                file.writelines(first)
                file.writelines(rest)
            os.replace(partial, path)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------------------- recorder


class Recorder:
    """Recorder of chosen steps; the docstring of this file shows its use in a loop."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module],
        steps: Container[int],
        *,
        program: str = "",
        whole: bool = False,
        modules: Collection[str] = ("*",),
        coordinates: Any = None,
        places: Mapping[str, Place] | None = None,
        seed: int = 0,
        on_error: str = "raise",
    ) -> None:
        """Create a recorder, which does nothing until a chosen step.

        Args:
            folder: where the traces are written, below it a folder a step.
            model: the model, or the chunks of it that this rank has.
            steps: numbers of the steps to record, from 1; a set or a range.
            program: whose names and layouts the modules have: megatron, huggingface, torchtitan; empty for others.
            whole: keep all elements of tensors, not sketches.
            modules: patterns (`*`, `?`) for the names of the modules to record.
            coordinates: place of this rank on each axis, {"tp": (0, 2)}, or a DeviceMesh whose dimensions have names.
                Axes that are understood: tp, pp, cp, dp, ep, etp, edp.
            places: places of tensors, by patterns for names, or names with roles such as `layers.*:input`. DTensors and
                the attributes of Megatron-LM's parameters come first.
            seed: seed of the sketches.
            on_error: "raise", or "warn" to go on training without a trace.

        Raises:
            TraceError: a place is split over an axis without coordinates.
        """
        if on_error not in ("raise", "warn"):
            raise TraceError(f'on_error is {on_error!r}: it may be "raise" or "warn"')
        self._folder, self._steps, self._on_error = Path(folder), steps, on_error
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        axes = _coordinates(coordinates)
        rules = {pattern: place.resolved(axes) for pattern, place in (places or {}).items()}
        self._settings = _Settings(program, whole, tuple(modules), axes, rules, seed)
        self._open: _Step | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step within the block, if it is chosen. An exception within it drops the step's trace."""
        if number not in self._steps:
            yield
            return
        self._guarded(self._begin, number)
        try:
            yield
        except BaseException:
            self._drop()
            raise
        if self._open is not None:
            self._guarded(self._open.finish)
            self._drop(keep=True)

    def batch(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> None:
        """Record a micro-batch as this rank sees it, each tensor [batch, tokens of this rank]; once for each.

        `sample_ids`: numbers of the samples among all of the run, [batch].
        """
        if self._open is not None:
            given = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}
            self._guarded(self._open.add_batch, {**given, "document_ids": document_ids, "sample_ids": sample_ids})

    def tensor(
        self,
        name: str,
        role: str,
        tensor: Tensor,
        *,
        number: int = 0,
        micro_batch: int = 0,
        chunk: int = 0,
        place: Place | None = None,
    ) -> None:
        """Record one more tensor, beside what modules and parameters show by themselves.

        `role`: input, output, input_gradient or output_gradient of a module; parameter, gradient, main_gradient or
        parameter_after.
        """
        if self._open is not None:
            self._guarded(self._open.add_tensor, tensor, place, name, role, number, micro_batch, chunk)

    def gradients(self, reduced: bool = True) -> None:
        """Record the parameters' gradients, `.main_grad` or else `.grad`.

        `reduced`: they are summed over ranks, as the optimizer gets them but for clipping. A call with False, before
        that, records those of this rank alone, too.
        """
        if self._open is not None:
            self._guarded(self._open.add_gradients, "main_gradient" if reduced else "gradient")

    def figures(self, **values: float | Tensor) -> None:
        """Record numbers of the step as the program logs them: loss, grad_norm, learning_rate, loss_scale, ..."""
        if self._open is not None:
            self._guarded(self._open.add_figures, values)

    def _begin(self, number: int) -> None:
        if self._open is not None:
            raise TraceError(f"step {number} begins within step {self._open.number}")
        self._open = _Step(self._folder, number, self._models, self._settings)
        self._open.attach(self._guarded)

    def _drop(self, keep: bool = False) -> None:
        """End the open step; remove its files unless they are complete."""
        step, self._open = self._open, None
        if step is not None:
            step.detach()
            if not keep:
                step.files.remove()

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function without a graph; drop the step if it fails."""
        try:
            with torch.no_grad():
                function(*arguments)
        except Exception as error:
            with suppress(TraceError):
                self._drop()
            text = f"this step is not recorded: {error}"
            if self._on_error == "warn":
                warnings.warn(text, RuntimeWarning, stacklevel=3)
                return
            hint = 'on_error="warn" lets training go on without the trace'
            raise TraceError(f"{text} ({type(error).__name__}; {hint})") from error


@dataclass(frozen=True)
class _Settings:
    """Arguments of a recorder."""

    program: str
    whole: bool
    modules: tuple[str, ...]
    coordinates: dict[str, tuple[int, int]]
    rules: dict[str, dict[str, Any]]
    seed: int


@dataclass
class _Chunk:
    """Chunk of the model, with the number of its forwards, and that of the one which runs now."""

    number: int
    count: int = 0
    active: int | None = None


@dataclass(eq=False)
class _Call:
    """Call of a module.

    Attributes:
        number: number of the call in its micro-batch, from 1.
        first: some elements of its first tensor, by which its recomputation is recognized.
        awaited: role and position of the tensors whose gradients will come from the graph of this call.
    """

    micro_batch: int
    number: int
    first: Tensor | None
    awaited: set[tuple[str, int]] = field(default_factory=set)


@dataclass
class _Module:
    """Module that is recorded, if it is wanted; the root is observed in any case.

    Attributes:
        calls: number of calls in each micro-batch.
        without_graph: calls whose results have no graph, so that a recomputation is to be expected.
        now: the calls that run, and whether again; one within another, if the module calls itself.
    """

    name: str
    chunk: _Chunk
    wanted: bool
    root: bool
    calls: Counter[int] = field(default_factory=Counter)
    without_graph: list[_Call] = field(default_factory=list)
    now: list[tuple[_Call | None, bool]] = field(default_factory=list)


class _Owner(NamedTuple):
    """Role of a tensor in a call of a module."""

    module: _Module
    role: str
    number: int
    call: _Call


@dataclass
class _Seen:
    """Tensor that has been recorded, by reference, with all roles that it has had."""

    reference: Callable[[], Tensor | None]
    version: int
    value: dict[str, Any] | None = None
    owners: list[_Owner] = field(default_factory=list)
    hooked: bool = False


class _Step:
    """Step that is being recorded."""

    def __init__(self, folder: Path, number: int, models: Sequence[nn.Module], settings: _Settings) -> None:
        ranked = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if ranked else int(os.environ.get("RANK", 0))
        self.world_size = dist.get_world_size() if ranked else int(os.environ.get("WORLD_SIZE", 1))
        self.number, self.models, self.settings = number, models, settings
        self.files = _Files(folder / f"step_{number:07d}", self.rank)
        self.ended = False
        self._chunks = [_Chunk(index) for index, _ in enumerate(models)]
        self._modules: list[_Module] = []
        self._handles: list[Any] = []
        self._seen: dict[int, _Seen] = {}
        self._entries: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        self._sketches: list[Tensor] = []
        self._figures: dict[str, float | str] = {}
        self._notes: list[str] = []
        self._unmatched = 0
        self._roles: set[str] = set()

    # --------------------------------------------------------------------------------------------- hooks

    def attach(self, guarded: Callable[..., None]) -> None:
        """Record parameters, and observe the modules from now on; all hooks call through `guarded`."""
        self._guarded = guarded
        self._add_parameters("parameter")
        for chunk, model in zip(self._chunks, self.models):  # noqa: B905 (also of Python 3.9)
            for name, module in self._observed(model).items():
                wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.settings.modules)
                if wanted or not name:
                    observed = _Module(name, chunk, wanted, root=not name)
                    self._modules.append(observed)
                    before = functools.partial(self._before, observed)
                    after = functools.partial(self._after, observed)
                    self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        """Remove all hooks of modules. Those of tensors do nothing from now on."""
        self.ended = True
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], {}

    def _observed(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return modules by plain name; of a module and its wrappers the innermost, and nothing that is compiled."""
        found: dict[str, nn.Module] = {}
        compiled: list[str] = []
        for name, module in model.named_modules():
            if any(name == outer or name.startswith(f"{outer}." if outer else "") for outer in compiled):
                continue
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                compiled.append(name)
            if getattr(module.forward, "__func__", None) is not nn.Module.forward:  # no list, which is never called
                found[_plain(name)] = module
        if compiled:
            shown = ", ".join(_plain(name) or "the whole model" for name in compiled[:4])
            self._notes.append(f"{len(compiled)} modules are compiled, and what is in them is not recorded: {shown}")
        return found

    def _before(self, module: _Module, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._guarded(self._enter, module, [*args, *kwargs.values()])

    def _after(self, module: _Module, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._guarded(self._leave, module, output)

    def _enter(self, module: _Module, values: list[Any]) -> None:
        """Begin a call of a module, and record its inputs."""
        if self.ended:
            return
        chunk, again = module.chunk, _in_backward()
        if module.root and not again:
            chunk.active = chunk.count
            chunk.count += 1
        if not module.wanted:
            return
        leaves = list(_leaves(values))
        first = self._some_of(next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None))
        if again or chunk.active is None:
            call = self._recomputed(module, first)
            again = True
        else:
            module.calls[chunk.active] += 1
            call = _Call(chunk.active, module.calls[chunk.active], first)
        module.now.append((call, again))
        if call is not None:
            self._see(module, "input", leaves, call, again)

    def _leave(self, module: _Module, output: Any) -> None:
        """Record the outputs of a module, and end its call."""
        if module.now:
            call, again = module.now.pop()
            if call is not None:
                leaves = list(_leaves([output]))
                self._see(module, "output", leaves, call, again)
                if not again and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                    module.without_graph.append(call)
        if module.root and not _in_backward():
            module.chunk.active = None

    def _some_of(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None or tensor.is_nested else samples(_local(tensor), self.settings.seed)

    def _recomputed(self, module: _Module, first: Tensor | None) -> _Call | None:
        """Return the call without a graph that runs again; None if there is none, or the call had a graph."""
        for index, call in enumerate(module.without_graph):
            if first is None or (call.first is not None and torch.equal(call.first, first)):
                return module.without_graph.pop(index)
        self._unmatched += bool(module.without_graph) or not _in_backward()
        return None

    def _see(self, module: _Module, role: str, leaves: Iterable[Any], call: _Call, again: bool) -> None:
        """Record tensors of a call, unless it is a recomputation; and their gradients, when these are there."""
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or isinstance(leaf, nn.Parameter):
                continue
            if again and (role, number) in call.awaited:
                continue
            seen = self._known(leaf)
            owner = _Owner(module, role, number, call)
            if not again:
                if seen.value is None:
                    seen.value = self._kept(leaf)
                self._add_entry(owner, role, seen.value)
            seen.owners.append(owner)
            if leaf.requires_grad and not seen.hooked:
                seen.hooked = True
                leaf.register_hook(functools.partial(self._on_gradient, seen.owners))
            if seen.hooked:
                for each in seen.owners:
                    each.call.awaited.add((each.role, each.number))

    def _known(self, tensor: Tensor) -> _Seen:
        """Return what is known of a tensor since its last change."""
        version = -1 if tensor.is_inference() else tensor._version
        seen = self._seen.get(id(tensor))
        if seen is None or seen.reference() is not tensor or seen.version != version:
            seen = self._seen[id(tensor)] = _Seen(weakref.ref(tensor), version)
        return seen

    def _on_gradient(self, owners: list[_Owner], gradient: Tensor | None) -> None:
        if not self.ended and gradient is not None:
            self._guarded(self._add_gradient, owners, gradient)

    def _add_gradient(self, owners: list[_Owner], gradient: Tensor) -> None:
        value = self._kept(gradient)
        for owner in owners:
            self._add_entry(owner, f"{owner.role}_gradient", value)
        owners.clear()  # of a second backward, nothing is recorded

    def _add_entry(self, owner: _Owner, role: str, value: dict[str, Any] | None) -> None:
        module, call = owner.module, owner.call
        if value is not None:
            name = module.name if call.number == 1 else f"{module.name}#{call.number}"
            self._add(name, role, value, owner.number, call.micro_batch, module.chunk.number)

    # --------------------------------------------------------------------------------------------- values

    def _kept(self, tensor: Tensor, place: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Keep a tensor, or a sketch of it; return its fields in the index. None for types that files cannot have."""
        if tensor.dtype not in _DTYPES or tensor.is_nested:
            self._note(f"tensors of type {'nested' if tensor.is_nested else tensor.dtype} are left out")
            return None
        if _is_dtensor(tensor):
            place = _place_of_dtensor(tensor)
        local = _local(tensor)
        dtype = str(local.dtype).replace("torch.", "")
        fields: dict[str, Any] = {"shape": list(local.shape), "dtype": dtype, "place": place}
        if self.settings.whole:
            return {**fields, **self.files.add(local)}
        seed = self.settings.seed
        self._sketches.append(torch.cat([_sums(local, seed), samples(local, seed)]))
        return {**fields, "sketch": len(self._sketches) - 1}

    def _add(
        self, name: str, role: str, value: dict[str, Any], number: int = 0, micro_batch: int = 0, chunk: int = 0
    ) -> None:
        self._roles.add(role)
        if value["place"] is None:
            value = {**value, "place": self._place_by_rule(name, role)}
        entry = {"name": name, "role": role, "number": number, "micro_batch": micro_batch, "chunk": chunk}
        self._entries.append({**entry, **value})

    def _place_by_rule(self, name: str, role: str) -> dict[str, Any] | None:
        for pattern, place in self.settings.rules.items():
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{name}:{role}", pattern):
                return place
        return None

    def _note(self, line: str) -> None:
        if line not in self._notes:
            self._notes.append(line)

    def _parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for chunk, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield chunk, _plain(name), parameter

    def _add_parameters(self, role: str) -> None:
        for chunk, name, parameter in self._parameters():
            self._add_of_parameter(chunk, name, role, parameter, parameter)

    def _add_of_parameter(self, chunk: int, name: str, role: str, parameter: nn.Parameter, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            value = self._kept(tensor, _place_of_megatron(parameter, self.settings.coordinates))
            if value is not None:
                self._add(name, role, value, chunk=chunk)

    def add_gradients(self, role: str) -> None:
        """Record the gradients of the parameters."""
        if role in self._roles:
            raise TraceError("gradients() is called twice in a step")
        absent = 0
        for chunk, name, parameter in self._parameters():
            main = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if main is None else main
            if gradient is None:
                absent += parameter.requires_grad
            else:
                self._add_of_parameter(chunk, name, role, parameter, gradient)
        if absent:
            self._note(f"{absent} parameters have no gradient")

    def add_tensor(
        self, tensor: Tensor, place: Place | None, name: str, role: str, number: int, micro_batch: int, chunk: int
    ) -> None:
        """Record a tensor under a name. One that is recorded under several names before it changes is kept once."""
        seen = self._known(tensor)
        if seen.value is None:
            seen.value = self._kept(tensor)
        if seen.value is not None:
            value = seen.value if place is None else {**seen.value, "place": place.resolved(self.settings.coordinates)}
            self._add(name, role, value, number, micro_batch, chunk)

    def add_batch(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Record a micro-batch."""
        for name, tensor in tensors.items():
            if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES):
                raise TraceError(f"{name} of batch() is no tensor of numbers")
        whole = {name: self.files.add(_local(each)) for name, each in tensors.items() if each is not None}
        self._batches.append({"micro_batch": len(self._batches), **whole})

    def add_figures(self, values: Mapping[str, float | Tensor]) -> None:
        """Record numbers; JSON has none for NaN and infinities, which are written as text."""
        for name, value in values.items():
            number = float(value.detach() if isinstance(value, Tensor) else value)
            self._figures[name] = number if math.isfinite(number) else str(number)

    def finish(self) -> None:
        """Record the parameters after the step, and write the files."""
        self._add_parameters("parameter_after")
        self._look_back()
        index = {
            "format": FORMAT,
            "version": VERSION,
            "program": self.settings.program,
            "step": self.number,
            "rank": self.rank,
            "world_size": self.world_size,
            "coordinates": {axis: list(place) for axis, place in self.settings.coordinates.items()},
            "torch": str(torch.__version__),
            "seed": self.settings.seed,
            "figures": self._figures,
            "notes": self._notes,
            "batches": self._batches,
            "entries": self._entries,
        }
        if self._sketches:
            index["sketches"] = self.files.add(self._table())
        self.files.commit(index)

    def _table(self) -> Tensor:
        """Return the sketches on the CPU, [count, 257 + 64]: projections and samples, each with zeros after its own."""
        table = torch.zeros(len(self._sketches), MOST_PROJECTIONS + SAMPLES, dtype=torch.float64, device="cpu")
        flat = torch.cat([each.to(self._sketches[0].device) for each in self._sketches]).cpu()
        parts = flat.split([each.numel() for each in self._sketches])
        for row, width in {each["sketch"]: projections_of(each["shape"]) for each in self._entries}.items():
            table[row, :width] = parts[row][:width]
            table[row, MOST_PROJECTIONS:][: parts[row].numel() - width] = parts[row][width:]
        return table

    def _look_back(self) -> None:
        """Note what is missing."""
        idle = [module.name or "the whole model" for module in self._modules if module.wanted and not module.calls]
        if idle:
            self._note(f"{len(idle)} modules did not run, as far as can be seen: {', '.join(idle[:4])}")
        if self._unmatched:
            self._note(f"{self._unmatched} calls of modules outside of a forward of the model are not recorded")
        if not {"gradient", "main_gradient"} & self._roles:
            self._note("gradients() was not called between backward and the optimizer")
        if not self._batches:
            self._note("batch() was not called")


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _plain(name: str) -> str:
    """Return the name of a module or parameter without those of wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and in the place of a tuple, a list or a mapping, what is in it."""
    for value in values:
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, as a dense one."""
    local: Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach() if local.layout == torch.strided else local.detach().to_dense()


def _in_backward() -> bool:
    # The only way to tell; torch.utils.checkpoint asks in the same way.
    return bool(torch._C._current_graph_task_id() != -1)
