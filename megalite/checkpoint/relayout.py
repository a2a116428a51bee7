"""Axes of replicas: how a part gets one, and from which saved values it is read if their number has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megalite.checkpoint.manifest import MODEL, OPTIMIZER, REPLICA, Manifest, SavedTensor, plain_name, split_name
from megalite.checkpoint.tensors import TensorBox
from megalite.errors import CheckpointError
from megalite.optim.replica import ANCHOR, OPTIONAL_STATE, Relayout, Replica, sources
from megalite.optim.weight_mean import EMA
from megalite.parallel.sharding import Box

_DONE = {"sum": "summed into", "average": "averaged into", "drop": "dropped, and start as zeros for"}


def with_replica(part: TensorBox, replica: Replica | None) -> TensorBox:
    """Return a part as that of a replica; unchanged if all replicas have the same values."""
    if replica is None:
        return part
    name, shape = REPLICA + part.name, (replica.count, *part.shape)
    return TensorBox(name, shape, part.dtype, _in_replica(part.box, replica.index), relayout=replica.relayout)


def without_replica(part: TensorBox) -> TensorBox:
    """Return a part without its axis of replicas."""
    if part.relayout is None:
        return part
    return TensorBox(plain_name(part.name), part.shape[1:], part.dtype, _without_axis(part.box))


def _in_replica(box: Box, index: int) -> Box:
    return Box((index, *box.offset), (1, *box.size))


def _without_axis(box: Box) -> Box:
    return Box(box.offset[1:], box.size[1:])


def is_extra(tensor: str) -> bool:
    """Return whether a tensor is extra state, which a checkpoint or a run may lack."""
    plain = plain_name(tensor)
    return plain.startswith(OPTIMIZER) and plain.split("/")[1] in OPTIONAL_STATE


@dataclass(frozen=True)
class Origin:
    """Saved values from which a part is read."""

    name: str
    """Name of the saved tensor."""
    boxes: tuple[Box, ...]
    """Boxes of the saved tensor, in the order in which they are added. Without any, the part is zero."""
    mean: bool = False
    """True: the part is their mean; False: their sum."""
    span: Box | None = None
    """Box around the boxes; None if there is at most one."""


def saved_name(manifest: Manifest, plain: str, part: TensorBox, *, state: bool = True) -> str:
    """Return the name under which a tensor is saved. If there is none, return the name that the part has.

    If it is saved with an axis of replicas and without it, a run that continues with its `state` takes the replicas'
    own, and others take what is the same for all.
    """
    names = (REPLICA + plain, plain) if state else (plain, REPLICA + plain)
    return next((name for name in names if name in manifest.tensors), part.name)


def origin(manifest: Manifest, plain: str, part: TensorBox, *, state: bool = True) -> Origin:
    """Return the saved values from which a part is read.

    `plain`: the name of the saved tensor, without an axis of replicas. `state`: see `saved_name`.

    Raises CheckpointError if the tensor's rule refuses another number of replicas.
    """
    name = saved_name(manifest, plain, part, state=state)
    saved = manifest.tensors.get(name)
    if saved is None or (saved.relayout is None and part.relayout is None):
        return Origin(name, (part.box,))
    box = part.box if part.relayout is None else _without_axis(part.box)
    before, now = replicas_of(saved), replicas_of(part)
    rule = part.relayout or saved.relayout
    assert rule is not None
    index = 0 if part.relayout is None else part.box.offset[0]
    try:
        found = sources(before or 1, now or 1, index, rule)
    except ValueError as error:
        raise CheckpointError(
            f"{name} has values of {_count(before)}, and this run has {_count(now)}: they cannot be divided anew. "
            "Give the layout of the run that saved it"
            + (", or --no-load-optim, which begins without optimizer state" if plain.startswith(OPTIMIZER) else "")
        ) from error
    if before is None:  # only a mean of replicas is the value of each of them
        return Origin(name, (box,) if rule == "average" else ())
    span = Box((0, *box.offset), (before, *box.size)) if len(found) > 1 else None
    return Origin(name, tuple(_in_replica(box, replica) for replica in found), rule == "average", span)


def replicas_of(tensor: SavedTensor | TensorBox) -> int | None:
    """Return the number of a tensor's replicas; None if it has no axis for them."""
    return None if tensor.relayout is None else tensor.shape[0]


def _count(replicas: int | None) -> str:
    return "all replicas together" if replicas is None else f"{replicas} replica{'s' * (replicas != 1)}"


def notes(manifest: Manifest, parts: Iterable[TensorBox], *, extra: bool = True) -> tuple[str, ...]:
    """Return a line for each kind of state that a load drops, leaves out, begins or changes to other replicas.

    `parts`: those that a rank loads. `extra`: whether extra state is loaded.
    """
    lines: dict[str, None] = {}
    wanted: set[str] = set()
    for part in parts:
        plain = plain_name(part.name)
        kind = _kind(plain)
        wanted.add(kind)
        saved = manifest.tensors.get(saved_name(manifest, plain, part))
        if saved is None and is_extra(plain):
            begins = "with the weights" if kind in (ANCHOR, EMA) else "as zeros"
            lines[f"note: the checkpoint has no {kind} for some weights: it begins {begins}"] = None
        if saved is not None and (before := replicas_of(saved)) != (now := replicas_of(part)):
            done = _done(part.relayout or saved.relayout, before)
            lines[f"note: {kind} of {_count(before)}: {done} {_count(now)}"] = None
    unused = {_kind(plain_name(name)) for name in manifest.tensors if extra and is_extra(name)} - wanted
    return (*lines, *(f"note: this run has no {kind}: the checkpoint's is left out" for kind in sorted(unused)))


def _kind(plain: str) -> str:
    kind = split_name(plain)[0]
    return "weights" if kind + "/" == MODEL else kind.removeprefix(OPTIMIZER)


def _done(rule: Relayout | None, before: int | None) -> str:
    if before is None:
        return "given to each of" if rule == "average" else _DONE["drop"]
    return _DONE[rule or "drop"]
