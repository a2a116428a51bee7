"""Load checkpoints: each rank reads the saved boxes that overlap its tensors, independent of the saving layout."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from megalite.checkpoint.fetching import fill
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import (
    MASTER,
    MODEL,
    OPTIMIZER,
    RANK,
    STATE,
    Manifest,
    TrainingState,
    dtype_name,
    plain_name,
    read_manifest,
)
from megalite.checkpoint.plan import Plan, boxes, held_regions, held_slices, held_states
from megalite.checkpoint.relayout import Origin, is_extra, notes, origin, saved_name, without_replica
from megalite.checkpoint.tensors import Kind, Source, TensorBox
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.optim.weight_mean import EMA
from megalite.parallel import collectives
from megalite.parallel.collective_error import check_all_see, raise_on_all_ranks
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.process.host import host_name
from megalite.storage import AnyPath

_SHOWN = 8  # maximum number of problems in one message
_PRECISION_FLAGS = {
    torch.bfloat16: "with --bf16",
    torch.float16: "with --fp16",
    torch.float64: "with --fp64",
    torch.float32: "without --bf16, --fp16 and --fp64",
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
    optional: Container[str] = (),
    alone: bool = False,
    holders: Mapping[str, int] | None = None,
) -> TrainingState:
    """Set the weights, the modules' state, and the optimizer's state (if given) from the checkpoint in folder `path`.

    Every rank calls it. All bytes that are used are verified against their checksums. Padding becomes zero.

    Args:
        described: the manifest, if `check_whole` has already read it; otherwise it is read here.
        plan: the plan of all ranks. With a plan, a block that several ranks of a node need is read only once per node;
            without one, each rank reads all blocks that it needs.
        state: if False, the optimizer starts fresh, and its master weights become copies of the loaded weights.
        casts: allow weights that were saved in another precision. They are rounded once, from the most precise saved
            values.
        optional: modules' state, as `state/NAME`, that may be missing in the network, or in the checkpoint: it then
            keeps its initial values.
        alone: `described` is of what this rank holds, and each rank has another one.
        holders: the rank that can read each file of `described`, if others cannot; it sends all of it to them.

    Raises:
        CorruptCheckpointError: a file is damaged. It is the same error on every rank. Some weights and state may
            already be overwritten.
        CheckpointError: the checkpoint belongs to another model, precision or optimizer. It is the same error on every
            rank.
    """
    doing = f"loading {path}"
    state = state and optimizer is not None
    with _writable(module, optimizer):
        regions = held_regions(module, optimizer)
        if holders is not None:
            node = mesh.world()
        else:
            node = mesh.group_of(_on_this_node(mesh)) if plan is not None else mesh.group_of([mesh.rank])
        with raise_on_all_ranks(mesh, doing):
            manifest = described or read_manifest(path)
            if optimizer is not None:
                _check_optimizer(manifest, optimizer, state, casts)
            chosen = [(found, r) for r in regions if (found := _origin(manifest, r.part, state, casts)) is not None]
            chosen = [(o, r) for o, r in chosen if o.name in manifest.tensors or plain_name(o.name) not in optional]
            _raise_if_any(_mismatch(manifest, found, region.part, casts) for found, region in chosen)
            needs = _needs(manifest, plan, node, state, casts) if plan is not None and node.size > 1 else {}
        if described is None:
            check_all_see(str(manifest.checksum), path, mesh)
        kinds = (MODEL, STATE, OPTIMIZER) if optimizer is not None and state else (MODEL, STATE)
        readers = node if alone else mesh.world()
        with raise_on_all_ranks(mesh, None) if alone else nullcontext():
            ours = {plain_name(found.name) for found, _ in chosen}
            _check_all_used(manifest, ours, readers, mesh.device, path, kinds, optional)
        _zero_the_rest(module, optimizer, state)
        failure = fill(path, manifest, chosen, needs, node, mesh.device, holders)
        with raise_on_all_ranks(mesh, doing):
            if failure is not None:
                raise failure
        if optimizer is not None and not state and not casts:
            _begin_masters(optimizer)
        if optimizer is not None:
            _begin_means(optimizer, manifest if state else None)
        if optimizer is not None:
            optimizer.steps = manifest.training.optimizer_steps if state else 0
    return manifest.training


def load_weights(
    source: Source,
    what: str,
    module: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    fresh: Container[str] = (),
) -> None:
    """Set the weights and the modules' state from a source, cast to the dtypes of this network.

    Every rank calls it. The optimizer starts fresh. Padding becomes zero. The source has each weight under its logical
    name, and state under `state/NAME`; without those in `fresh`, which then keep their initial values. Raises
    CheckpointError, the same on every rank, if `what` cannot be read or is another model.
    """
    with _writable(module, optimizer), raise_on_all_ranks(mesh, f"loading {what}"):
        regions = [(without_replica(region.part), region) for region in held_regions(module, optimizer)]
        held = [
            (part.name.removeprefix(MODEL).removeprefix(MASTER), part, region)
            for part, region in regions
            if part.name.startswith((MODEL, MASTER, STATE))
        ]
        held = [each for each in held if each[0] not in fresh]
        _raise_if_any(_difference(name, source.tensors.get(name), part) for name, part, _ in held)
        _zero_the_rest(module, optimizer, state=False)
        if optimizer is not None:
            _begin_masters(optimizer)  # those of `fresh` have no others
        for name, part, region in held:
            source.fill(name, part.box, region.values.view(part.box.size))
        if optimizer is not None:
            _begin_means(optimizer, None)


def relayout_notes(
    manifest: Manifest, module: nn.Module, optimizer: Optimizer | None, *, state: bool = True
) -> tuple[str, ...]:
    """Return a line for each kind of state that a load dropped, left out, began or changed to other replicas.

    `state`: whether the optimizer's state was loaded.
    """
    parts = [region.part for region in held_regions(module, optimizer)]
    if not state:
        return notes(
            manifest, [part for part in parts if plain_name(part.name).startswith((MODEL, STATE))], extra=False
        )
    return notes(manifest, parts)


@contextmanager
def _writable(module: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Allocate the parameters, let the block set them while the optimizer does not use them, and then gather them."""
    if optimizer is not None:
        optimizer.finish_parameter_gather()
    for parameter, _ in named_pieces(module):
        if optimizer is None or parameter.coded is None:  # one whose codes are gathered has values in slices alone
            parameter.allocate()
    with optimizer.settable_for_load() if optimizer is not None else nullcontext():
        yield
    if optimizer is not None:
        optimizer.begin_parameter_gather()
        optimizer.finish_parameter_gather()


def _origin(manifest: Manifest, part: TensorBox, state: bool, casts: bool) -> Origin | None:
    """Return the saved values from which a part is read; None if the part is not loaded.

    Frozen weights were once saved as state.
    """
    if part.name.startswith(RANK):
        saved = manifest.tensors.get(part.name)
        alike = saved is not None and (saved.shape, saved.dtype) == (part.shape, part.dtype)
        return Origin(part.name, (part.box,)) if alike and state else None
    plain = plain_name(part.name)

    def has(name: str) -> bool:
        return saved_name(manifest, name, part, state=state) in manifest.tensors

    name = _finest(manifest, part, plain) if casts else plain
    if not has(name) and has(earlier := STATE + name.removeprefix(MODEL)):
        return origin(manifest, earlier, part, state=state)
    if is_extra(name) and not has(name):
        return None
    loaded = state or name.startswith((MODEL, STATE)) or (casts and name.startswith(MASTER))
    return origin(manifest, name, part, state=state) if loaded else None


def _finest(manifest: Manifest, part: TensorBox, plain: str) -> str:
    """Return the most precise saved tensor for a part, by its name without an axis of replicas.

    A weight that is saved in another precision is read from its master weight. A master weight that is not saved is
    read from its weight.
    """
    saved = manifest.tensors.get(saved_name(manifest, plain, part))
    if plain.startswith(MODEL):
        master = MASTER + plain.removeprefix(MODEL)
        alike = saved is None or saved.dtype == part.dtype
        return plain if alike or saved_name(manifest, master, part) not in manifest.tensors else master
    if plain.startswith(MASTER) and saved is None:
        return MODEL + plain.removeprefix(MASTER)
    return plain


def _needs(manifest: Manifest, plan: Plan, node: Group, state: bool, casts: bool) -> dict[int, list[Origin]]:
    """Return what each rank of the node reads."""
    return {
        rank: [
            found
            for part in plan.held(rank)
            if (found := _origin(manifest, part, state, casts)) is not None and found.name in manifest.tensors
        ]
        for rank in node.ranks
    }


def _on_this_node(mesh: ParallelMesh) -> list[int]:
    hosts = all_gather_json(host_name(), mesh)
    return [rank for rank, host in enumerate(hosts) if host == hosts[mesh.rank]]


def _check_optimizer(manifest: Manifest, optimizer: Optimizer, state: bool, casts: bool) -> None:
    """Raise CheckpointError if the saved optimizer state has other kinds than this optimizer's state."""

    def listed(kinds: set[str]) -> str:
        return ", ".join(sorted(kinds)) or "nothing"

    plain = [plain_name(name) for name in manifest.tensors if not is_extra(name)]
    saved = {name.split("/")[1] for name in plain if name.startswith(OPTIMIZER)}
    if not state or not optimizer.shards:  # without shards, the optimizer cannot tell whether there are masters
        return
    kinds, free = optimizer.state_kinds, {"master"} if casts else set[str]()
    if kinds - free <= saved <= optimizer.possible_state_kinds | free:
        return
    if not saved:
        raise CheckpointError(
            f"it has only weights, but this run also needs {listed(kinds)}: it was saved with --no-save-optim. "
            "--no-load-optim continues with a new optimizer, --finetune begins at step 0"
        )
    raise CheckpointError(
        f"its optimizer state is {listed(saved)} for the weights, but this run needs {listed(kinds)}: give "
        "--optimizer, the precision and --sgd-momentum as in the run that saved it, or --no-load-optim"
    )


def _raise_if_any(problems: Iterable[str | None]) -> None:
    """Raise CheckpointError with a list of the distinct problems; do nothing if all are None."""
    if found := list(dict.fromkeys(problem for problem in problems if problem is not None)):
        raise CheckpointError(f"it does not fit this run:\n{_listed(found)}")


def _mismatch(manifest: Manifest, found: Origin, part: TensorBox, casts: bool) -> str | None:
    """Return the reason why a part cannot be read from saved values, or None."""
    name, saved = found.name, manifest.tensors.get(found.name)
    different = _difference(name, saved, part)
    if saved is None or different is not None:
        return different
    if saved.dtype != part.dtype and not casts:
        flags = f"start the run {_PRECISION_FLAGS[saved.dtype]}, or " if saved.dtype in _PRECISION_FLAGS else ""
        if plain_name(name).startswith(OPTIMIZER):
            flags = "give --main-params-dtype, --exp-avg-dtype and similar flags as then, or "
        elif plain_name(name).startswith(STATE):
            flags = ""
        return (
            f"{name} is {dtype_name(saved.dtype)} in it and {dtype_name(part.dtype)} in this run, and nothing is cast "
            f"silently; {flags}give --load-casts"
        )
    for box in found.boxes if found.span is None else (found.span,):
        if not covers((each.box for each in (saved.boxes if found.span else saved.boxes_at(box))), box):
            return f"{name} is incomplete in it: its boxes do not have {box} exactly once"
    return None


def _difference(name: str, saved: Kind | None, part: TensorBox) -> str | None:
    """Return the reason why a part cannot be read from a tensor, even if casts are allowed, or None."""
    if saved is None:
        return f"{name} {list(part.shape)} is not in it: it is from another model"
    if _weight_shape(saved) != _weight_shape(part):
        return f"{name} has shape {list(saved.shape)} in it and {list(part.shape)} in this run's model"
    if saved.dtype.is_floating_point != part.dtype.is_floating_point:
        ours, theirs = dtype_name(part.dtype), dtype_name(saved.dtype)
        return f"{name} is {theirs} in it and {ours} in this run: whole numbers are never cast; load another checkpoint"
    return None


def _weight_shape(tensor: Kind | TensorBox) -> tuple[int, ...]:
    """Return the shape of a tensor without its axis of replicas."""
    return tensor.shape if tensor.relayout is None else tensor.shape[1:]


def _check_all_used(
    manifest: Manifest,
    ours: set[str],
    readers: Group,
    device: torch.device,
    path: AnyPath,
    prefixes: tuple[str, ...],
    optional: Container[str],
) -> None:
    """Raise CheckpointError on every rank of the readers if the checkpoint holds a tensor that none of them loads."""
    names = {name: plain_name(name) for name in manifest.tensors if not is_extra(name)}
    names = {name: plain for name, plain in names.items() if plain.startswith(prefixes) and plain not in optional}
    ours = ours | {MODEL + name.removeprefix(MASTER) for name in ours if name.startswith(MASTER)}
    used = torch.tensor([plain in ours for plain in names.values()], dtype=torch.int32, device=device)
    flags = collectives.all_reduce_(used, readers, "max").tolist()
    unused = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if unused:
        problems = [f"{name} {list(manifest.tensors[name].shape)} has no place in this run's model" for name in unused]
        raise CheckpointError(f"loading {path} failed: it is from another model:\n{_listed(problems)}")


@torch.no_grad()
def _begin_masters(optimizer: Optimizer) -> None:
    """Let master weights begin with the weights."""
    for part in optimizer.slices():
        if (master := part.tensors.get("master")) is not None:
            master.copy_(part.values)


def _begin_means(optimizer: Optimizer, loaded: Manifest | None) -> None:
    """Let the means of weights begin with the weights, but for those that a checkpoint had; `loaded`: its manifest."""
    for part in optimizer.slices():
        if (mean := part.tensors.get(EMA)) is not None:
            names = [f"{OPTIMIZER}{EMA}/{piece.tensor.name}" for piece in part.parameter.sharding.pieces]
            if loaded is None or not loaded.tensors.keys() >= {*names}:
                mean.copy_(part.tensors.get("master", part.values))


@torch.no_grad()
def _zero_the_rest(module: nn.Module, optimizer: Optimizer | None, state: bool) -> None:
    """Set all values to zero that are not loaded: padding and, without `state`, the whole optimizer state.

    State with a placement of its own is reset to its initial values, even if it is loaded later.
    """
    for _, own in held_states(module, optimizer):
        own.begin()
    for buckets in optimizer.bucket_states.values() if optimizer is not None else ():
        for flat in chain.from_iterable(buckets):
            flat.zero_()
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
