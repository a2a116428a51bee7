"""Proves, without processes, that the lists of a step compute each thing once, in order, and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from megalite.pipeline.lowering import Reductions
from megalite.pipeline.rendezvous import Begin, Communicator, Program, Wait, run
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulator import ScheduleError, peak_in_flight
from megalite.pipeline.stages import Stages

Way = Literal["F", "B"]
"""Hidden states travel with F; gradients with B, or I."""


@dataclass(frozen=True)
class Collective:
    """What ranks do together, by a name that tells it from what else they do."""

    name: str
    ranks: tuple[int, ...]
    """Numbered over all copies of the pipeline, copy after copy."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Report:
    """What each rank keeps at most at one time."""

    activations: tuple[int, ...]
    """Forwards over all chunks whose B or W is to come."""
    activations_of_chunks: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]
    """Buffers whose receive is posted and whose computation is to come."""


def check(
    stages: Stages,
    lists: Sequence[Sequence[Action]],
    micro_batches: int,
    reductions: Reductions | None = None,
    *,
    backward: bool = True,
    inside: Mapping[Kind, Sequence[str]] | None = None,
    behind: Sequence[Sequence[Collective]] = (),
) -> Report:
    """Prove a whole step of one or more data-parallel copies of a pipeline, from the lists of all their ranks, copy
    after copy.

    Every stage does each micro-batch once, in an order that gives the same sums whatever the schedule; each message is
    sent once and received in the order in which it is sent; gradients are reduced when they are whole and as
    `reductions` says; and no communication is waited for for ever, whether a send blocks until its receive is posted or
    not. `inside` names what copies do together, in order, in every action of a kind (ZeRO 3's gathers); `behind`
    is what each rank does with others behind its list, in order.

    Raises ScheduleError, whose message names rank, action and stage.
    """
    copies, more = divmod(len(lists), stages.ranks)
    if more or not copies:
        raise ScheduleError(f"{len(lists)} lists are not those of whole pipelines of {stages.ranks} ranks")
    step = _Step(stages, copies, micro_batches, reductions, backward, inside or {})
    ranks = [_Rank(step, *divmod(number, stages.ranks)) for number in range(len(lists))]
    for number, (rank, actions) in enumerate(zip(ranks, lists, strict=True)):
        for action in actions:
            rank.take(action)
        rank.end(behind[number] if behind else ())
    programs = [Program(rank.name, rank.events) for rank in ranks]
    for rendezvous in (True, False):
        run(programs, rendezvous=rendezvous)
    return Report(
        tuple(peak_in_flight(actions) for actions in lists),
        tuple(tuple(_peak_of_chunk(actions, chunk) for chunk in range(stages.chunks)) for actions in lists),
        tuple(rank.most_receives for rank in ranks),
    )


def _peak_of_chunk(actions: Sequence[Action], chunk: int) -> int:
    return peak_in_flight([action for action in actions if action.chunk == chunk])


class _At(NamedTuple):
    action: Action
    stage: int

    def __str__(self) -> str:
        return f"{self.action} (stage {self.stage})"


@dataclass(frozen=True)
class _Step:
    """What is the same for all ranks."""

    stages: Stages
    copies: int
    micro_batches: int
    reductions: Reductions | None
    backward: bool
    inside: Mapping[Kind, Sequence[str]]

    def reduced(self) -> range:
        """The micro-batches behind which a chunk's gradients are reduced."""
        if self.reductions is None:
            return range(0)
        return range(0 if self.reductions.each else self.micro_batches - 1, self.micro_batches)


class _Rank:
    """What a rank has done so far of its list, action by action, and its program."""

    def __init__(self, step: _Step, copy: int, rank: int) -> None:
        stages = step.stages
        own = stages.of_rank(rank)
        self._step = step
        self._rank = rank
        self._first_of_copy = copy * stages.ranks
        self._copies = Communicator(tuple(range(rank, step.copies * stages.ranks, stages.ranks)))
        self._stage = own
        # Where a chunk's messages come from and go to, by rank and chunk; None: there is none.
        self._giver: dict[Way, list[tuple[int, int] | None]] = {
            "F": [stages.place(stage - 1) if stage and stages.passes(stage - 1) else None for stage in own],
            "B": [stages.place(stage + 1) if stages.passes_back(stage + 1) else None for stage in own],
        }
        self._taker: dict[Way, list[tuple[int, int] | None]] = {
            "F": [stages.place(stage + 1) if stages.passes(stage) else None for stage in own],
            "B": [stages.place(stage - 1) if stages.passes_back(stage) else None for stage in own],
        }
        # By kind, micro-batch and chunk; I counts as B, and B as W too. The number is that of the operation begun.
        self._done: dict[tuple[Kind, int, int], int] = {}
        self._begun: Counter[Communicator] = Counter()
        self._receives = 0
        self.name = f"rank {rank}" if step.copies == 1 else f"rank {rank} of copy {copy}"
        self.events: list[Begin | Wait] = []
        self.most_receives = 0

    def take(self, action: Action) -> None:
        if not (0 <= action.chunk < len(self._stage) and 0 <= action.micro_batch < self._step.micro_batches):
            raise ScheduleError(f"{self.name} at {action}: there is no such micro-batch or chunk")
        self._at = _At(action, self._stage[action.chunk])
        kind: Kind = "B" if action.kind == "I" else action.kind
        if (kind, action.micro_batch, action.chunk) in self._done:
            self._refuse("it has been done before")
        number = 0
        match kind:
            case "F":
                self._need("F", action, self._giver["F"][action.chunk])
            case "B":
                self._backward(action)
            case "W":
                self._weight_gradients(action)
            case "R":
                number = self._reduce(action)
            case "receive F" | "receive B":
                number = self._receive(action)
            case "send F" | "send B":
                number = self._send(action)
            case "free F" | "free B":
                self._free(action)
        self._done[kind, action.micro_batch, action.chunk] = number

    def end(self, behind: Sequence[Collective]) -> None:
        """Everything must have been done; then what was begun is waited for, and what comes behind it done."""
        for chunk, stage in enumerate(self._stage):
            for action in self._whole(chunk):
                if (action.kind, action.micro_batch, chunk) not in self._done:
                    raise ScheduleError(f"{self.name}: {_At(action, stage)} is missing")
        for communicator, number in self._begun.items():
            self.events.append(Wait(communicator, number, "the end of its list"))
        for collective in behind:
            self._together(Communicator(collective.ranks), collective.name, collective)

    def _whole(self, chunk: int) -> Iterator[Action]:
        """What a chunk does in a whole step, but for receives: without them it could not have done it."""
        before, after = self._taker["B"][chunk], self._taker["F"][chunk]
        kinds: list[Kind] = ["F"]
        if after is not None and after[0] != self._rank:
            kinds += ["send F", "free F"]
        if self._step.backward:
            kinds += ["B", "W"]
            if before is not None and before[0] != self._rank:
                kinds += ["send B", "free B"]
        for kind in kinds:
            yield from (Action(kind, m, chunk) for m in range(self._step.micro_batches))
        yield from (Action("R", m, chunk) for m in self._step.reduced())

    def _backward(self, action: Action) -> None:
        m, chunk = action.micro_batch, action.chunk
        if not self._step.backward:
            self._refuse("evaluation does not go backward")
        if m > 0 and ("B", m - 1, chunk) not in self._done:
            self._refuse(f"micro-batch {m - 1} of this chunk has not gone backward")
        if ("F", m, chunk) not in self._done:
            self._refuse("it has not gone forward")
        self._need("B", action, self._giver["B"][chunk])
        if action.kind == "B":
            self._weights_done(action)

    def _weight_gradients(self, action: Action) -> None:
        if ("B", action.micro_batch, action.chunk) not in self._done:
            self._refuse("its I has not been done")
        self._inside(action)
        self._weights_done(action)

    def _weights_done(self, action: Action) -> None:
        m, chunk = action.micro_batch, action.chunk
        if m > 0 and ("W", m - 1, chunk) not in self._done:
            self._refuse(f"the weight gradients of micro-batch {m - 1} of this chunk have not been given")
        self._done["W", m, chunk] = 0

    def _reduce(self, action: Action) -> int:
        m, chunk = action.micro_batch, action.chunk
        if m not in self._step.reduced():
            self._refuse("none is due behind this micro-batch")
        if ("W", m, chunk) not in self._done:
            self._refuse("its weight gradients have not been given")
        if ("W", m + 1, chunk) in self._done:
            self._refuse("the next micro-batch has given weight gradients already")
        number = self._begin(self._copies, ("R", m, chunk), self._at)
        self.events.append(Wait(self._copies, number, self._at, rendezvous=True))
        return number

    def _need(self, way: Way, action: Action, giver: tuple[int, int] | None) -> None:
        """What a computation begins with: its message, from another rank or from a chunk of its own."""
        if giver is not None and giver[0] != self._rank:
            receive: Kind = "receive F" if way == "F" else "receive B"
            number = self._done.get((receive, action.micro_batch, action.chunk))
            if number is None:
                self._refuse("the receive of its message has not been posted")
            self.events.append(Wait(self._edge(giver[0], self._rank), number, self._at))
            self._receives -= 1
        elif giver is not None and (way, action.micro_batch, giver[1]) not in self._done:
            self._refuse(f"chunk {giver[1]} of this rank, stage {self._stage[giver[1]]}, has not given its message")
        self._inside(action)

    def _receive(self, action: Action) -> int:
        peer, chunk = self._other_end(action)
        self._receives += 1
        self.most_receives = max(self.most_receives, self._receives)
        message = _way(action), self._step.stages.stage(peer, chunk), action.micro_batch
        return self._begin(self._edge(peer, self._rank), message, self._at)

    def _send(self, action: Action) -> int:
        edge = self._edge(self._rank, self._other_end(action)[0])
        way = _way(action)
        if (way, action.micro_batch, action.chunk) not in self._done:
            self._refuse("the action that gives it has not been done")
        number = self._begin(edge, (way, self._stage[action.chunk], action.micro_batch), self._at)
        self.events.append(Wait(edge, number, self._at, rendezvous=True))
        return number

    def _free(self, action: Action) -> None:
        edge = self._edge(self._rank, self._other_end(action)[0])
        send: Kind = "send F" if action.kind == "free F" else "send B"
        number = self._done.get((send, action.micro_batch, action.chunk))
        if number is None:
            self._refuse("its send has not started")
        self.events.append(Wait(edge, number, self._at))

    def _other_end(self, action: Action) -> tuple[int, int]:
        """The rank and chunk at the other end of a message."""
        place = (self._giver if action.kind.startswith("receive") else self._taker)[_way(action)][action.chunk]
        if place is None or place[0] == self._rank:
            self._refuse("nothing travels here")
        if action.peer != place[0]:
            self._refuse(f"the other end is rank {place[0]}")
        return place

    def _inside(self, action: Action) -> None:
        for name in self._step.inside.get(action.kind, ()):
            self._together(self._copies, (name, action.kind, action.micro_batch, action.chunk), self._at)

    def _together(self, communicator: Communicator, operation: Hashable, at: object) -> None:
        self.events.append(Wait(communicator, self._begin(communicator, operation, at), at))

    def _begin(self, communicator: Communicator, operation: Hashable, at: object) -> int:
        """How many operations of the communicator this rank has begun with this one."""
        self.events.append(Begin(communicator, operation, at))
        self._begun[communicator] += 1
        return self._begun[communicator]

    def _edge(self, sender: int, receiver: int) -> Communicator:
        return Communicator((self._first_of_copy + sender, self._first_of_copy + receiver), edge=True)

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.name} at {self._at}: {why}")


def _way(action: Action) -> Way:
    return "F" if action.kind.endswith("F") else "B"
