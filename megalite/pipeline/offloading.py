"""Copies of activations to the host and back: declared from the action list of a rank, and proved.

A layer's buffers are in slots, as many as its chunk has micro-batches between forward and backward at once. The engine
gives each forward the lowest slot that is free (`slots`), and the layers copy as `declared` says
(`offload/activations.py`).

Each layer comes back one layer ahead: while the backward of the offloaded layer after it runs, or of those after it
that are not offloaded. Where a chunk's last layer is offloaded, it comes back during the computation before the
backward (`ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from megalite.offload.transfers import Direction
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError


class Transfer(NamedTuple):
    """Copy of all that a layer saves for backward.

    Attributes:
        layer: number of the layer in its chunk.
        slot: which of the layer's sets of host buffers.
        after: index of the action in which it begins: that of the forward, that of the backward, or the computation
            before this one.
        before: index of the action that reads its result, and before which it must have ended: that of the backward.
    """

    direction: Direction
    chunk: int
    layer: int
    micro_batch: int
    slot: int
    after: int
    before: int

    def __str__(self) -> str:
        where = f"layer {self.layer} of chunk {self.chunk}, micro-batch {self.micro_batch}"
        return f"copy {self.direction} of {where}, slot {self.slot}"


def slots(actions: Iterable[Action]) -> dict[tuple[int, int], int]:
    """Return the slot of each forward of a list that has a backward, by chunk and micro-batch."""
    actions = list(actions)
    ends = {(action.chunk, action.micro_batch) for action in actions if action.kind in ("B", "I")}
    found: dict[tuple[int, int], int] = {}
    used: dict[int, set[int]] = {}
    for action in actions:
        key, in_use = (action.chunk, action.micro_batch), used.setdefault(action.chunk, set())
        if action.kind == "F" and key in ends:
            found[key] = next(slot for slot in range(len(in_use) + 1) if slot not in in_use)
            in_use.add(found[key])
        elif action.kind in ("B", "I"):
            in_use.discard(found[key])
    return found


def ahead(
    actions: Sequence[Action], of_slots: Mapping[tuple[int, int], int], ends: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Return the backwards whose last layer comes back during the computation before them, by the index of that one.

    Where it is the forward of the same micro-batch, there is no time ahead: the layer comes back with the backward.

    Args:
        actions: the list of the rank.
        of_slots: the slot of each forward.
        ends: chunks whose last layer is offloaded.

    Returns:
        Chunk and micro-batch of these backwards.
    """
    found: dict[int, tuple[int, int]] = {}
    before = -1, (-1, -1)
    for index, (kind, micro_batch, chunk, _) in enumerate(actions):
        key = chunk, micro_batch
        if kind in ("B", "I") and chunk in ends and key in of_slots and before[1] != key:
            found[before[0]] = key
        if kind in ("F", "B", "I", "W"):
            before = index, key
    return found


def declared(
    actions: Sequence[Action],
    layers: Sequence[Sequence[int]],
    of_slots: Mapping[tuple[int, int], int],
    ends: Collection[int] = (),
) -> list[Transfer]:
    """Return the copies of a step in the order in which they begin.

    Args:
        actions: the list of the rank.
        layers: numbers of the offloaded layers of each chunk, ascending.
        of_slots: the slot of each forward.
        ends: chunks whose last layer is offloaded.
    """
    early = ahead(actions, of_slots, ends)
    came_early = set(early.values())
    backward = {(a.chunk, a.micro_batch): index for index, a in enumerate(actions) if a.kind in ("B", "I")}
    found: list[Transfer] = []

    def begin(direction: Direction, own: Iterable[int], key: tuple[int, int], index: int) -> None:
        chunk, micro_batch = key
        found.extend(
            Transfer(direction, chunk, layer, micro_batch, of_slots[key], index, backward[key]) for layer in own
        )

    for index, (kind, micro_batch, chunk, _) in enumerate(actions):
        key, next_one = (chunk, micro_batch), early.get(index)
        if kind in ("B", "I") and key in of_slots:
            begin("to device", reversed(layers[chunk][:-1] if key in came_early else layers[chunk]), key, index)
        if next_one is not None:  # after the layers of the action itself, which are needed before
            begin("to device", layers[next_one[0]][-1:], next_one, index)
        if kind == "F" and key in of_slots:
            begin("to host", layers[chunk], key, index)
    return found


def check_transfers(
    actions: Sequence[Action], layers: Sequence[Sequence[int]], transfers: Sequence[Transfer]
) -> list[Transfer]:
    """Prove the copies of a step; return them.

    Buffers are written only after what they held has come back and has been read, and each backward has what all its
    layers saved.

    Raises ScheduleError; the message names the copy.
    """
    held: dict[tuple[int, int, int], Transfer] = {}
    came: dict[tuple[int, int, int], Transfer] = {}
    left: dict[tuple[int, int, int], Transfer] = {}
    last = 0
    for transfer in transfers:
        _, chunk, layer, micro_batch, slot, after, before = transfer
        buffer = chunk, layer, slot
        if after < last:
            raise ScheduleError(f"{transfer}: it begins before an earlier one")
        last = after
        if transfer.direction == "to host":
            if (other := held.get(buffer)) is not None:
                raise ScheduleError(f"{transfer}: its buffer still has micro-batch {other.micro_batch}")
            if (other := left.get(buffer)) is not None and other.before >= after:
                raise ScheduleError(f"{transfer}: what its buffer had of micro-batch {other.micro_batch} is still read")
            held[buffer] = transfer
        else:
            sent = held.pop(buffer, None)
            if sent is None or sent.micro_batch != micro_batch or sent.after >= after:
                raise ScheduleError(f"{transfer}: its buffer does not have what it copies")
            came[chunk, layer, micro_batch] = left[buffer] = transfer
            if after > before:
                raise ScheduleError(f"{transfer}: action {before} reads it, and action {after} begins it")
    for transfer in held.values():
        raise ScheduleError(f"{transfer}: it does not come back")
    for index, action in enumerate(actions):
        for layer in layers[action.chunk] if action.kind in ("B", "I") else ():
            found = came.get((action.chunk, layer, action.micro_batch))
            if found is None or found.before != index:
                raise ScheduleError(f"{action}: what layer {layer} saved has not come back")
    return list(transfers)


def proved(actions: Sequence[Action], layers: Sequence[Sequence[int]], ends: Collection[int] = ()) -> list[Transfer]:
    """Return the copies of a step of a rank, proved; the arguments are those of `declared`. Raises ScheduleError."""
    return check_transfers(actions, layers, declared(actions, layers, slots(actions), ends))
