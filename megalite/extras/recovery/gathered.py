"""One checkpoint of the copies of all ranks, for ranks of another layout: each file is on one rank only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from megalite.checkpoint.manifest import Manifest, SavedBox, SavedTensor
from megalite.extras.recovery.slot import Slot, manifest_of
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh


def gathered(slots: Mapping[int, Slot], mesh: ParallelMesh) -> tuple[Manifest, dict[str, int]]:
    """Return the manifest of all copies together, as of a checkpoint in `FOLDER`, and the rank that has each file.

    Called by all ranks together. On the rank that has a file, its name is that of the descriptor there. Of boxes that
    several ranks held, the one of the first of them is used.

    Args:
        slots: the slots of this rank, by the rank whose copy is in them.

    Raises CorruptCheckpointError, on all ranks alike, if a manifest cannot be used.
    """
    mine = [(whose, slot.text(), slot.descriptor, os.fstat(slot.descriptor).st_size) for whose, slot in slots.items()]
    texts: dict[int, tuple[int, str, int, int]] = {}
    for holder, told in enumerate(all_gather_json(mine, mesh)):
        for whose, text, descriptor, size in told:
            texts[whose] = holder, text, descriptor, size
    found, holders = list[Manifest](), dict[str, int]()
    for _, (holder, text, descriptor, size) in sorted(texts.items()):
        name = str(descriptor) if holder == mesh.rank else f"{descriptor} of rank {holder}"
        holders[name] = holder
        found.append(manifest_of(text, name, size))
    kinds: dict[str, SavedTensor] = {}
    boxes: dict[str, dict[object, SavedBox]] = {}
    for each in found:
        for name, tensor in each.tensors.items():
            kinds.setdefault(name, tensor)
            for saved in tensor.boxes:
                boxes.setdefault(name, {}).setdefault(saved.box, saved)
    tensors = {name: replace(tensor, boxes=tuple(boxes[name].values())) for name, tensor in kinds.items()}
    files = {name: file for each in found for name, file in each.files.items()}
    return replace(found[0], files=files, tensors=tensors), holders
