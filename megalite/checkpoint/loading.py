"""Loading: each rank reads the saved boxes that meet what it holds, whatever layout they were saved under."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn

from megalite.checkpoint.agreement import all_gather_text, check_all_see, together
from megalite.checkpoint.container import Part
from megalite.checkpoint.fetching import Dealt, Target, deal, fetch, needed_blocks
from megalite.checkpoint.manifest import (
    MASTER,
    MODEL,
    OPTIMIZER,
    STATE,
    Block,
    Manifest,
    SavedBox,
    TrainingState,
    covers,
    dtype_name,
    read_manifest,
)
from megalite.checkpoint.plan import Plan, Region, boxes, held_regions, held_slices, held_states
from megalite.checkpoint.reader import dtype_of
from megalite.checkpoint.source import Kind, Source
from megalite.checkpoint.storage import AnyPath
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box

_SHOWN = 8  # problems in one message
_PRECISION_FLAGS = {
    "bfloat16": "with --bf16",
    "float16": "with --fp16",
    "float64": "with --fp64",
    "float32": "without --bf16, --fp16 and --fp64",
}


def load(
    path: AnyPath,
    module: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    *,
    described: Manifest | None = None,
    plan: Plan | None = None,
    state: bool = True,
    casts: bool = False,
) -> TrainingState:
    """Set the weights, the modules' state, and the optimizer's if there is one, from the checkpoint in folder `path`.

    Every rank calls it. Every byte that is used has been compared with its checksum. Padding becomes zero. `described`:
    what `check_whole` has read of it; None: it is read here. Without `state` the optimizer begins anew, its master
    weights those that were loaded. With `casts` weights that were saved in another precision are rounded, once, from
    the finest that there are. With the `plan` of all ranks, those of a node read what several of them need once;
    without, each reads for itself.

    Raises:
        DamagedCheckpointError: a file is not as it was written; the same on every rank. The weights and the state may
            have been overwritten in part.
        CheckpointError: the checkpoint is not of this model, precision or optimizer; the same on every rank.
    """
    if optimizer is not None:
        optimizer.finish_parameter_gather()
    for parameter, _ in named_pieces(module):
        parameter.allocate()
    with optimizer.unpacked() if optimizer is not None else nullcontext():
        manifest = _fill(path, module, optimizer, mesh, described, plan, state=state, casts=casts)
    if optimizer is not None:
        optimizer.steps = manifest.training.optimizer_steps if state else 0
        optimizer.begin_parameter_gather()
        optimizer.finish_parameter_gather()
    return manifest.training


def _fill(
    path: AnyPath,
    module: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    described: Manifest | None,
    plan: Plan | None,
    *,
    state: bool,
    casts: bool,
) -> Manifest:
    """Set what this rank holds, as `load` says."""
    regions = held_regions(module, optimizer)
    doing = f"loading {path}"
    node = mesh.group_of(_on_this_node(mesh)) if plan is not None else mesh.group_of([mesh.rank])
    with together(mesh, doing):
        manifest = described or read_manifest(path)
        if optimizer is not None:
            _check_optimizer(manifest, optimizer, state, casts)
        chosen = [(name, r) for r in regions if (name := _source(manifest, r.part, state, casts)) is not None]
        _check_fits(manifest, [(name, region.part) for name, region in chosen], casts)
        wanted = _wanted(manifest, chosen)
        dealt = _dealt(manifest, plan, node, state, casts) if plan is not None and node.size > 1 else {}
    if described is None:
        check_all_see(str(manifest.checksum), path, mesh)
    kinds = (MODEL, STATE, OPTIMIZER) if optimizer is not None and state else (MODEL, STATE)
    _check_all_used(manifest, {name for name, _ in chosen}, mesh, path, kinds)
    _zero_the_rest(module, optimizer, state)
    failure = fetch(path, manifest, wanted, dealt, node, mesh.device)
    with together(mesh, doing):
        if failure is not None:
            raise failure
    if optimizer is not None and not state and not casts:
        for part in optimizer.slices():
            if (master := part.tensors.get("master")) is not None:
                master.copy_(part.values)
    return manifest


def load_weights(source: Source, what: str, module: nn.Module, optimizer: Optimizer | None, mesh: ParallelMesh) -> None:
    """Set the weights and the modules' state from a source, cast to what they are here; the optimizer begins anew.

    Every rank calls it. Padding becomes zero. The source has a weight by its logical name, state as `state/NAME`.
    Raises CheckpointError, the same on every rank, where `what` cannot be read, or is not of this model.
    """
    if optimizer is not None:
        optimizer.finish_parameter_gather()
    for parameter, _ in named_pieces(module):
        parameter.allocate()
    with optimizer.unpacked() if optimizer is not None else nullcontext(), together(mesh, f"loading {what}"):
        regions = [r for r in held_regions(module, optimizer) if r.part.name.startswith((MODEL, MASTER, STATE))]
        held = [(r.part.name.removeprefix(MODEL).removeprefix(MASTER), r) for r in regions]
        different = (_difference(name, source.tensors.get(name), region.part) for name, region in held)
        if problems := dict.fromkeys(problem for problem in different if problem):
            raise CheckpointError(f"it does not fit this run:\n{_listed(list(problems))}")
        _zero_the_rest(module, optimizer, state=False)
        for name, region in held:
            source.fill(name, region.part.box, region.values)
    if optimizer is not None:
        optimizer.begin_parameter_gather()
        optimizer.finish_parameter_gather()


def _source(manifest: Manifest, part: Part, state: bool, casts: bool) -> str | None:
    """The tensor that a part is read from; None where it is not to be filled."""
    name = _finest(manifest, part) if casts else part.name
    return name if state or name.startswith((MODEL, STATE)) or (casts and name.startswith(MASTER)) else None


def _finest(manifest: Manifest, part: Part) -> str:
    """Weights that are saved in another precision are read from their master, a master that is not saved from them."""
    if part.name.startswith(MODEL):
        master = MASTER + part.name.removeprefix(MODEL)
        saved = manifest.tensors.get(part.name)
        alike = saved is None or saved.dtype == dtype_name(part.dtype)
        return part.name if alike or master not in manifest.tensors else master
    if part.name.startswith(MASTER) and part.name not in manifest.tensors:
        return MODEL + part.name.removeprefix(MASTER)
    return part.name


def _wanted(manifest: Manifest, chosen: Iterable[tuple[str, Region]]) -> dict[SavedBox, list[Target]]:
    """What is to be filled from each saved box."""
    wanted: dict[SavedBox, list[Target]] = {}
    for name, region in chosen:
        for saved in manifest.tensors[name].boxes:
            if saved.box.intersection(region.part.box) is not None:
                wanted.setdefault(saved, []).append(Target(region.part.box, region.values))
    return wanted


def _dealt(manifest: Manifest, plan: Plan, node: Group, state: bool, casts: bool) -> Dealt:
    """Which blocks several ranks of the node need, and who reads them."""
    needs: dict[int, list[Block]] = {}
    for rank in node.ranks:
        boxes: dict[str, list[Box]] = {}
        for part in plan.held(rank):
            name = _source(manifest, part, state, casts)
            if name in manifest.tensors:
                boxes.setdefault(name, []).append(part.box)
        needs[rank] = [
            block
            for name, needed in boxes.items()
            for saved in manifest.tensors[name].boxes
            for block in needed_blocks(saved, needed)
        ]
    return deal(needs)


def _on_this_node(mesh: ParallelMesh) -> list[int]:
    hosts = all_gather_text(os.uname().nodename, mesh)
    return [rank for rank, host in enumerate(hosts) if host == hosts[mesh.rank]]


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


def _check_fits(manifest: Manifest, chosen: Iterable[tuple[str, Part]], casts: bool) -> None:
    """Raise CheckpointError where the checkpoint does not hold, in kind and whole, what is needed."""
    problems = dict.fromkeys(problem for name, part in chosen if (problem := _mismatch(manifest, name, part, casts)))
    if problems:
        raise CheckpointError(f"it does not fit this run:\n{_listed(list(problems))}")


def _mismatch(manifest: Manifest, name: str, part: Part, casts: bool) -> str | None:
    """Why a part cannot be read from the tensor of a name, or None."""
    saved = manifest.tensors.get(name)
    different = _difference(name, None if saved is None else Kind(saved.shape, dtype_of(saved)), part)
    if saved is None or different is not None:
        return different
    dtype = dtype_name(part.dtype)
    if saved.dtype != dtype and not casts:
        flags = f"start the run {_PRECISION_FLAGS[saved.dtype]}, or " if saved.dtype in _PRECISION_FLAGS else ""
        if name.startswith(OPTIMIZER):
            flags = "give --main-params-dtype and --exp-avg-dtype, or their like, as they were, or "
        elif name.startswith(STATE):
            flags = ""
        return (
            f"{name} is {saved.dtype} in it and {dtype} in this run, and nothing is cast silently; {flags}give "
            "--load-casts"
        )
    if not covers((box.box for box in saved.boxes), part.box):
        return f"{name} is incomplete in it: its boxes do not hold {part.box} exactly once"
    return None


def _difference(name: str, saved: Kind | None, part: Part) -> str | None:
    """Why a part cannot be read from a tensor, whatever is cast, or None."""
    if saved is None:
        return f"{name} {list(part.shape)} is not in it: it is of another model"
    if saved.shape != part.shape:
        return f"{name} has shape {list(saved.shape)} in it and {list(part.shape)} in this run's model"
    if saved.dtype.is_floating_point != part.dtype.is_floating_point:
        ours, theirs = dtype_name(part.dtype), dtype_name(saved.dtype)
        return f"{name} is {theirs} in it and {ours} in this run: whole numbers are never cast; load another checkpoint"
    return None


def _check_all_used(
    manifest: Manifest, ours: set[str], mesh: ParallelMesh, path: AnyPath, prefixes: tuple[str, ...]
) -> None:
    """Raise CheckpointError, on every rank, where the checkpoint holds a tensor that no rank has a place for."""
    names = [name for name in manifest.tensors if name.startswith(prefixes)]
    ours = ours | {MODEL + name.removeprefix(MASTER) for name in ours if name.startswith(MASTER)}
    used = torch.tensor([name in ours for name in names], dtype=torch.int32, device=mesh.device)
    flags = collectives.all_reduce_(used, mesh.world(), "max").tolist()
    unused = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if unused:
        problems = [f"{name} {list(manifest.tensors[name].shape)} has no place in this run's model" for name in unused]
        raise CheckpointError(f"loading {path} failed: it is of another model:\n{_listed(problems)}")


@torch.no_grad()
def _zero_the_rest(module: nn.Module, optimizer: Optimizer | None, state: bool) -> None:
    """Set to zero what nothing is read into: padding, and where the optimizer begins anew all its state. What has a
    place of its own is set to its first values, whatever is read into it then."""
    for _, own in held_states(module, optimizer):
        own.begin()
    for run in held_slices(module, optimizer):
        for values in () if state else run.tensors.values():
            values.zero_()
        position = run.start
        ends = [(first, box.numel) for _, box, first in boxes(run.parameter, run.start, run.stop)]
        for first, count in [*ends, (run.stop, 0)]:
            for values in (run.values, *run.tensors.values()):
                values[position - run.start : first - run.start].zero_()
            position = first + count


def _listed(problems: list[str]) -> str:
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
