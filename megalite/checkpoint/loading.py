"""Loading: each rank reads the saved boxes that meet what it holds, whatever layout they were saved under."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from megalite.checkpoint import tensor_file
from megalite.checkpoint.agreement import check_all_see, together
from megalite.checkpoint.manifest import Manifest, SavedBox, TrainingState, covers, read_manifest
from megalite.checkpoint.regions import MASTER, MODEL, OPTIMIZER, Region, held_regions
from megalite.checkpoint.storage import AnyPath
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces

_SHOWN = 8  # problems in one message
_PRECISION_FLAGS = {
    "bfloat16": "with --bf16",
    "float16": "with --fp16",
    "float64": "with --fp64",
    "float32": "without --bf16, --fp16 and --fp64",
}

Plan = dict[str, dict[SavedBox, list[Region]]]
"""By file: each saved box that is needed, and the regions that need it."""


def load(
    path: AnyPath,
    module: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    *,
    state: bool = True,
    casts: bool = False,
) -> TrainingState:
    """Set the weights, and the optimizer's state if there is one, from the checkpoint in folder `path`.

    Every rank calls it. Every byte that is used has been compared with its checksum. Padding becomes zero. Without
    `state` the optimizer begins anew, its master weights those that were loaded. With `casts` weights that were saved
    in another precision are rounded, once, from the finest that there are.

    Raises:
        DamagedCheckpointError: a file is not as it was written; the same on every rank. The weights and the state may
            have been overwritten in part.
        CheckpointError: the checkpoint is not of this model, precision or optimizer; the same on every rank.
    """
    if optimizer is not None:
        optimizer.finish_parameter_gather()
    for parameter, _ in named_pieces(module):
        parameter.allocate()
    regions = held_regions(module, optimizer)
    doing = f"loading {path}"
    with together(mesh, doing):
        manifest = read_manifest(path)
        if optimizer is not None:
            _check_optimizer(manifest, optimizer, state, casts)
        regions = _wanted(manifest, regions, state, casts)
        plan = _plan(manifest, regions, casts)
    check_all_see(str(manifest.checksum), path, mesh)
    whole = optimizer is not None and state
    _check_all_used(manifest, regions, mesh, path, prefixes=(MODEL, OPTIMIZER) if whole else (MODEL,))
    with together(mesh, doing):
        _zero(module, optimizer)  # what is not read is padding
        _read(path, manifest, plan)
    if optimizer is not None:
        if not state and not casts:
            for part in optimizer.slices():
                if "master" in part.state:
                    part.state["master"].copy_(part.values)
        optimizer.steps = manifest.training.optimizer_steps if state else 0
        optimizer.begin_parameter_gather()
        optimizer.finish_parameter_gather()
    return manifest.training


def _wanted(manifest: Manifest, regions: Iterable[Region], state: bool, casts: bool) -> list[Region]:
    """What to fill, each region under the name of the tensor it is read from."""
    if casts:
        regions = (_from_the_finest(manifest, region) for region in regions)
    return [r for r in regions if state or r.name.startswith(MODEL) or (casts and r.name.startswith(MASTER))]


def _from_the_finest(manifest: Manifest, region: Region) -> Region:
    """Weights that are saved in another precision are read from their master, a master that is not saved from them."""
    if region.name.startswith(MODEL):
        master = MASTER + region.name.removeprefix(MODEL)
        saved = manifest.tensors.get(region.name)
        alike = saved is None or saved.dtype == tensor_file.dtype_name(region.values.dtype)
        return region if alike or master not in manifest.tensors else replace(region, name=master)
    if region.name.startswith(MASTER) and region.name not in manifest.tensors:
        return replace(region, name=MODEL + region.name.removeprefix(MASTER))
    return region


def _check_optimizer(manifest: Manifest, optimizer: Optimizer, state: bool, casts: bool) -> None:
    """Raise CheckpointError where the state that it holds is not what the optimizer keeps."""

    def listed(kinds: set[str]) -> str:
        return ", ".join(sorted(kinds)) or "nothing"

    saved = {name.split("/")[1] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    kinds = optimizer.state_kinds
    if not state or not optimizer.shards:  # a stage that holds nothing does not know of masters
        return
    if saved - {"master"} == kinds - {"master"} and (casts or saved == kinds):
        return
    if not saved:
        raise CheckpointError(
            f"it holds weights alone where this run needs {listed(kinds)}, too: it was saved with --no-save-optim. "
            "--no-load-optim goes on with a new optimizer, --finetune begins at step 0"
        )
    raise CheckpointError(
        f"of the optimizer it holds {listed(saved)} for the weights where this run needs {listed(kinds)}: give "
        "--optimizer, the precision and --sgd-momentum as in the run that saved it, or --no-load-optim"
    )


def _plan(manifest: Manifest, regions: Iterable[Region], casts: bool) -> Plan:
    """What to read. Raises CheckpointError where the checkpoint does not hold, in kind and whole, what is needed."""
    plan: Plan = {}
    problems: dict[str, None] = {}
    for region in regions:
        if problem := _mismatch(manifest, region, casts):
            problems[problem] = None
            continue
        for saved in manifest.tensors[region.name].boxes:
            if saved.box.intersection(region.box) is not None:
                plan.setdefault(saved.file, {}).setdefault(saved, []).append(region)
    if problems:
        raise CheckpointError(f"it does not fit this run:\n{_listed(list(problems))}")
    return plan


def _mismatch(manifest: Manifest, region: Region, casts: bool) -> str | None:
    """Why a region cannot be read, or None."""
    saved = manifest.tensors.get(region.name)
    if saved is None:
        return f"{region.name} {list(region.shape)} is not in it: it is of another model"
    if saved.shape != region.shape:
        return f"{region.name} has shape {list(saved.shape)} in it and {list(region.shape)} in this run's model"
    dtype = tensor_file.dtype_name(region.values.dtype)
    in_any = casts or region.name.startswith(OPTIMIZER)  # the optimizer is told in which precision to keep its state
    if saved.dtype != dtype and not in_any:
        flags = f"start the run {_PRECISION_FLAGS[saved.dtype]}, or " if saved.dtype in _PRECISION_FLAGS else ""
        return (
            f"{region.name} is {saved.dtype} in it and {dtype} in this run, and nothing is cast silently; {flags}give "
            "--load-casts"
        )
    if not covers((box.box for box in saved.boxes), region.box):
        return f"{region.name} is incomplete in it: its boxes do not hold {region.box} exactly once"
    return None


def _check_all_used(
    manifest: Manifest, regions: Iterable[Region], mesh: ParallelMesh, path: AnyPath, prefixes: tuple[str, ...]
) -> None:
    """Raise CheckpointError, on every rank, where the checkpoint holds a tensor that no rank has a place for."""
    names = [name for name in manifest.tensors if name.startswith(prefixes)]
    ours = {region.name for region in regions}
    ours |= {MODEL + name.removeprefix(MASTER) for name in ours if name.startswith(MASTER)}
    used = torch.tensor([name in ours for name in names], dtype=torch.int32, device=mesh.device)
    flags = collectives.all_reduce_(used, mesh.world(), "max").tolist()
    unused = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if unused:
        problems = [f"{name} {list(manifest.tensors[name].shape)} has no place in this run's model" for name in unused]
        raise CheckpointError(f"loading {path} failed: it is of another model:\n{_listed(problems)}")


@torch.no_grad()
def _zero(module: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is None:
        for parameter in module.parameters():
            parameter.zero_()
        return
    for part in optimizer.slices():
        for values in (part.values, *part.state.values()):
            values.zero_()


def _read(path: AnyPath, manifest: Manifest, plan: Plan) -> None:
    for file, boxes in plan.items():
        wanted = [(saved.entry, saved.checksum) for saved in boxes]
        tensors = tensor_file.read(path / file, manifest.files[file], wanted)
        for values, (saved, regions) in zip(tensors, boxes.items(), strict=True):
            for region in regions:
                part = saved.box.intersection(region.box)
                assert part is not None
                place = region.values[part.relative_to(region.box).slices()]
                place.copy_(values[part.relative_to(saved.box).slices()])


def _listed(problems: list[str]) -> str:
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
