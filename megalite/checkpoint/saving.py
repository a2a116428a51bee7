"""Saving: each rank writes the boxes that it owns, then one rank writes the manifest and gives the whole its name."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from megalite.checkpoint import manifest, tensor_file
from megalite.checkpoint.agreement import all_gather_text, together
from megalite.checkpoint.attempt import Attempt, new_attempt
from megalite.checkpoint.manifest import Manifest, SavedBox, SavedTensor, TrainingState, covers
from megalite.checkpoint.regions import MODEL, Region, owned_regions
from megalite.checkpoint.storage import AnyPath, sizes
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box

_ADVICE = "Checkpoints saved before are as they were. Free space, or give another folder with --save"


def save(
    directory: AnyPath,
    training: TrainingState,
    module: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    config: dict[str, Any],
    *,
    state: bool = True,
) -> AnyPath:
    """Write a checkpoint into the run directory, make it the latest and return its folder. Every rank calls it.

    `config`: the run's configuration by section, JSON values. Without `state`, or an optimizer, the weights alone are
    saved.
    A crash at any moment leaves the checkpoint that was the latest, or this one. One of the same iteration is replaced.

    Raises:
        CheckpointError: a rank could not write; the same on every rank, and what had been written is removed.
    """
    if optimizer is not None:
        optimizer.finish_parameter_gather()
    attempt = new_attempt(directory, training.iteration, mesh)
    doing = f"saving iteration {training.iteration} to {directory}"
    first = mesh.rank == 0
    try:
        with together(mesh, doing, _ADVICE):
            if first:
                attempt.begin()
        with together(mesh, doing, _ADVICE):
            owned = owned_regions(module, optimizer, mesh)
            written = [region for region in owned if state or region.name.startswith(MODEL)]
            shard = _write_shard(attempt, mesh.rank, written)
        shards = [json.loads(text) for text in all_gather_text(json.dumps(shard), mesh)]
        with together(mesh, doing, _ADVICE):
            if first:
                files = {shard["file"]: shard["size"] for shard in shards}
                finish(attempt, Manifest(training, config, files, _merge(shards)))
    except CheckpointError:
        if first:
            attempt.abandon()
        raise
    return attempt.path


def _write_shard(attempt: Attempt, rank: int, regions: list[Region]) -> dict[str, Any]:
    """Write a rank's file; the answer says what is in it."""
    path = attempt.file(f"rank_{rank:05d}.safetensors")
    checksums = tensor_file.write(path, [(manifest.entry(r.name, r.box), r.values) for r in regions])
    boxes = [
        [r.name, r.shape, tensor_file.dtype_name(r.values.dtype), r.box.offset, r.box.size, checksum]
        for r, checksum in zip(regions, checksums, strict=True)
    ]
    return {"file": path.name, "size": path.stat().st_size, "boxes": boxes}


def _merge(shards: list[dict[str, Any]]) -> dict[str, SavedTensor]:
    """The tensors, by name, of which the shards hold the boxes."""
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    boxes: dict[str, list[SavedBox]] = {}
    for shard in shards:
        for name, shape, dtype, offset, size, checksum in shard["boxes"]:
            kinds[name] = tuple(shape), dtype
            saved = SavedBox(name, Box(tuple(offset), tuple(size)), shard["file"], checksum)
            boxes.setdefault(name, []).append(saved)
    return {name: SavedTensor(*kinds[name], tuple(boxes[name])) for name in sorted(kinds)}


def finish(attempt: Attempt, made: Manifest) -> None:
    """Check that the checkpoint is whole, add its manifest and give it its name."""
    for name, tensor in made.tensors.items():
        if not covers((saved.box for saved in tensor.boxes), Box.whole(tensor.shape)):
            raise CheckpointError(f"the ranks have not written each element of {name} once: a defect, please report it")
    found = sizes(attempt.folder, made.files)
    for file, size in made.files.items():
        if found.get(file) != size:
            raise CheckpointError(
                f"{attempt.folder / file}, written by another rank, cannot be seen from rank 0: the folder must be on "
                "a file system that all nodes share"
            )
    attempt.commit(made.to_json())
