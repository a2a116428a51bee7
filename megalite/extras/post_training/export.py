"""Export of the weights that are being trained, as Hugging Face's tensors by name.

    export_weights(chunks, optimizer, FolderReceiver(Path("run/step-100")))

All ranks call it together. The ranks that hold parts of a tensor send them to rank 0, one box of rows after the other,
which hands each box to the receiver. No rank ever holds more than one tensor besides its own part of the model. Under
ZeRO 3, the parts are read from the ranks' slices, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.manifest import MODEL, STATE, dtype_name
from megalite.checkpoint.plan import Region, saved_regions
from megalite.checkpoint.tensors import Kind, Source, natural_order
from megalite.config import ModelConfig
from megalite.config.adapters import AdaptersConfig
from megalite.conversion.adapters import Adapters
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.conversion.mapping import ToFiles, file_tensors
from megalite.conversion.opened import (
    Renamed,
    dtype_of_weights,
    kept_in_fp32,
    logical_tensors,
    tensors_of_training,
)
from megalite.extras.post_training.receivers import FolderReceiver, Receiver, row_ranges
from megalite.model.gpt import GPT
from megalite.optim.optimizer import Optimizer
from megalite.parallel.adapter import is_adapters
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.collectives import Pending, all_gather_json, launch
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box

EXPORTING = "exporting the weights"


def export_weights(
    chunks: Sequence[GPT],
    optimizer: Optimizer,
    to: Receiver | Path | str,
    *,
    dtype: torch.dtype | None = None,
    sequence_length: int | None = None,
    model_type: str | None = None,
    adapters: AdaptersConfig | None = None,
) -> None:
    """Stream the weights to a receiver, or into a new folder.

    Args:
        chunks: this rank's stages, whose configuration is that of the whole network.
        to: the receiver. Only that of rank 0 is used.
        dtype: dtype to cast to; None: that of the training.
        sequence_length: maximum sequence length in config.json for a network that has none.
        model_type: family to prefer if several have this network.
        adapters: those of the network, which are merged; None: it has none.

    Raises CheckpointError, the same on every rank, if no family has this network, or if the receiver fails. The other
    ranks learn of a failure at the end.
    """
    mesh, model = optimizer.mesh, chunks[0].config
    optimizer.finish_parameter_gather()
    receiver = FolderReceiver(Path(to)) if isinstance(to, (str, Path)) else to
    model = replace(model, max_position_embeddings=model.max_position_embeddings or sequence_length)
    try:
        source, kept = _weights(chunks, optimizer, model, adapters)
        _export(source, kept, model, receiver, mesh, dtype, model_type)
    except BaseException:
        if mesh.rank == 0:
            receiver.abandon()
        raise


def _weights(
    chunks: Sequence[GPT], optimizer: Optimizer, model: ModelConfig, adapters: AdaptersConfig | None
) -> tuple[Source, Mapping[str, tuple[int, ...]]]:
    """Return the weights that all ranks read together, with adapters merged, and their shapes."""
    shapes = logical_tensors(model)
    if adapters is None or adapters.lora_rank is None:
        return Collected(optimizer, shapes), shapes
    here = (piece.tensor for chunk in chunks for _, piece in named_pieces(chunk))
    found = all_gather_json({each.name: each.shape for each in here if is_adapters(each.name)}, optimizer.mesh)
    own = {name: tuple(shape) for those in found for name, shape in those.items()}
    every = Collected(optimizer, {**shapes, **own})
    base, factors = (Renamed(every, {name: name for name in names}) for names in (shapes, own))
    return Adapters(adapters, base, factors, tensors_of_training(model)).merged(), shapes


def _export(
    collected: Source,
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    receiver: Receiver,
    mesh: ParallelMesh,
    dtype: torch.dtype | None,
    model_type: str | None,
) -> None:
    """Send the tensors of a Hugging Face model to a receiver. All ranks call it together."""
    with raise_on_all_ranks(mesh, EXPORTING):
        family, config = choose(sorted(FAMILIES, key=lambda each: each.name != model_type), model)
        mapping = file_tensors(family.rules, model, shapes, family.halves)
        files = ToFiles(collected, mapping, dtype, _device(mesh), kept_in_fp32(model))
        kinds = {name: files.tensors[name] for name in sorted(files.tensors, key=natural_order)}
        config["torch_dtype"] = dtype_name(dtype or dtype_of_weights(collected.tensors, model))
    _stream(files.fill, kinds, config, receiver, mesh)


def export_tensors(optimizer: Optimizer, to: Receiver | Path | str, aliases: Mapping[str, str]) -> None:
    """Stream the weights and the state of modules under their own names to a receiver, or into a new folder.

    `aliases`: other names of tied weights, each with the name that its weight has.

    All ranks call it together. Raises CheckpointError as `export_weights` does.
    """
    mesh = optimizer.mesh
    receiver = FolderReceiver(Path(to)) if isinstance(to, (str, Path)) else to
    own = {
        region.part.name.removeprefix(MODEL): region.part.shape
        for region in saved_regions(optimizer)
        if region.part.name.startswith((MODEL, STATE))
    }
    shapes = {name: tuple(shape) for those in all_gather_json(own, mesh) for name, shape in those.items()}
    collected = Collected(optimizer, shapes)
    found = {name.removeprefix(STATE): name for name in shapes}
    found |= {alias: found[name] for alias, name in aliases.items()}
    names = {name: found[name] for name in sorted(found, key=natural_order)}
    kinds = {name: collected.tensors[source] for name, source in names.items()}
    try:
        _stream(lambda name, box, values: collected.fill(names[name], box, values), kinds, {}, receiver, mesh)
    except BaseException:
        if mesh.rank == 0:
            receiver.abandon()
        raise


def _device(mesh: ParallelMesh) -> torch.device:
    """Return the device of boxes: the ranks that only send follow without memory."""
    return mesh.device if mesh.rank == 0 else torch.device("meta")


def _stream(
    fill: Callable[[str, Box, Tensor], None],
    kinds: Mapping[str, Kind],
    config: Mapping[str, Any],
    receiver: Receiver,
    mesh: ParallelMesh,
) -> None:
    """Fill the boxes of all tensors, one after the other, and hand them to the receiver on rank 0."""
    is_root, device = mesh.rank == 0, _device(mesh)
    with raise_on_all_ranks(mesh, EXPORTING):
        if is_root:
            receiver.begin(kinds, config)
    failure: Exception | None = None
    for name, kind in kinds.items():
        for start, stop in row_ranges(kind):
            box = Box((start, *(0,) * (len(kind.shape) - 1)), (stop - start, *kind.shape[1:]))
            values = torch.empty(box.size, dtype=kind.dtype, device=device)
            fill(name, box, values)
            if is_root and failure is None:
                try:
                    receiver.box(name, start, values)
                except Exception as error:  # the other ranks still send, so that none waits for this one
                    failure = error
    with raise_on_all_ranks(mesh, EXPORTING):
        if failure is not None:
            raise failure
        if is_root:
            receiver.finish()


class Collected:
    """Tensors of a network that is spread over ranks, read on rank 0 (a `Source`).

    All ranks call `fill` together, in the same order. `values` is filled on rank 0 only.
    """

    def __init__(self, optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Exchange the places of all parts. All ranks call it together. `shapes`: the tensors' shapes by name."""
        self.shapes, self._mesh = shapes, optimizer.mesh
        self._own: dict[str, list[Region]] = {}
        for region in saved_regions(optimizer):
            if (name := region.part.name.removeprefix(MODEL)) in shapes:
                self._own.setdefault(name, []).append(region)
        own = [
            (name, dtype_name(region.part.dtype), region.part.box.offset, region.part.box.size)
            for name, regions in self._own.items()
            for region in regions
        ]
        self._boxes: dict[str, dict[int, list[Box]]] = {name: {} for name in shapes}
        """Parts of each tensor, by the rank that holds them. Over all ranks, each element is held once."""
        dtypes: dict[str, torch.dtype] = {}
        for rank, parts in enumerate(all_gather_json(own, self._mesh)):
            for name, dtype, offset, size in parts:
                self._boxes[name].setdefault(rank, []).append(Box(tuple(offset), tuple(size)))
                dtypes[name] = getattr(torch, dtype)
        self.tensors = {name: Kind(shape, dtypes[name]) for name, shape in shapes.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values` on rank 0, as in `Source`."""
        rank, dtype = self._mesh.rank, self.tensors[name].dtype
        for holder, held in self._boxes[name].items():
            parts = [both for each in held if (both := each.intersection(box)) is not None]
            if not parts or rank not in (0, holder):
                continue
            if rank == holder:
                pairs = ((region, region.part.box.intersection(box)) for region in self._own[name])
                own = [
                    r.values[both.relative_to(r.part.box).slices()].flatten() for r, both in pairs if both is not None
                ]
                flat = own[0] if len(own) == 1 else torch.cat(own)
                if rank != 0:
                    self._message(dist.ProcessGroup.send, flat.contiguous().to(self._mesh.device), 0)
                    continue
            else:
                flat = torch.empty(sum(part.numel for part in parts), dtype=dtype, device=self._mesh.device)
                self._message(dist.ProcessGroup.recv, flat, holder)
            sizes = [part.numel for part in parts]
            for part, found in zip(parts, flat.split(sizes), strict=True):
                values[part.relative_to(box).slices()].copy_(found.view(part.size))

    def _message(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        """Send to or receive from a rank, and wait for it."""
        world = self._mesh.world()
        work = launch(operation, world.process_group, [tensor], peer, 0)
        Pending(work, tensor, world).wait("waited for a part of the weights from or to rank %d", peer)
