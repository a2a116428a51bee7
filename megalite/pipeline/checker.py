"""Proves, without processes, that the lists of a step compute each thing once, in order, and end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn

from megalite.pipeline.deadlock import Communicator, Program, run
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages


@dataclass(frozen=True)
class Collective:
    """Collective operation of several ranks, by a name that no other of theirs has."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the pipeline."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Report:
    """Peaks of each rank: the largest numbers at one time."""

    activations: tuple[int, ...]
    """Forwards of all chunks whose B or W has not run."""
    activations_of_chunks: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]
    """Buffers whose receive is posted and whose computation has not run."""


def check(
    stages: Stages,
    lists: Sequence[Sequence[Action]],
    micro_batches: int,
    reductions: Reductions | None = None,
    *,
    backward: bool = True,
    after_list: Sequence[Sequence[Collective]] = (),
) -> Report:
    """Prove a whole step of a pipeline, from the lists of all its ranks.

    Every stage does each micro-batch once, in an order that gives the same sums whatever the schedule; each message is
    sent once and received in the order in which it is sent; gradients are reduced when they are complete and as
    `reductions` says; and no rank waits for ever, whether a send blocks until its receive is posted or not.
    `after_list`: the collectives of each rank with others of the pipeline after its list, in order.

    Collectives between data-parallel pipelines, inside actions, need no proof of their own if all these pipelines have
    the same lists: data-parallel ranks then reach each collective after the same actions, and none waits for ever.

    Raises ScheduleError, whose message names rank, action and stage.
    """
    if len(lists) != stages.ranks:
        raise ScheduleError(f"{len(lists)} lists are not those of a pipeline of {stages.ranks} ranks")
    step = _Step(stages, micro_batches, reductions, backward)
    ranks = [_Rank(step, rank) for rank in range(stages.ranks)]
    for number, (rank, actions) in enumerate(zip(ranks, lists, strict=True)):
        for action in actions:
            rank.take(action)
        rank.end(after_list[number] if after_list else ())
    run([rank.program for rank in ranks])
    return Report(
        tuple(rank.most_kept[-1] for rank in ranks),
        tuple(tuple(rank.most_kept[:-1]) for rank in ranks),
        tuple(rank.most_receives for rank in ranks),
    )


@dataclass(frozen=True)
class _Step:
    """Facts that are the same for all ranks."""

    stages: Stages
    micro_batches: int
    reductions: Reductions | None
    backward: bool

    def reduced(self) -> range:
        """The micro-batches after which a chunk's gradients are reduced."""
        if self.reductions is None:
            return range(0)
        return range(0 if self.reductions.per_micro_batch else self.micro_batches - 1, self.micro_batches)


def _say(stages: Sequence[int], at: object) -> str:
    """Return what a rank is at: an action with its stage."""
    return f"{at} (stage {stages[at.chunk]})" if isinstance(at, Action) else str(at)


class _Message(NamedTuple):
    """Messages of one kind of action of a chunk."""

    peer: int
    edge: Communicator
    way: Kind
    """Hidden states travel with F; gradients with B, or I."""
    first: int
    """The number of the message for micro-batch 0; those of other stages, and of later micro-batches, differ."""


class _Rank:
    """Actions that a rank has done so far, and its program of communication."""

    def __init__(self, step: _Step, rank: int) -> None:
        self._step, self._rank = step, rank
        self._stage = own = step.stages.of_rank(rank)
        self._ends = {end: [_other_end(step.stages, stage, *end) for stage in own] for end in set(_OTHER_ENDS.values())}
        self._messages = {kind: [self._message(kind, chunk) for chunk in range(len(own))] for kind in _OTHER_ENDS}
        # By kind and chunk, then by micro-batch; I counts as B, and B as W too. The number is that of the receive.
        self._done: dict[tuple[Kind, int], dict[int, int]] = defaultdict(dict)
        self._kept, self._receives = [0] * (len(own) + 1), 0
        self._say = partial(_say, own)
        self.program = Program(f"rank {rank}", self._say)
        self.most_kept, self.most_receives = [0] * (len(own) + 1), 0
        """Forwards by chunk and, last, of all chunks."""

    def take(self, action: Action) -> None:
        kind, micro_batch, chunk, _ = self._at = action
        if not (0 <= chunk < len(self._stage) and 0 <= micro_batch < self._step.micro_batches):
            raise ScheduleError(f"{self.program.name} at {action}: there is no such micro-batch or chunk")
        done = self._done["B" if kind == "I" else kind, chunk]
        if micro_batch in done:
            self._refuse("it has been done before")
        done[micro_batch] = _TAKE[kind.split()[0]](self, action)

    def end(self, after_list: Sequence[Collective]) -> None:
        """Require that everything has been done, wait for what was begun, then run the collectives after the list."""
        for chunk in range(len(self._stage)):
            for action in self._required(chunk):
                if action.micro_batch not in self._done[action.kind, chunk]:
                    raise ScheduleError(f"{self.program.name}: {self._say(action)} is missing")
        for communicator, begun in self.program.begun.items():
            self.program.wait(communicator, len(begun), "the end of its list")
        for collective in after_list:
            self._together(Communicator(collective.ranks), collective.name, collective)

    def _required(self, chunk: int) -> Iterator[Action]:
        """Yield the actions of a chunk in a step that may be missing; receives cannot, as computations require them."""
        kinds: list[Kind] = ["F"]
        if self._messages["send F"][chunk] is not None:
            kinds += ["send F", "free F"]
        if self._step.backward:
            kinds += ["B", "W"]
            if self._messages["send B"][chunk] is not None:
                kinds += ["send B", "free B"]
        for kind in kinds:
            if len(self._done[kind, chunk]) < self._step.micro_batches:
                yield from (Action(kind, m, chunk) for m in range(self._step.micro_batches))
        yield from (Action("R", m, chunk) for m in self._step.reduced())

    def _forward(self, action: Action) -> int:
        self._need("F", action, self._ends[True, "F"][action.chunk])
        for place in (action.chunk, -1):
            self._kept[place] += 1
            self.most_kept[place] = max(self.most_kept[place], self._kept[place])
        return 0

    def _backward(self, action: Action) -> int:
        kind, m, chunk, _ = action
        if not self._step.backward:
            self._refuse("evaluation has no backward")
        if m > 0 and m - 1 not in self._done["B", chunk]:
            self._refuse(f"micro-batch {m - 1} of this chunk has not had its backward")
        if m not in self._done["F", chunk]:
            self._refuse("it has not had its forward")
        self._need("B", action, self._ends[False, "B"][chunk])
        if kind == "B":
            self._done["W", chunk][m] = self._weights_done(action)
        return 0

    def _weight_gradients(self, action: Action) -> int:
        if action.micro_batch not in self._done["B", action.chunk]:
            self._refuse("its I has not been done")
        return self._weights_done(action)

    def _weights_done(self, action: Action) -> int:
        m, chunk = action.micro_batch, action.chunk
        if m > 0 and m - 1 not in self._done["W", chunk]:
            self._refuse(f"the weight gradients of micro-batch {m - 1} of this chunk have not been given")
        self._kept[chunk] -= 1
        self._kept[-1] -= 1
        return 0

    def _reduce(self, action: Action) -> int:
        m, chunk = action.micro_batch, action.chunk
        if m not in self._step.reduced():
            self._refuse("none is due after this micro-batch")
        if m not in self._done["W", chunk]:
            self._refuse("its weight gradients have not been given")
        if m + 1 in self._done["W", chunk]:
            self._refuse("the next micro-batch has given weight gradients already")
        return 0

    def _need(self, way: Kind, action: Action, giver: tuple[int, int] | None) -> None:
        """Require a computation's message, from another rank or from a chunk of the same rank."""
        if giver is None:
            return
        rank, chunk = giver
        if rank != self._rank:
            receive: Kind = "receive F" if way == "F" else "receive B"
            number = self._done[receive, action.chunk].get(action.micro_batch)
            message = self._messages[receive][action.chunk]
            if number is None or message is None:
                self._refuse("the receive of its message has not been posted")
            self.program.wait(message.edge, number, action)
            self._receives -= 1
        elif action.micro_batch not in self._done[way, chunk]:
            self._refuse(f"chunk {chunk} of this rank, stage {self._stage[chunk]}, has not produced its message")

    def _receive(self, action: Action) -> int:
        message = self._other_end(action)
        self._receives += 1
        self.most_receives = max(self.most_receives, self._receives)
        return self.program.begin(message.edge, message.first + action.micro_batch, action)

    def _send(self, action: Action) -> int:
        """Take a send to block until its receive is posted: a step that ends then also ends if sends do not block."""
        message = self._other_end(action)
        if action.micro_batch not in self._done[message.way, action.chunk]:
            self._refuse("the action that produces it has not been done")
        self._together(message.edge, message.first + action.micro_batch, action)
        return 0

    def _free(self, action: Action) -> int:
        self._other_end(action)
        send: Kind = "send F" if action.kind == "free F" else "send B"
        if action.micro_batch not in self._done[send, action.chunk]:
            self._refuse("its send has not started")
        return 0

    def _message(self, kind: Kind, chunk: int) -> _Message | None:
        """Return the message of an action; None if nothing is sent, or only within the rank."""
        _, way = end = _OTHER_ENDS[kind]
        place = self._ends[end][chunk]
        if place is None or place[0] == self._rank:
            return None
        peer, receives = place[0], kind.startswith("receive")
        edge = Communicator((peer, self._rank) if receives else (self._rank, peer), edge=True)
        giver = self._step.stages.stage(*place) if receives else self._stage[chunk]
        return _Message(peer, edge, way, (2 * giver + (way == "B")) * self._step.micro_batches)

    def _other_end(self, action: Action) -> _Message:
        message = self._messages[action.kind][action.chunk]
        if message is None:
            self._refuse("no message is sent here")
        if action.peer != message.peer:
            self._refuse(f"the other end is rank {message.peer}")
        return message

    def _together(self, communicator: Communicator, operation: Hashable, at: object) -> None:
        self.program.wait(communicator, self.program.begin(communicator, operation, at), at)

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.program.name} at {self._say(self._at)}: {why}")


def _other_end(stages: Stages, stage: int, before: bool, way: Kind) -> tuple[int, int] | None:
    """The rank and chunk of the stage before or after; None if nothing goes this way between the two."""
    first = stage - 1 if before else stage
    if not 0 <= first < stages.count - 1:
        return None
    travels = stages.passes(first) if way == "F" else stages.passes_back(first + 1)
    return stages.place(first if before else first + 1) if travels else None


_OTHER_ENDS: dict[Kind, tuple[bool, Kind]] = {
    "receive F": (True, "F"),
    "send F": (False, "F"),
    "free F": (False, "F"),
    "receive B": (False, "B"),
    "send B": (True, "B"),
    "free B": (True, "B"),
}
"""Other end of each kind of message: True if it is the stage before, and the direction of the message."""

_TAKE: dict[str, Callable[[_Rank, Action], int]] = {
    "F": _Rank._forward,
    "B": _Rank._backward,
    "I": _Rank._backward,
    "W": _Rank._weight_gradients,
    "R": _Rank._reduce,
    "receive": _Rank._receive,
    "send": _Rank._send,
    "free": _Rank._free,
}
"""Checks by the first word of an action's kind."""
