"""Proof, without running processes, that a step computes everything once and in order, and does not deadlock."""

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
    """Collective operation of several ranks. Its name is unique among their collectives."""

    name: str
    ranks: tuple[int, ...]
    """Pipeline ranks."""

    def __str__(self) -> str:
        return self.name


def check(
    stages: Stages,
    lists: Sequence[Sequence[Action]],
    micro_batches: int,
    reductions: Reductions | None = None,
    *,
    backward: bool = True,
    after_list: Sequence[Sequence[Collective]] = (),
) -> None:
    """Prove one step of a pipeline from the lists of all its ranks.

    The proof shows four facts. Every stage processes each micro-batch once, in an order that gives the same sums under
    every schedule. Each message is sent once, and messages are received in the order in which they are sent. Gradients
    are reduced when they are complete, as `reductions` requires. There is no deadlock, whether or not a send blocks
    until its receive is posted. `after_list`: each rank's collectives with other pipeline ranks after its list, in
    order.

    Collectives between data-parallel pipelines, inside actions, need no separate proof if all these pipelines have the
    same lists: data-parallel ranks then reach each collective after the same actions.

    Raises ScheduleError; the message names rank, action and stage.
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


@dataclass(frozen=True)
class _Step:
    """Facts that are the same for all ranks."""

    stages: Stages
    micro_batches: int
    reductions: Reductions | None
    backward: bool

    def reduced(self) -> range:
        """Return the micro-batches after which the gradients of a chunk are reduced."""
        if self.reductions is None:
            return range(0)
        return range(0 if self.reductions.per_micro_batch else self.micro_batches - 1, self.micro_batches)


def _say(stages: Sequence[int], at: object) -> str:
    """Return the current position of a rank as text: an action with its stage."""
    return f"{at} (stage {stages[at.chunk]})" if isinstance(at, Action) else str(at)


class _Message(NamedTuple):
    """Messages that one kind of action of a chunk sends or receives."""

    peer: int
    edge: Communicator
    way: Kind
    """F for hidden states, B for gradients (also those of I)."""
    first: int
    """Number of the message of micro-batch 0. Every stage and every micro-batch has its own numbers."""


class _Rank:
    """Actions that a rank has completed so far, and its communication program."""

    def __init__(self, step: _Step, rank: int) -> None:
        self._step, self._rank = step, rank
        self._stage = own = step.stages.of_rank(rank)
        self._ends = {end: [_other_end(step.stages, stage, *end) for stage in own] for end in set(_OTHER_ENDS.values())}
        self._messages = {kind: [self._message(kind, chunk) for chunk in range(len(own))] for kind in _OTHER_ENDS}
        # By kind and chunk, then by micro-batch. I counts as B; B counts as B and W. The value is a receive's number.
        self._done: dict[tuple[Kind, int], dict[int, int | None]] = defaultdict(dict)
        self._say = partial(_say, own)
        self.program = Program(f"rank {rank}", self._say)

    def take(self, action: Action) -> None:
        kind, micro_batch, chunk, _ = self._at = action
        if not (0 <= chunk < len(self._stage) and 0 <= micro_batch < self._step.micro_batches):
            raise ScheduleError(f"{self.program.name} at {action}: there is no such micro-batch or chunk")
        done = self._done["B" if kind == "I" else kind, chunk]
        if micro_batch in done:
            self._refuse("it has been done before")
        done[micro_batch] = _TAKE[kind.split()[0]](self, action)

    def end(self, after_list: Sequence[Collective]) -> None:
        """Require that no action is missing, wait for all communication, then run the collectives after the list."""
        for chunk in range(len(self._stage)):
            for action in self._required(chunk):
                if action.micro_batch not in self._done[action.kind, chunk]:
                    raise ScheduleError(f"{self.program.name}: {self._say(action)} is missing")
        for communicator, begun in self.program.begun.items():
            self.program.wait(communicator, len(begun), "the end of its list")
        for collective in after_list:
            self._together(Communicator(collective.ranks), collective.name, collective)

    def _required(self, chunk: int) -> Iterator[Action]:
        """Yield the actions of a chunk that may be missing. Receives cannot be: computations require them."""
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

    def _forward(self, action: Action) -> None:
        self._need("F", action, self._ends[True, "F"][action.chunk])

    def _backward(self, action: Action) -> None:
        """Raise ScheduleError for a backward, B or I, that its forward, order or gradients do not allow."""
        kind, m, chunk, _ = action
        if not self._step.backward:
            self._refuse("evaluation has no backward")
        if m > 0 and m - 1 not in self._done["B", chunk]:
            self._refuse(f"micro-batch {m - 1} of this chunk has not had its backward")
        if m not in self._done["F", chunk]:
            self._refuse("it has not had its forward")
        self._need("B", action, self._ends[False, "B"][chunk])
        if kind == "B":
            self._weights_done(action)
            self._done["W", chunk][m] = None

    def _weight_gradients(self, action: Action) -> None:
        if action.micro_batch not in self._done["B", action.chunk]:
            self._refuse("its I has not been done")
        self._weights_done(action)

    def _weights_done(self, action: Action) -> None:
        m, chunk = action.micro_batch, action.chunk
        if m > 0 and m - 1 not in self._done["W", chunk]:
            self._refuse(f"the weight gradients of micro-batch {m - 1} of this chunk have not been given")

    def _reduce(self, action: Action) -> None:
        m, chunk = action.micro_batch, action.chunk
        if m not in self._step.reduced():
            self._refuse("none is due after this micro-batch")
        if m not in self._done["W", chunk]:
            self._refuse("its weight gradients have not been given")
        if m + 1 in self._done["W", chunk]:
            self._refuse("the next micro-batch has given weight gradients already")

    def _need(self, way: Kind, action: Action, giver: tuple[int, int] | None) -> None:
        """Require the message that a computation uses, from another rank or another chunk of the same rank."""
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
        elif action.micro_batch not in self._done[way, chunk]:
            self._refuse(f"chunk {chunk} of this rank, stage {self._stage[chunk]}, has not produced its message")

    def _receive(self, action: Action) -> int:
        message = self._other_end(action)
        return self.program.begin(message.edge, message.first + action.micro_batch, action)

    def _send(self, action: Action) -> None:
        """Block until the receive is posted: a step that ends under this assumption also ends if sends do not block."""
        message = self._other_end(action)
        if action.micro_batch not in self._done[message.way, action.chunk]:
            self._refuse("the action that produces it has not been done")
        self._together(message.edge, message.first + action.micro_batch, action)

    def _free(self, action: Action) -> None:
        self._other_end(action)
        send: Kind = "send F" if action.kind == "free F" else "send B"
        if action.micro_batch not in self._done[send, action.chunk]:
            self._refuse("its send has not started")

    def _message(self, kind: Kind, chunk: int) -> _Message | None:
        """Return the message of an action; None if nothing is sent, or it stays on the rank."""
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
    """Return rank and chunk of the previous or next stage; None if no message passes between the two this way."""
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
"""Other end of each kind of message (True: the previous stage), and the direction of the message."""

_TAKE: dict[str, Callable[[_Rank, Action], int | None]] = {
    "F": _Rank._forward,
    "B": _Rank._backward,
    "I": _Rank._backward,
    "W": _Rank._weight_gradients,
    "R": _Rank._reduce,
    "receive": _Rank._receive,
    "send": _Rank._send,
    "free": _Rank._free,
}
"""Check for each kind of action, by the first word of the kind."""
